"""Listening sockets, signals and the end of the parent, for the judge's processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable


class PortTaken(RuntimeError):
    """The address cannot be bound; `reason` is the system's error text."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"cannot listen on {host}:{port} ({reason}): stop what uses it, "
            "or choose another with --port (0 takes a free one)"
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


async def watch_parent(stop: Callable[[], None]) -> None:
    """Call `stop` when the parent process has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.25)
    stop()


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(number, stop)
