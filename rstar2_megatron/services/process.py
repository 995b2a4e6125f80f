"""Free ports and listening sockets; starting a child process, and ending processes with all their descendants."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from rstar2_megatron.services.parent_death import die_with_parent

PROJECT = Path(__file__).resolve().parents[2]
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # "32768 60999" by default
_PORTS = range(20000, 30000)  # `ray start` gives 10002 to 19999 to its workers, SGLang uses ports from 30000
_choice = random.SystemRandom()  # runs with the same seed must not try the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` at this moment.

    The port lies outside the kernel's range for outgoing connections where that range leaves room: otherwise one of the
    many connections of a starting run could take the port before its listener starts.
    """
    lowest_local = int(_LOCAL_PORTS.read_text().split()[0])
    for port in _choice.sample(_PORTS, 100):
        if port < lowest_local and _is_free(host, port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def free_ports(count: int) -> list[int]:
    """As many different ports as `free_port` gives on loopback."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        try:
            s.bind((host, port))
            s.listen()
        except OSError:
            return False
    return True


def start_child(
    command: Sequence[str],
    log: IO[bytes],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = PROJECT,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, with its output in `log`.

    The kernel ends it when the calling thread ends.
    """
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


class PortTaken(RuntimeError):
    """The address cannot be bound; `reason` is the system's error text."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"cannot listen on {host}:{port} ({reason}): stop what uses it, or choose another with --port (0 takes a free one)"
        )
        self.reason = reason


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises PortTaken naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise PortTaken(host, port, error.strerror or str(error)) from None
    return sock


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def terminate_tree(pid: int, *, grace_s: float = 5.0, first_signal: int = signal.SIGTERM) -> None:
    """Signal `pid`, wait up to `grace_s` seconds, then kill it and every descendant seen since the call."""
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
    _kill(_alive(family))
    psutil.wait_procs(list(family.values()), timeout=5)


def kill_tree(pid: int, *, spare_root: bool = False) -> list[psutil.Process]:
    """Kill every descendant of `pid` at once, and `pid` itself with its process group unless `spare_root`.

    Returns the killed processes, which may still have to be waited for. A process that has ended is no error.
    """
    try:
        root = psutil.Process(pid)
        family = root.children(recursive=True)
        if not spare_root:
            family.append(root)
            if os.getpgid(pid) == pid:  # the group also holds children whose own parent has ended
                os.killpg(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []
    _kill(family)
    return family


def end_child(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Terminate a child, wait up to `grace_s` seconds, then kill it. Its descendants are not signalled."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5.0)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _alive(family: dict[int, psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in family.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
