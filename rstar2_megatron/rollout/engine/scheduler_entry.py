"""Entry point of SGLang's scheduler processes.

Importing this module installs the stand-ins for a machine without a GPU. They must be installed at import: a spawned child
first imports the module of its target, then unpickles its arguments, which imports SGLang.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from rstar2_megatron.cpu import sglang as shim

shim.install()

# A forked child closes its parent's connection. Otherwise the other end would not see the parent's death.
inherited_descriptor: int | None = None


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Install the hooks of this project, then call SGLang's entry point with the same arguments."""
    if inherited_descriptor is not None:
        os.close(inherited_descriptor)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the inherited handler ends the parent's children
    shim.prepare_scheduler()
    # Imported here: the stand-ins must be installed before torch or SGLang is imported.
    from rstar2_megatron.rollout.engine import weight_hooks
    from rstar2_megatron.services import loopback

    loopback.register()  # SGLang's process group also stays on 127.0.0.1

    weight_hooks.install()
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*args, **kwargs)
