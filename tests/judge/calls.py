"""The processes of a judge, and calls that run until a test lets them end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import psutil

from rstar2_megatron.judge.client.service import JudgeService
from tests.judge.waiting import until
from tests.processes import command_line

_SIGNAL = 1 << (signal.SIGUSR1 - 1)
# A program that begins so is seen by `marked` from then on.
MARK = "import signal; ended = []; signal.signal(signal.SIGUSR1, lambda *_: ended.append(1))\n"
# One that runs until it is let go, then prints "done".
HELD = f"{MARK}while not ended: signal.pause()\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN); print('done')\n"


def processes(root: JudgeService | int) -> list[psutil.Process]:
    """A service's process, or the process of this id, and all that it started, parents first."""
    if isinstance(root, JudgeService):
        assert root.process is not None
        root = root.process.pid
    main = psutil.Process(root)
    return [main, *main.children(recursive=True)]


def find(service: JudgeService, argument: str) -> psutil.Process:
    """The first process, from the root down, with an argument that ends so."""
    return next(p for p in processes(service) if any(a.endswith(argument) for a in command_line(p)))


def gone(process: psutil.Process) -> bool:
    """It has ended; its parent may still have to take note."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def marked(root: JudgeService | int) -> list[psutil.Process]:
    """Processes of calls whose program runs and has begun with MARK."""
    found = []
    for process in processes(root):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:  # it has just ended
            continue
        (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
        if int(caught, 16) & _SIGNAL and "\nState:\tZ" not in status:  # a zombie still has its handlers
            found.append(process)
    return found


async def until_marked(root: JudgeService | int, count: int) -> list[psutil.Process]:
    """Wait until so many marked calls run, and no more. Returns their processes."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = marked(root)
        return len(found) == count

    await until(there, f"{count} calls run")
    return found


async def let_go(root: JudgeService | int, *calls: asyncio.Future[Any]) -> list[Any]:
    """Let all held calls end, also those that begin only then, until these are answered. Returns their results."""

    def are_done() -> bool:
        if all(call.done() for call in calls):
            return True
        for process in marked(root):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        return False

    await until(are_done, "their answers")
    return [call.result() for call in calls]


def control_group(process: psutil.Process, controller: str) -> Path:
    """Directory of a process's group for a controller, of version 1 or 2."""
    mount, paths = Path("/sys/fs/cgroup"), {}
    for line in Path(f"/proc/{process.pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= {name: path.lstrip("/") for name in controllers.split(",")}
    return mount / controller / paths[controller] if controller in paths else mount / paths[""]
