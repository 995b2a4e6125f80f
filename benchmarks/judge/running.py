"""A Code Judge of its own, for a benchmark or a test."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.settings.schema import CodeJudgeSettings


@contextlib.contextmanager
def running_judge(
    *, log_path: Path | None = None, extra_arguments: tuple[str, ...] = (), **settings: Any
) -> Iterator[JudgeService]:
    """A judge of these `tools.codejudge` settings that answers, until the end. Without `log_path` its log goes with it."""
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as directory:
        path = log_path or Path(directory, "judge.log")
        service = JudgeService(CodeJudgeSettings(**settings), path, extra_arguments=extra_arguments)
        try:
            service.begin()
            service.wait_ready()
            yield service
        finally:
            service.stop()
