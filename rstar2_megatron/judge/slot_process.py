"""A slot's process: takes jobs through a socket, runs each, answers. One job at a time.

A program that uses numpy, sympy or the like is handed on to the slot's twin, a process that has them imported. Any
other is forked right here: without them a fork copies and ends a far smaller process, 1 ms less of CPU.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import struct
from typing import Any, NoReturn

from rstar2_megatron.judge.call import STEPPED_BACK, Sandbox
from rstar2_megatron.judge.outcome import Outcome, make_result

LENGTH = struct.Struct("<I")
_LIBRARIES = re.compile(r"\b(numpy|sympy|mpmath|scipy|pandas|matplotlib|networkx|sklearn|statsmodels)\b")


def send_message(sock: socket.socket, body: bytes) -> None:
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or EOFError when the other side is gone."""
    parts = []
    while size:
        data = sock.recv(min(size, 1 << 20))
        if not data:
            raise EOFError
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def receive_message(sock: socket.socket) -> bytes:
    """The next message. An empty one is a cancellation, or from a call STEPPED_BACK."""
    (size,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    return receive_exactly(sock, size)


def uses_libraries(job: dict[str, Any]) -> bool:
    """A guess that decides the cost only: an import that it misses is done by the program itself."""
    return _LIBRARIES.search(job["solution"]) is not None


def serve_slot(sock: socket.socket, runner: Sandbox, twin: socket.socket | None = None) -> NoReturn:
    """Run jobs as they come, until the worker closes the socket. Ends with its twin."""
    try:
        while True:
            body = receive_message(sock)
            if not body:  # a cancellation: read already, or too late
                continue
            job = json.loads(body)
            if twin is not None and job["type"] == "python" and uses_libraries(job):
                send_message(sock, _ask_twin(sock, twin, body))
            else:
                send_message(sock, json.dumps(_run(runner, job)).encode())
    except (EOFError, OSError):
        runner.close()
        os._exit(0)


def _run(runner: Sandbox, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return runner.run(job)
    except Exception as error:  # a fault of ours: told, never the snippet's
        return make_result(
            job.get("sub_id"),
            Outcome.INTERNAL_ERROR,
            stderr=f"{type(error).__name__}: {error}",
            queue_seconds=job.get("queue_seconds"),
            worker=job.get("worker"),
        )


def _ask_twin(sock: socket.socket, twin: socket.socket, body: bytes) -> bytes:
    """The twin's answer. A cancellation, and the call's stepping back, are passed on meanwhile."""
    send_message(twin, body)
    poller = select.poll()
    for end in (sock, twin):
        poller.register(end, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if twin.fileno() in ready:
            answer = receive_message(twin)
            if answer:
                return answer
            sock.sendall(STEPPED_BACK)
        else:
            send_message(twin, receive_message(sock))
