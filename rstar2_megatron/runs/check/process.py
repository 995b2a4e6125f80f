"""A process that runs programs of checks one after the other: python -m rstar2_megatron.runs.check.process FD

It stays alive between checks, so that torch and megatron-core are imported once; a program that hangs is ended with it.
"""

from __future__ import annotations

import gc
import importlib
import logging
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal


@dataclass(frozen=True)
class Job:
    """Where a program runs: its rank among those that run it together."""

    rank: int = 0
    world_size: int = 1
    init_method: str = ""
    """The rendezvous address of torch.distributed; empty for programs without it."""
    device: Literal["cpu", "cuda"] = "cpu"
    devices: tuple[int, ...] = ()
    """Accelerators of the node that this process sees; none for programs without."""
    node: int = 0


def find(program: str) -> Callable[..., Any]:
    """The function behind "module:function"."""
    module, _, name = program.partition(":")
    function = getattr(importlib.import_module(module), name)
    assert callable(function)
    return function  # type: ignore[no-any-return]


def serve(connection: Connection) -> None:
    """Answer (program, job, arguments) with (True, value) or (False, traceback) until the other side closes."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    while True:
        try:
            program, job, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, find(program)(job, **arguments))
        except BaseException as error:
            first, *more = str(error).strip().splitlines() or ["(no message)"]
            in_short = " ".join([f"{type(error).__name__}: {first}", *more[-1:]])
            answer = (False, f"{traceback.format_exc()}\n{in_short}")
        _leave()
        connection.send(answer)


def _leave() -> None:
    """Remove the leftovers of a program that failed, so that they do not spoil the next one."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is None:
        return
    if torch.distributed.is_initialized():
        from rstar2_megatron.actor import process_groups  # here: other programs need no torch

        process_groups.leave()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
