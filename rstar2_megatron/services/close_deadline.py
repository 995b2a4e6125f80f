"""The clean-up of a run has a deadline too: a stop may catch Ray or RLinf where their own shutdown never returns."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_KILL_WAIT_S = 5.0


@contextlib.contextmanager
def close_deadline(
    seconds: float, exit_code: int, remove: Callable[[], None], log_path: Path
) -> Iterator[None]:
    """Around an orderly clean-up. When it takes longer than `seconds`, this process and all below it end at once.

    The stacks of that moment go to `log_path`, `remove` takes the temporary files away, and `exit_code` is kept.
    """

    def end() -> None:
        with contextlib.suppress(OSError), open(log_path, "w") as log:
            faulthandler.dump_traceback(log, all_threads=True)
        print(
            f"clean-up took longer than {seconds:.0f} s and was ended by force (stacks in {log_path})",
            file=sys.stderr,
            flush=True,
        )
        family = psutil.Process().children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, _KILL_WAIT_S)
        with contextlib.suppress(OSError):
            remove()
        os._exit(exit_code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
