"""The Code Judge as a child process, and that of a run: started here, or the running one that the YAML names."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from rstar2_megatron.services.owned_directory import make_owned_directory
from rstar2_megatron.services.process import PortTaken, is_loopback, listen, start_child, terminate_tree
from rstar2_megatron.services.redis_server import check_redis
from rstar2_megatron.settings.schema import CodeJudgeSettings

_START_TIMEOUT_S = 60.0
_SILENCE_S = 8.0  # how long to wait for the first answer of a judge that the YAML names


class JudgeServiceError(RuntimeError):
    """The judge did not start (the message holds the end of its log), does not answer, or its port is taken."""


class JudgeService:
    """A Code Judge as a child process: HTTP, Redis (unless `redis_uri` names one) and execution slots.

    `start()`, or `begin()` and later `wait_ready()` so that other services can start meanwhile. Start it from the main
    thread: the kernel ends the service together with the thread that started it.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        redis_uri: str | None = None,
        workers: int = 2,
        time_limit_s: float = 4.0,
        memory_mb: int = 512,
        log_path: str | Path | None = None,
        extra_arguments: tuple[str, ...] = (),
    ) -> None:
        self.arguments = ["--host", host, "--port", str(port), "--workers", str(workers)]
        self.arguments += ["--time-limit-s", str(time_limit_s), "--memory-mb", str(memory_mb)]
        if redis_uri:
            self.arguments += ["--redis-uri", redis_uri]
        self.arguments += extra_arguments
        self.log_path = Path(log_path) if log_path else None
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.redis_uri = redis_uri or ""
        self._directory: Path | None = None  # log and port file, where no log_path is given
        self._deadline = 0.0

    def begin(self) -> None:
        """Start without waiting."""
        self._deadline = time.monotonic() + _START_TIMEOUT_S
        if self.log_path is None:
            self._directory = make_owned_directory("rstar2-judge-start-")
            self.log_path = self._directory / "judge.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "rstar2_megatron.judge", "all", *self.arguments]
        command += ["--port-file", str(self._port_file)]
        with self.log_path.open("ab") as output:
            self.process = start_child(command, output)

    @property
    def _port_file(self) -> Path:
        assert self.log_path is not None
        return self.log_path.with_suffix(".json")

    def wait_ready(self) -> str:
        """Block until it answers. Returns its URL. Raises JudgeServiceError with the end of its log."""
        assert self.process is not None and self.log_path is not None, "wait_ready() before begin()"
        while not self._port_file.exists():
            code = self.process.poll()
            if code is not None or time.monotonic() > self._deadline:
                words = self.log_path.read_text(errors="replace")[-2000:].strip()
                self.stop()
                what = f"ended with code {code}" if code is not None else "was not ready in time"
                raise JudgeServiceError(f"the Code Judge {what}\n{words}")
            time.sleep(0.01)
        told = json.loads(self._port_file.read_text())
        self.url, self.redis_uri = told["url"], told["redis_uri"]
        return self.url

    def start(self) -> JudgeService:
        """Start and wait until ready. Raises JudgeServiceError."""
        self.begin()
        self.wait_ready()
        return self

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the service with all its processes. Safe to call twice."""
        if self.process is not None and self.process.poll() is None:
            terminate_tree(self.process.pid, grace_s=20.0)
            self.process.wait(timeout=5.0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = self.log_path = None

    def __enter__(self) -> JudgeService:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


class CodeJudgeService(JudgeService):
    """Starts a judge, or checks that the one named in the settings answers."""

    def __init__(self, settings: CodeJudgeSettings, log_path: Path, host: str = "127.0.0.1") -> None:
        """host: where our own listens. Beyond loopback it asks for JUDGE_TOKEN, which is made here if there is none."""
        super().__init__(
            host=host,
            port=settings.host_port or 0,
            redis_uri=settings.redis_uri,
            workers=settings.num_workers,
            time_limit_s=settings.time_limit_s,
            memory_mb=settings.memory_mb,
            log_path=log_path,
        )
        self.settings = settings
        self._host = host
        self._named_url = f"http://{settings.host_addr}:{settings.host_port or 8088}" if settings.host_addr is not None else ""
        if not self._named_url and not is_loopback(host):
            os.environ.setdefault("JUDGE_TOKEN", secrets.token_urlsafe(24))  # RLinf hands it to workers on all nodes

    def begin(self) -> None:
        """Start without waiting, so that other services can start at the same time.

        A judge, Redis or port named in the YAML is checked first, before Ray and the engines start.
        Raises JudgeServiceError, RedisUnavailable.
        """
        if self._named_url:
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
        super().begin()

    def wait_ready(self) -> str:
        return self._named_url or super().wait_ready()

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


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):  # URLError is an OSError
        return False
