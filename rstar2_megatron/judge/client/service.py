"""The Code Judge as a child process, and that of a run: started here, or the running one that the YAML names."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from rstar2_megatron.judge.client.client import authorization
from rstar2_megatron.services.process import PortTaken, is_loopback, listen, start_child, terminate_tree
from rstar2_megatron.services.redis_server import check_redis
from rstar2_megatron.settings.schema import CodeJudgeSettings

logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 60.0
_LOOK_S = 0.5  # between two looks at a watched service
_RESTARTS_IN_A_ROW = 3
_STEADY_S = 60.0  # a service that ran for so long is no failed restart
RECOVERED = "started again"
"""In each line of the service's log that says that a part of it died."""
_NO_JUDGE = "http://none.invalid"  # a client has an address, also one that makes no call
_SILENCE_S = 8.0  # how long to wait for the first answer of a judge that the YAML names
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens a judge's addresses as the client does: HTTP_PROXY of the environment is for other hosts."""


class JudgeServiceError(RuntimeError):
    """The judge did not start (the message holds the end of its log), does not answer, or its port is taken."""


class JudgeService:
    """A Code Judge as a child process: HTTP, Redis (unless the YAML names one) and execution slots.

    Or the running judge that the YAML names, or none where no tool needs it: then nothing is started, watched or stopped.
    `begin()` and later `wait_ready()`, so that other services can start meanwhile. Start it from the main thread: the kernel
    ends the service together with the thread that started it. After `watch()` it is started again whenever it ends.
    """

    def __init__(
        self,
        settings: CodeJudgeSettings,
        log_path: Path,
        host: str = "127.0.0.1",
        *,
        needed: bool = True,
        extra_arguments: tuple[str, ...] = (),
    ) -> None:
        """host: where our own listens. Beyond loopback it asks for JUDGE_TOKEN, which is made here if there is none.

        needed: `agentloop.needs_judge`; False: nothing is started, and the URL is that of no host.
        extra_arguments: of `python -m rstar2_megatron.judge all`, where the last one of a kind counts.
        """
        self.settings = settings
        self.arguments = ["--host", host, "--port", str(settings.host_port or 0), "--workers", str(settings.num_workers)]
        self.arguments += ["--time-limit-s", str(settings.time_limit_s), "--memory-mb", str(settings.memory_mb)]
        self.arguments += extra_arguments
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.redis_uri = ""
        self.restarts = 0
        """How often a watched service was started again, failed starts included."""
        self.failure: JudgeServiceError | None = None
        """Why a watched service is given up."""
        self._host, self._needed = host, needed
        named = f"http://{settings.host_addr}:{settings.host_port or 8088}" if settings.host_addr is not None else ""
        self._named_url = named if needed else _NO_JUDGE
        if not self._named_url and not is_loopback(host):
            os.environ.setdefault("JUDGE_TOKEN", secrets.token_urlsafe(24))  # RLinf hands it to workers on all nodes
        self._port_file = log_path.with_suffix(".json")
        self._deadline = 0.0
        self._log_start = 0  # where the log of this start begins, in bytes
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()

    def begin(self) -> None:
        """Start without waiting.

        A judge, Redis or port named in the YAML is checked first, before Ray and the engines start.
        Raises JudgeServiceError, RedisUnavailable.
        """
        if self._named_url:
            if self._needed:
                self._wait_for_named()
            return
        if self.settings.redis_uri:
            check_redis(self.settings.redis_uri)
        if port := self.settings.host_port:
            try:
                listen(self._host, port).close()
            except PortTaken as error:
                raise JudgeServiceError(
                    f"the Code Judge cannot listen on tools.codejudge.host_port={port} ({error.reason}): stop what uses it, "
                    "choose another, or set null for a free one"
                ) from None
        self._launch()

    def _launch(self) -> None:
        self._deadline = time.monotonic() + _START_TIMEOUT_S
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "rstar2_megatron.judge", "all", *self.arguments]
        command += ["--port-file", str(self._port_file)]
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            # By the environment, because ps shows arguments to every account; "": one of its own, whatever REDIS_URI says.
            self.process = start_child(command, output, env={**os.environ, "REDIS_URI": self.settings.redis_uri or ""})

    def wait_ready(self) -> str:
        """Block until it answers. Returns its URL. Raises JudgeServiceError with the end of its log."""
        if self._named_url:
            return self._named_url
        assert self.process is not None, "wait_ready() before begin()"
        while not self._port_file.exists():
            code = self.process.poll()
            if code is not None or time.monotonic() > self._deadline or self._stopping.is_set():
                words = self.log_path.read_bytes()[self._log_start :][-2000:].decode(errors="replace").strip()
                self._end()
                what = f"ended with code {code}" if code is not None else "was not ready in time"
                raise JudgeServiceError(f"the Code Judge {what}\n{words}")
            time.sleep(0.01)
        told = json.loads(self._port_file.read_text())
        self.url, self.redis_uri = told["url"], told["redis_uri"]
        return self.url

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def watch(self) -> None:
        """Start the service again whenever it ends, on the same port, until `stop`.

        Clients wait for it, and send again what it had not answered. Live interpreters are lost with it. After
        `_RESTARTS_IN_A_ROW` restarts that failed it is given up, and `check` raises. A judge that the YAML names is left alone.
        """
        if self._named_url:
            return
        port = urlsplit(self.url).port
        self.arguments += ["--port", str(port)]  # the last one counts
        self._watcher = threading.Thread(target=self._keep_alive, name="judge watch", daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raise JudgeServiceError when the watched service was given up."""
        if self.failure is not None:
            raise self.failure

    def _keep_alive(self) -> None:
        with self.log_path.open(errors="replace") as log:
            log.seek(0, os.SEEK_END)
            self._look_after(log)
        self._end()  # here: the kernel kills what this thread started as soon as the thread ends

    def _look_after(self, log: TextIO) -> None:
        in_a_row, started, words = 0, time.monotonic(), ""
        while not self._stopping.wait(_LOOK_S):
            for line in log:
                if RECOVERED in line:  # the service has started a part of its own again
                    logger.warning("the Code Judge: %s", line.strip().rpartition("judge: ")[2])
            if self.alive():
                if time.monotonic() - started > _STEADY_S:
                    in_a_row = 0
                continue
            assert self.process is not None
            code, began = self.process.returncode, time.monotonic()
            if in_a_row == _RESTARTS_IN_A_ROW:
                words = words or f"it ended with code {code}"
                self.failure = JudgeServiceError(f"the Code Judge was started again {in_a_row} times in vain: {words}")
                return
            in_a_row += 1
            self.restarts += 1
            try:
                self._launch()  # the checks of `begin` are about what the YAML names
                self.wait_ready()
            except (JudgeServiceError, OSError) as error:
                words = str(error)
            else:
                started, words = time.monotonic(), ""
                logger.warning("the Code Judge ended with code %s and runs again after %.1f s", code, started - began)

    def stop(self) -> None:
        """End the service with all its processes. Safe to call twice."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        self._end()

    def _end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            terminate_tree(self.process.pid, grace_s=20.0)
            self.process.wait(timeout=5.0)

    def _wait_for_named(self) -> None:
        deadline = time.monotonic() + _SILENCE_S
        while not _answers(self._named_url):
            if time.monotonic() > deadline:
                raise JudgeServiceError(
                    f"the Code Judge named by tools.codejudge.host_addr={self.settings.host_addr} at "
                    f"{self._named_url} does not answer; start it (python -m rstar2_megatron.judge all --host ... "
                    "--port ...) or set tools.codejudge.host_addr=null to have one started here"
                )
            time.sleep(0.1)
        self._check_named()

    def _check_named(self) -> None:
        """It takes our token, and its limits are not below ours, to which it would cut calls without a word.

        Another server has no such page, or no limits on it. Raises JudgeServiceError.
        """
        try:
            request = urllib.request.Request(f"{self._named_url}/status", headers=authorization())
            with WITHOUT_PROXY.open(request, timeout=_SILENCE_S) as reply:
                limits: dict[str, float] = json.load(reply).get("limits", {})
        except urllib.error.HTTPError as error:
            if error.code != 401:
                return
            raise JudgeServiceError(
                f"the Code Judge at {self._named_url} refuses the token; export JUDGE_TOKEN as the judge has it"
            ) from None
        except (OSError, ValueError, AttributeError):
            return
        for name, flag in (("time_limit_s", "--time-limit-s"), ("memory_mb", "--memory-mb")):
            if (asked := getattr(self.settings, name)) > limits.get(name, math.inf):
                raise JudgeServiceError(
                    f"the Code Judge at {self._named_url} gives a call at most {name}={limits[name]:g}, "
                    f"tools.codejudge.{name}={asked:g} asks for more; start the judge with {flag} {asked:g}, or lower the key"
                )


def _answers(url: str) -> bool:
    try:
        with WITHOUT_PROXY.open(f"{url}/ping", timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):  # URLError is an OSError
        return False
