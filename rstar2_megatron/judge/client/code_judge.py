"""The Code Judge of a run: started here, or the running one that the YAML names."""

from __future__ import annotations

import os
import secrets
import time
import urllib.error
import urllib.request
from pathlib import Path

from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.services.process import PortTaken, is_loopback, listen
from rstar2_megatron.services.redis_server import check_redis
from rstar2_megatron.settings.schema import CodeJudgeSettings

_SILENCE_S = 8.0  # how long to wait for the first answer of a judge that the YAML names


class ServiceError(RuntimeError):
    """The Code Judge that the settings name does not answer, or its port is taken."""


class CodeJudgeService:
    """Starts a judge, or checks that the one named in the settings answers."""

    def __init__(
        self, settings: CodeJudgeSettings, log_path: Path, start_timeout_s: float = 60.0, host: str = "127.0.0.1"
    ) -> None:
        """host: where our own listens. Beyond loopback it asks for JUDGE_TOKEN, which is made here if there is none."""
        self.settings = settings
        self._host = host
        if settings.host_addr is None and not is_loopback(host):
            os.environ.setdefault("JUDGE_TOKEN", secrets.token_urlsafe(24))  # RLinf hands it to workers on all nodes
        self._own: JudgeService | None = None
        if settings.host_addr is None:
            self._own = JudgeService(
                host=host,
                port=settings.host_port or 0,
                redis_uri=settings.redis_uri,
                workers=settings.num_workers,
                time_limit_s=settings.time_limit_s,
                memory_mb=settings.memory_mb,
                start_timeout_s=start_timeout_s,
                log_path=log_path,
            )

    def begin(self) -> None:
        """Start without waiting, so that other services can start at the same time.

        A judge, Redis or port named in the YAML is checked first, before Ray and the engines start.
        Raises ServiceError, RedisUnavailable.
        """
        if self._own is None:
            self._wait_for_named()
            return
        if self.settings.redis_uri:
            check_redis(self.settings.redis_uri)
        if self.settings.host_port:
            self._check_port(self.settings.host_port)
        self._own.begin()

    def wait_ready(self) -> str:
        """Block until it answers; returns its URL. Raises JudgeServiceError."""
        return self._named_url if self._own is None else self._own.wait_ready()

    @property
    def _named_url(self) -> str:
        return f"http://{self.settings.host_addr}:{self.settings.host_port or 8088}"

    def _wait_for_named(self) -> None:
        deadline = time.monotonic() + _SILENCE_S
        while not _answers(self._named_url):
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"the Code Judge named by tools.codejudge.host_addr={self.settings.host_addr} at "
                    f"{self._named_url} does not answer; start it (python -m rstar2_megatron.judge all --host ... "
                    "--port ...) or set tools.codejudge.host_addr=null to have one started here"
                )
            time.sleep(0.1)

    def _check_port(self, port: int) -> None:
        try:
            listen(self._host, port).close()
        except PortTaken as error:
            raise ServiceError(
                f"the Code Judge cannot listen on tools.codejudge.host_port={port} ({error.reason}): stop what uses it, "
                "choose another, or set null for a free one"
            ) from None

    def stop(self) -> None:
        """End the service if it was started here. Safe to call twice."""
        if self._own is not None:
            self._own.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
