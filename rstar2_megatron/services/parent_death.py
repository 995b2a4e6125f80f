"""PR_SET_PDEATHSIG: the kernel signals a process when its parent ends. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send `signal_number` when the thread that started this process ends. Raises OSError.

    For `preexec_fn`, or the first statement of a child. A change of credentials clears it, so call it after setuid.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PDEATHSIG): {os.strerror(number)}")
