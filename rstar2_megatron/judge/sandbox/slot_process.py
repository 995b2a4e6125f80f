"""A slot's process: takes jobs through a socket, runs each, answers. One job at a time."""

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
    """The next message. An empty one is a cancellation, or from a call DEMOTED."""
    (size,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    return receive_exactly(sock, size)


def serve_slot(sock: socket.socket, runner: Runner) -> NoReturn:
    """Run jobs as they come, until the worker closes the socket. Ends with a call parent."""
    try:
        while True:
            body = receive_message(sock)
            if not body:  # a cancellation: read already, or too late
                continue
            send_message(sock, json.dumps(_run(runner, json.loads(body))).encode())
    except (EOFError, OSError):
        runner.close()
        os._exit(0)


def _run(runner: Runner, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return runner.run(job)
    except EOFError:  # no call parent, no slot: the zygote starts another
        raise
    except Exception as error:  # a fault of ours: told, never the snippet's
        return make_result(
            job.get("sub_id"),
            Outcome.INTERNAL_ERROR,
            stderr=f"{type(error).__name__}: {error}",
            queue_seconds=job.get("queue_seconds"),
            worker=job.get("worker"),
        )
