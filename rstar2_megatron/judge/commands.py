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
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.queue import JobQueue, cancel_and_wait
from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.services.parent_death import die_with_parent
from rstar2_megatron.services.process import PROJECT, end_child, is_loopback, listen
from rstar2_megatron.services.redis_server import RedisServer, check_redis

log = logging.getLogger("judge")
_READY_TIMEOUT_S = 60.0
_NICENESS = -10  # of the service's own processes
_SLICE_S = 0.0001  # likewise: they interrupt a call as soon as they need a core


def on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
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
    """URI of a running Redis. Raises RedisUnavailable, or ValueError where none is named: the usual port's may be another's."""
    uri = str(arguments.redis_uri or "")
    if not uri:
        raise ValueError(
            "serve and worker share a running Redis: name it by --redis-uri or REDIS_URI, redis://:PASSWORD@HOST:6379/0"
        )
    check_redis(uri)
    return uri


async def run_worker(arguments: argparse.Namespace, limits: CallLimits) -> None:
    """Run jobs until a signal, in this process or in several."""
    stop, uri = _stop_event(arguments), _redis_of(arguments)
    if arguments.processes > 1:
        workers = _Workers(arguments, uri, arguments.drain_s)
        try:
            await workers.wait_until_ready(stop)
            await _until(stop, asyncio.ensure_future(workers.keep_running()))
        finally:
            await workers.stop()
        return
    # Imported here, as the HTTP server below: each process loads only its own part.
    from rstar2_megatron.judge.worker.worker import Worker

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
    level = worker.pool.description["isolation"]["level"]
    print(f"judge worker {worker.name}: {worker.pool.count} slots, isolation {level}", flush=True)
    await _until(stop, asyncio.ensure_future(worker.run()), lambda: worker.stop(arguments.drain_s))


async def run_serve(arguments: argparse.Namespace, limits: CallLimits) -> None:
    """Serve HTTP until a signal; workers run elsewhere."""
    stop, sock, uri = _stop_event(arguments), _listen(arguments), _redis_of(arguments)
    async with _http_server(arguments, limits, uri, sock):
        _announce(arguments, sock, uri)
        await stop.wait()


async def run_all(arguments: argparse.Namespace, limits: CallLimits) -> None:
    """Run Redis (unless one is named), the workers and HTTP. All of them end with this process."""
    stop, sock = _stop_event(arguments), _listen(arguments)
    redis_server = None if arguments.redis_uri else RedisServer().start()
    workers: _Workers | None = None
    try:
        uri = redis_server.uri if redis_server else _redis_of(arguments)
        workers = _Workers(arguments, uri, drain_s=0.0)
        async with _http_server(arguments, limits, uri, sock):
            await workers.wait_until_ready(stop)
            if not stop.is_set():
                _announce(arguments, sock, uri)
            await _until(stop, asyncio.ensure_future(workers.keep_running(redis_server)))
            await workers.stop()
    finally:
        if workers is not None:
            await workers.stop()
        if redis_server is not None:
            redis_server.stop()
        if arguments.port_file:
            Path(arguments.port_file).unlink(missing_ok=True)


async def _until(
    stop: asyncio.Event, work: asyncio.Future[None], before_its_end: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait until `work` has ended or `stop` is set, then end it. Raises what has ended it."""
    both: list[asyncio.Future[Any]] = [work, asyncio.ensure_future(stop.wait())]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if before_its_end is not None:
        await before_its_end()
    await cancel_and_wait(*both)
    if not work.cancelled():
        work.result()


class _Workers:
    """The worker processes of a node: they share its slots, permits and sessions."""

    def __init__(self, arguments: argparse.Namespace, uri: str, drain_s: float) -> None:
        self._arguments, self._uri, self._drain_s = arguments, uri, drain_s
        self._queue = JobQueue(uri)
        self._running = [self._start(number) for number in range(arguments.processes)]

    def _start(self, number: int) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a worker. Returns its name and process."""
        given, name = self._arguments, f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"

        def share(total: int) -> int:
            """This process's part of `total`; the parts differ by at most one."""
            return (number + 1) * total // given.processes - number * total // given.processes

        options = {
            "name": name,
            "processes": 1,
            "workers": share(given.workers),
            "max-running": max(1, share(given.max_running)),
            "sessions": share(given.sessions),
            "session-ttl-s": given.session_ttl_s,
            "require-isolation": given.require_isolation,
            "drain-s": self._drain_s,
            "log-level": given.log_level,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "rstar2_megatron.judge", "worker", "--exit-with-parent"]
            + [f"--{option}={value}" for option, value in options.items()],
            cwd=PROJECT,
            env={**os.environ, "REDIS_URI": self._uri},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal reaches only this process, which stops in order
        )
        return name, process

    async def wait_until_ready(self, stop: asyncio.Event) -> None:
        """Wait until all are registered in Redis, or `stop` is set. RuntimeError when one ends or takes too long."""
        names = {name for name, _ in self._running}
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while not stop.is_set() and not names <= (await self._queue.status())["workers"].keys():
                    for _, process in self._running:
                        if process.poll() is not None:
                            raise RuntimeError(f"the worker ended with code {process.returncode} (see above)")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RuntimeError(f"the worker was not ready in {_READY_TIMEOUT_S:.0f} s") from None

    async def keep_running(self, redis_server: RedisServer | None = None) -> None:
        """Start Redis or a worker again when it has died; a worker's jobs first go back into the queue."""
        while True:
            await asyncio.sleep(0.1)
            if redis_server is not None and not redis_server.alive():
                log.error("Redis ended: started again on its data")
                await asyncio.to_thread(redis_server.restart)
            for number, (name, process) in enumerate(self._running):
                if process.poll() is None:
                    continue
                log.error("a worker ended with code %s: started again", process.returncode)
                try:
                    await self._queue.retire(name)
                    await self._queue.reap()
                except Exception as error:  # Redis away: the next live worker reaps
                    log.warning("putting back the dead worker's jobs failed: %s", error)
                self._running[number] = self._start(number)

    async def stop(self) -> None:
        """End all of them. Safe to call twice."""
        for _, process in self._running:
            if process.poll() is None:
                process.terminate()
        for _, process in self._running:
            end_child(process, grace_s=8.0 + self._drain_s)
        await self._queue.close()


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

    app = create_app(uri, limits, queue_time_limit_s=arguments.queue_time_limit_s, max_queued=arguments.max_queued)
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
