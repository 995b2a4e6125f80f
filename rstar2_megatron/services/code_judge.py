"""The Code Judge of a run: started on loopback, or the running one that the YAML names."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from rstar2_megatron.services.process import die_with_parent, terminate_tree
from rstar2_megatron.settings.schema import CodeJudgeSettings

logger = logging.getLogger(__name__)

_SILENCE_S = 15.0  # how long a judge that the YAML names may keep silent


class ServiceError(RuntimeError):
    """A service that a run needs did not start or does not answer."""


class CodeJudgeService:
    """`python -m rstar2_megatron.judge all` as a child process, or a check that the named one answers."""

    def __init__(self, settings: CodeJudgeSettings, log_path: Path, start_timeout_s: float = 60.0) -> None:
        self.settings = settings
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._port_file: Path | None = None

    def begin(self) -> None:
        """Start without waiting, so that it comes up beside everything else."""
        settings = self.settings
        self._deadline = time.monotonic() + self.start_timeout_s
        if settings.host_addr is not None:
            self.url = f"http://{settings.host_addr}:{settings.host_port or 8088}"
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._port_file = Path(tempfile.mkdtemp(prefix="rstar2-judge-")) / "judge.json"
        command = [sys.executable, "-m", "rstar2_megatron.judge", "all", "--host", "127.0.0.1"]
        command += ["--port", str(settings.host_port or 0), "--workers", str(settings.num_workers)]
        command += ["--time-limit-s", str(settings.time_limit_s), "--memory-mb", str(settings.memory_mb)]
        command += ["--port-file", str(self._port_file)]
        if settings.redis_uri:
            command += ["--redis-uri", settings.redis_uri]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_ready(self) -> str:
        """Block until it answers; returns its URL. Raises ServiceError with what it said."""
        while time.monotonic() < self._deadline:
            if self._process is not None and self._process.poll() is not None:
                raise ServiceError(
                    f"the Code Judge ended with code {self._process.returncode}:\n{self._log_tail()}"
                )
            if not self.url and self._port_file is not None and self._port_file.exists():
                self.url = json.loads(self._port_file.read_text())["url"]
            if self.url and self._answers():
                return self.url
            if (
                self._process is None
                and time.monotonic() > self._deadline - self.start_timeout_s + _SILENCE_S
            ):
                break  # somebody else's judge, which ought to be up already
            time.sleep(0.1)
        named = (
            f" named by tools.codejudge.host_addr={self.settings.host_addr}"
            if self.settings.host_addr
            else ""
        )
        raise ServiceError(
            f"the Code Judge{named} at {self.url or '127.0.0.1'} does not answer; start it "
            f"(python -m rstar2_megatron.judge all --host ... --port ...) or set tools.codejudge.host_addr=null to have "
            f"one started here\n{self._log_tail()}"
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ping", timeout=2) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _log_tail(self) -> str:
        if self._process is None or not self.log_path.exists():
            return ""
        return self.log_path.read_text(errors="replace")[-1500:].strip()

    def stop(self) -> None:
        """End the service if it is ours. Safe to call twice."""
        if self._process is not None:
            terminate_tree(self._process.pid, grace_s=6.0)
            self._process.wait(timeout=5)
            self._process = None
        if self._port_file is not None:
            self._port_file.unlink(missing_ok=True)
            self._port_file.parent.rmdir()
            self._port_file = None
