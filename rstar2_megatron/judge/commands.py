"""The three commands: serve (HTTP), worker (runs jobs), all (both, and Redis unless one is named)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.queue import JobQueue
from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.judge.tasks import cancel_and_wait
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.services.parent_death import die_with_parent
from rstar2_megatron.services.process import end_child, is_loopback, listen
from rstar2_megatron.services.redis_server import RedisServer, check_redis

log = logging.getLogger("judge")
_READY_TIMEOUT_S = 60.0
_DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
_NICENESS = -10  # of the service's own processes
_SLICE_S = 0.0001  # likewise: they interrupt a call as soon as they need a core


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(number, stop)


def go_before_calls() -> None:
    """As root: let this process and its children have a core as soon as they need one, however busy the calls keep it.

    They use little, and a call, an answer or a heartbeat passes through several of them. Calls themselves run at niceness 0.
    A niceness that the user has chosen stays.
    """
    with contextlib.suppress(PermissionError):
        if os.getpriority(os.PRIO_PROCESS, 0) == 0:
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    with contextlib.suppress(OSError):
        linux.set_slice(_SLICE_S, os.getpriority(os.PRIO_PROCESS, 0))


def _stop_event(arguments: argparse.Namespace) -> asyncio.Event:
    stop = asyncio.Event()
    on_signals(stop.set)
    if arguments.exit_with_parent:
        die_with_parent(signal.SIGTERM)
    return stop


def _redis_of(arguments: argparse.Namespace) -> str:
    """URI of a running Redis. Raises RedisUnavailable."""
    uri = arguments.redis_uri or _DEFAULT_REDIS
    check_redis(uri)
    return str(uri)


async def run_worker(arguments: argparse.Namespace, limits: CallLimits) -> None:
    """Run jobs until a signal, in this process or in several."""
    if arguments.processes > 1:
        return await _run_workers(arguments)
    # Imported here, as the HTTP server below: each process loads only its own part.
    from rstar2_megatron.judge.worker.worker import Worker

    stop, uri = _stop_event(arguments), _redis_of(arguments)
    worker = Worker(
        JobQueue(uri),
        slots=arguments.workers,
        sessions=arguments.sessions,
        session_ttl_s=arguments.session_ttl_s,
        require_isolation=arguments.require_isolation,
        permits=arguments.max_running,
        name=arguments.name,
    )
    await worker.start()
    print(f"judge worker {worker.name}: {worker.pool.count} slots, isolation {worker.level}", flush=True)
    work = asyncio.ensure_future(worker.run())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    await worker.stop(arguments.drain_s)
    await cancel_and_wait(work, stopped)
    if not work.cancelled():
        work.result()  # raises what has ended it


async def _run_workers(arguments: argparse.Namespace) -> None:
    stop, uri = _stop_event(arguments), _redis_of(arguments)
    workers = _Workers(arguments, uri, arguments.drain_s)
    try:
        await workers.wait_until_ready(stop)
        await _until(stop, _keep_running(workers, None))
    finally:
        workers.stop()


async def run_serve(arguments: argparse.Namespace, limits: CallLimits) -> None:
    """Serve HTTP until a signal; workers run elsewhere."""
    stop, sock, uri = _stop_event(arguments), _listen(arguments), _redis_of(arguments)
    async with _http_server(arguments, limits, uri, sock):
        _announce(arguments, sock, uri)
        await stop.wait()


async def run_all(arguments: argparse.Namespace, limits: CallLimits) -> None:
    """Run Redis (unless one is named), one worker process and HTTP. All of them end with this process."""
    stop = _stop_event(arguments)
    sock = _listen(arguments)
    redis_server = None if arguments.redis_uri else RedisServer().start()
    workers: _Workers | None = None
    try:
        uri = redis_server.uri if redis_server else _redis_of(arguments)
        workers = _Workers(arguments, uri, drain_s=0.0)
        async with _http_server(arguments, limits, uri, sock):
            await workers.wait_until_ready(stop)
            if stop.is_set():
                return
            _announce(arguments, sock, uri)
            await _until(stop, _keep_running(workers, redis_server))
            workers.stop()
    finally:
        if workers is not None:
            workers.stop()
        if redis_server is not None:
            redis_server.stop()
        if arguments.port_file:
            Path(arguments.port_file).unlink(missing_ok=True)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or `stop` is set."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _keep_running(workers: _Workers, redis_server: RedisServer | None) -> None:
    """Restart Redis or the worker when it has died."""
    while True:
        await asyncio.sleep(0.1)
        if redis_server is not None and not redis_server.alive():
            log.error("Redis ended: started again on its data")
            await asyncio.to_thread(redis_server.restart)
        for worker in workers.processes:
            if not worker.alive():
                log.error("a worker ended with code %s: started again", worker.process.returncode)
                await worker.replace()


class _WorkerProcess:
    """One of the workers of a node, as a child process."""

    def __init__(self, arguments: argparse.Namespace, uri: str, number: int, drain_s: float) -> None:
        self.arguments = arguments
        self.uri = uri
        self.number = number
        self.drain_s = drain_s
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        command = [sys.executable, "-m", "rstar2_megatron.judge", "worker", "--name", self.name]
        command += ["--drain-s", str(self.drain_s), "--exit-with-parent", "--processes", "1"]
        command += ["--workers", self._share(self.arguments.workers)]
        command += ["--max-running", self._share(self.arguments.max_running, least=1)]
        command += ["--sessions", self._share(self.arguments.sessions)]
        command += ["--session-ttl-s", str(self.arguments.session_ttl_s)]
        command += ["--require-isolation", self.arguments.require_isolation]
        command += ["--log-level", self.arguments.log_level]
        environment = {**os.environ, "REDIS_URI": self.uri}
        return subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[2],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal reaches `all` only, which stops in order
        )

    def _share(self, total: int, least: int = 0) -> str:
        """This process's part of `total`; the parts differ by at most one."""
        count = self.arguments.processes
        return str(max(least, (self.number + 1) * total // count - self.number * total // count))

    def alive(self) -> bool:
        return self.process.poll() is None

    async def wait_until_ready(self, stop: asyncio.Event) -> None:
        """Wait until the worker is registered in Redis. RuntimeError when it ends or takes too long."""
        queue = JobQueue(self.uri)
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while self.name not in (await queue.status())["workers"]:
                    if not self.alive():
                        raise RuntimeError(f"the worker ended with code {self.process.returncode} (see above)")
                    if stop.is_set():
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RuntimeError(f"the worker was not ready in {_READY_TIMEOUT_S:.0f} s") from None
        finally:
            await queue.close()

    async def replace(self) -> None:
        """Put the jobs of the dead worker back into the queue and start another worker."""
        queue = JobQueue(self.uri)
        try:
            await queue.retire(self.name)
            await queue.reap()
        except Exception as error:  # Redis away: the next live worker reaps
            log.warning("putting back the dead worker's jobs failed: %s", error)
        finally:
            await queue.close()
        self.process = self._start()

    def stop(self) -> None:
        end_child(self.process, grace_s=8.0 + self.drain_s)


class _Workers:
    """The worker processes of a node: they share its slots, permits and sessions."""

    def __init__(self, arguments: argparse.Namespace, uri: str, drain_s: float) -> None:
        numbers = range(arguments.processes)
        self.processes = [_WorkerProcess(arguments, uri, number, drain_s) for number in numbers]

    async def wait_until_ready(self, stop: asyncio.Event) -> None:
        for worker in self.processes:
            await worker.wait_until_ready(stop)

    def stop(self) -> None:
        for worker in self.processes:
            if worker.alive():
                worker.process.terminate()
        for worker in self.processes:
            worker.stop()


def _listen(arguments: argparse.Namespace) -> socket.socket:
    linux.raise_open_files()
    if not is_loopback(arguments.host) and not os.environ.get("JUDGE_TOKEN"):
        raise ValueError(
            f"--host {arguments.host} is beyond loopback and the service runs code for whoever asks: "
            "set the environment variable JUDGE_TOKEN, or bind 127.0.0.1"
        )
    return listen(arguments.host, arguments.port)


@contextlib.asynccontextmanager
async def _http_server(arguments: argparse.Namespace, limits: CallLimits, uri: str, sock: socket.socket) -> AsyncIterator[None]:
    import uvicorn

    from rstar2_megatron.judge.server.app import create_app
    from rstar2_megatron.judge.server.connections import BoundedProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self):  # type: ignore[no-untyped-def]
            yield  # this module handles signals

    app = create_app(
        uri, limits, queue_time_limit_s=arguments.queue_time_limit_s, max_queued=arguments.max_queued, cache=arguments.cache
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, timeout_keep_alive=75,
        backlog=2048, http=BoundedProtocol,
    )  # fmt: skip
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while not server.started:
                if serving.done():
                    serving.result()
                    raise RuntimeError("the HTTP server ended at its start")
                await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def _announce(arguments: argparse.Namespace, sock: socket.socket, uri: str) -> None:
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    print(f"judge ready: {url}", flush=True)
    if arguments.port_file:
        write_json(Path(arguments.port_file), {"url": url, "redis_uri": uri, "pid": os.getpid()})
