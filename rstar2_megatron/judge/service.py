"""Starts `python -m rstar2_megatron.judge all` for a run and stops it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rstar2_megatron.judge.processes import end_with_parent


class JudgeServiceError(RuntimeError):
    """The service did not start; the message carries its own words."""


class JudgeService:
    """A Code Judge of this run's own: HTTP, Redis (unless `redis_uri` names one) and execution slots.

    Start it from the main thread: the kernel ends it with the thread that started it.
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
        start_timeout_s: float = 60.0,
        log_path: str | Path | None = None,
        extra_arguments: tuple[str, ...] = (),
    ) -> None:
        self.arguments = ["--host", host, "--port", str(port), "--workers", str(workers)]
        self.arguments += ["--time-limit-s", str(time_limit_s), "--memory-mb", str(memory_mb)]
        if redis_uri:
            self.arguments += ["--redis-uri", redis_uri]
        self.arguments += extra_arguments
        self.start_timeout_s = start_timeout_s
        self.log_path = Path(log_path) if log_path else None
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.redis_uri = redis_uri or ""

    def start(self) -> JudgeService:
        """Start and wait until ready. Raises JudgeServiceError."""
        parent = os.getpid()
        with tempfile.TemporaryDirectory(prefix="rstar2-judge-start-") as directory:
            port_file = Path(directory) / "port.json"
            log = self.log_path or Path(directory) / "judge.log"
            arguments = [*self.arguments, "--port-file", str(port_file)]
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "rstar2_megatron.judge", "all", *arguments],
                    cwd=Path(__file__).resolve().parents[2],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=lambda: end_with_parent(parent),
                )
            deadline = time.monotonic() + self.start_timeout_s
            while not port_file.exists():
                code = self.process.poll()
                if code is not None or time.monotonic() > deadline:
                    self.stop()
                    what = f"ended with code {code}" if code is not None else "was not ready in time"
                    words = log.read_text(errors="replace")[-2000:].strip()
                    raise JudgeServiceError(f"the Code Judge {what}\n{words}")
                time.sleep(0.01)
            told = json.loads(port_file.read_text())
        self.url, self.redis_uri = told["url"], told["redis_uri"]
        return self

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the service with all its processes. Safe to call twice."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5.0)

    def __enter__(self) -> JudgeService:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
