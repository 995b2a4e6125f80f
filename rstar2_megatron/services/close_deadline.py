"""A deadline for the clean-up of a run, because the shutdown of Ray or RLinf may hang."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from rstar2_megatron.services.process import kill_tree

_KILL_WAIT_S = 5.0


@contextlib.contextmanager
def close_deadline(seconds: float, exit_code: int, remove: Callable[[], None], log_path: Path) -> Iterator[None]:
    """Context of a clean-up. After `seconds` all descendants are killed and this process exits with `exit_code`.

    Before the exit, the stacks of all threads are written to `log_path` and `remove` deletes the temporary files.
    """

    def end() -> None:
        with contextlib.suppress(OSError), open(log_path, "w") as log:
            faulthandler.dump_traceback(log, all_threads=True)
        print(
            f"clean-up took longer than {seconds:.0f} s and was ended by force (stacks in {log_path})",
            file=sys.stderr,
            flush=True,
        )
        psutil.wait_procs(kill_tree(os.getpid(), spare_root=True), _KILL_WAIT_S)
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
