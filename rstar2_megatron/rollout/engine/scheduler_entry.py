"""Entry of SGLang's scheduler processes.

The stand-ins for a machine without a GPU are put in place when this module is imported, not when the function
runs: a spawned child unpickles its arguments, and with them imports sglang, right after it has found its target.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from rstar2_megatron.cpu import sglang as shim

shim.install()

# A forked child must not hold its parent's connection open: its other end waits for the parent's death.
inherited_descriptor: int | None = None


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Our hooks, then SGLang's own entry with the same arguments."""
    if inherited_descriptor is not None:
        os.close(inherited_descriptor)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the parent's handler ends the parent's children
    shim.prepare_scheduler()
    # Here, because this module is unpickled by a spawned child, which must find the stand-ins before torch or SGLang.
    from rstar2_megatron.rollout.engine import weight_hooks
    from rstar2_megatron.services import loopback

    loopback.register()  # SGLang's own process group meets on 127.0.0.1 too

    weight_hooks.install()
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*args, **kwargs)
