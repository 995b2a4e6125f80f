"""A command with its output in a file, which ends with its caller."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from rstar2_megatron.services.process import terminate_tree

_TIMEOUT_S = 24 * 3600.0
_CLOSE_S = 90.0  # a run ends what it started
_SHOWN_LINES = 15


def logged(command: Sequence[str], log: Path, environment: dict[str, str], cwd: Path) -> None:
    """Run a command with its output in `log`.

    Raises RuntimeError with the end of the log when it fails.
    """
    print(f"{log.stem}: output in {log}", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=cwd, start_new_session=True
        )
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            terminate_tree(process.pid, grace_s=_CLOSE_S)
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        raise RuntimeError(f"{log.stem} ended with exit code {code}; the end of {log}:\n{end}")
