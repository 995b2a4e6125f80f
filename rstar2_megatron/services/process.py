"""Starting and ending child processes so that none is left behind, whatever ends us."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import psutil


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def terminate_tree(pid: int, *, grace_s: float = 5.0, first_signal: int = signal.SIGTERM) -> None:
    """Signal `pid`, wait `grace_s` seconds, then kill it and every descendant that it had or got meanwhile."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    family: dict[int, psutil.Process] = {}

    def remember() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update({p.pid: p for p in [root, *root.children(recursive=True)]})

    remember()
    with contextlib.suppress(psutil.NoSuchProcess):
        root.send_signal(first_signal)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        remember()
        if not _alive(family):
            break
        time.sleep(0.05)
    for process in _alive(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(family.values()), timeout=5)


def _alive(family: dict[int, psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in family.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
