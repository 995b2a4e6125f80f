"""Starting and ending child processes so that none is left behind, whatever ends us."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from pathlib import Path

import psutil

_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # "32768 60999" by default
_PORTS = range(20000, 30000)  # Ray gives 10002 to 19999 to its workers, SGLang takes some from 30000 on
_choice = random.SystemRandom()  # runs with one seed must not all try the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` at this moment.

    Where the kernel leaves room, it is none of those that outgoing connections get: between this call and the listener's
    start, one of the many that come up with a run would take it now and then.
    """
    lowest_local = int(_LOCAL_PORTS.read_text().split()[0])
    for port in _choice.sample(_PORTS, 100):
        if port < lowest_local and _is_free(host, port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        try:
            s.bind((host, port))
            s.listen()
        except OSError:
            return False
    return True


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
