"""The Code Judge of a run: started here, or the running one that the YAML names."""

from __future__ import annotations

import os
import secrets
import time
import urllib.request
from pathlib import Path

from rstar2_megatron.judge.client.service import JudgeService, JudgeServiceError
from rstar2_megatron.services.process import PortTaken, is_loopback, listen
from rstar2_megatron.services.redis_server import check_redis
from rstar2_megatron.settings.schema import CodeJudgeSettings

_SILENCE_S = 8.0  # how long to wait for the first answer of a judge that the YAML names


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
