"""A slot's process: receives jobs through a socket, runs one at a time, answers."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, NoReturn

from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.sandbox.call import Runner

LENGTH = struct.Struct("<I")


def send_message(sock: socket.socket, body: bytes) -> None:
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes. EOFError when the other side has closed the socket."""
    parts = []
    while size:
        data = sock.recv(min(size, 1 << 20))
        if not data:
            raise EOFError
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def receive_message(sock: socket.socket) -> bytes:
    """The next message. An empty one is a cancellation for the slot, DEMOTED for the worker."""
    (size,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    return receive_exactly(sock, size)


def serve_slot(sock: socket.socket, runner: Runner) -> NoReturn:
    """Run jobs until the worker closes the socket or a call parent dies."""
    try:
        while True:
            body = receive_message(sock)
            if not body:  # a cancellation that came after the end of its call
                continue
            send_message(sock, json.dumps(_run(runner, json.loads(body))).encode())
    except (EOFError, OSError):
        runner.close()
        os._exit(0)


def _run(runner: Runner, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return runner.run(job)
    except EOFError:  # the call parent has died: the zygote replaces this slot
        raise
    except Exception as error:  # a fault of the sandbox, not of the program
        return make_result(
            job.get("sub_id"),
            Outcome.INTERNAL_ERROR,
            stderr=f"{type(error).__name__}: {error}",
            queue_seconds=job.get("queue_seconds"),
            worker=job.get("worker"),
        )
