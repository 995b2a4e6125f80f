"""The bounded output of a call."""

from __future__ import annotations

import contextlib
import os


class Output:
    """One output stream of the call, kept up to a limit."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit  # bytes that are kept
        self.parts: list[bytes] = []
        self.size = 0  # bytes that were written
        os.set_blocking(fd, False)  # a program that has the slot's uid may read its own output between poll() and read()

    @property
    def is_too_much(self) -> bool:
        return self.size > self.limit

    def read(self) -> bool:
        """Read once. False at the end of the stream, and when nothing is there."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, 1 << 16)
        if not self.is_too_much:
            self.parts.append(data)
        self.size += len(data)
        return bool(data)

    def drain(self) -> None:
        """Read what is in the pipe, without waiting for writers that may live on."""
        while not self.is_too_much and self.read():
            pass

    def close(self) -> None:
        """Read the rest and close the pipe."""
        self.drain()
        os.close(self.fd)

    def text(self) -> str:
        return b"".join(self.parts).decode("utf-8", "backslashreplace")

    def clear(self) -> None:
        """Drop what was read, before the next call of a session."""
        self.parts.clear()
        self.size = 0


def shorten(text: str, limit: int) -> tuple[str, bool]:
    """At most `limit` characters: head and tail around a note. The second value tells whether it was cut."""
    if len(text) <= limit:
        return text, False
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    room = limit - len(note)
    if room < 20:
        return text[:limit], True
    head = room - room // 2
    return text[:head] + note + text[len(text) - room // 2 :], True
