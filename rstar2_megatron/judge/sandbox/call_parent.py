"""The process that forks a slot's calls, and the slot's connection to it.

After a fork the kernel copies each page that the parent writes. So the slot, which reads, watches and reports, does not
fork: it hands a program to its call parent, which forks, waits for the end and reports it. That saves each call nearly 200
page faults, and no program or output enters the memory that later calls inherit.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import socket
import struct
from typing import Any, NamedTuple, NoReturn

from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers
from rstar2_megatron.judge.sandbox.process_tree import end_group, resident_bytes
from rstar2_megatron.judge.sandbox.sandbox import WARMUPS, Program, Sandbox

_HELLO = struct.Struct("<q")  # resident bytes at the start
_PID = struct.Struct("<i")
# Wait status, largest resident size in KB; a text follows if the program did not begin.
_END = struct.Struct("<iq")
_LARGEST_MESSAGE = 1 << 15  # bytes; a longer program is passed in a file
_FDS = {12: struct.Struct("3i"), 16: struct.Struct("4i")}
_FOUR_FDS = socket.CMSG_SPACE(16)
_LAST_WORDS_S = 0.2  # for a program that is not in the middle of a C function
_HAS_ENDED = "the call parent has ended"


class CallEnd(NamedTuple):
    """How a call's process ended."""

    code: int  # exit code, negative for a signal
    peak_memory_bytes: int
    failure: str  # why the program did not begin; "" when it did


class Connection(NamedTuple):
    """One end of the connection between a slot and a call parent: the descriptors of a socket and of a pipe.

    The slot reads a process id only when it needs one; a message would wake it for each call.
    """

    messages: int
    pids: int  # writing end in the call parent, reading end in the slot


def make_connection() -> tuple[Connection, Connection]:
    """The slot's end and the call parent's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    return Connection(ours.detach(), reader), Connection(theirs.detach(), writer)


def serve_calls(connection: Connection, layers: IsolationLayers, slot: int) -> NoReturn:
    """Fork a call for each program that arrives, until the slot closes the connection.

    The loop writes as few pages as possible. The child reads the program.
    """
    linux.adopt_orphans()
    sandbox = Sandbox(layers, slot)
    _warm_up()
    messages, pids = socket.socket(fileno=connection.messages), connection.pids
    messages.send(_HELLO.pack(resident_bytes(os.getpid())))
    buffer = bytearray(_LARGEST_MESSAGE)  # allocated once, not in each call

    def begin() -> None:
        sandbox.become(*_receive(messages, buffer))

    sandbox.make_directory()
    while messages.recv(1, socket.MSG_PEEK):
        pid = sandbox.fork(begin)
        os.write(pids, _PID.pack(pid))
        _, status, usage = os.wait4(pid, 0)
        sandbox.end_orphans()
        end = _END.pack(status, usage.ru_maxrss)
        if status:
            # A child that was ended before it read its program must not leave the program to the next child.
            with contextlib.suppress(BlockingIOError):
                messages.recv(1, socket.MSG_DONTWAIT)
            end += sandbox.failure().encode()
        messages.send(end)
        sandbox.make_directory()
    os._exit(0)


def _warm_up() -> None:
    """Receive programs from this process itself: see `Sandbox._warm_up`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = Program("python", "", None, False, "/", 0, 0)
    for _ in range(WARMUPS):
        _send(ours, program, (0, 1, 2))
        _, received = _receive(theirs, bytearray(_LARGEST_MESSAGE))
        for fd in received[:3]:
            os.close(fd)
    ours.close()
    theirs.close()


def _send(messages: socket.socket, program: Program, descriptors: tuple[int, ...]) -> None:
    body = marshal.dumps(tuple(program))
    if len(body) <= _LARGEST_MESSAGE:
        socket.send_fds(messages, [body], descriptors)
        return
    file = linux.memory_file(body)
    try:
        socket.send_fds(messages, [b"\0"], [*descriptors, file])
    finally:
        os.close(file)


def _receive(messages: socket.socket, buffer: bytearray) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """In the child: the program that the slot has sent, as a plain tuple with the fields of Program, and its descriptors."""
    _, ((_, _, packed),), _, _ = messages.recvmsg_into([buffer], _FOUR_FDS)
    fds = _FDS[len(packed)].unpack(packed)
    if len(fds) == 3:
        return marshal.loads(buffer), fds
    with open(fds[3], "rb") as file:
        return marshal.loads(file.read()), fds[:3]


class CallParent:
    """The slot's end: starts one call at a time and receives its end.

    All but `fileno` raise EOFError or ConnectionError when the call parent has died.
    """

    def __init__(self, connection: Connection) -> None:
        self._messages, self._pids = socket.socket(fileno=connection.messages), connection.pids
        self.resident_at_start: int = _HELLO.unpack(self._receive())[0]
        self._pid = 0

    def fileno(self) -> int:
        """Becomes readable when the call has ended."""
        return self._messages.fileno()

    def start(self, program: Program, descriptors: tuple[int, ...]) -> None:
        """Send the program. Returns before the call's process exists."""
        self._pid = 0
        _send(self._messages, program, descriptors)

    @property
    def pid(self) -> int:
        """The running call's process id; waits until it is known. Not valid after `take_end`."""
        if not self._pid:
            told = os.read(self._pids, _PID.size)
            if not told:
                raise EOFError(_HAS_ENDED)
            (self._pid,) = _PID.unpack(told)
        return self._pid

    def take_end(self) -> CallEnd:
        """Wait for the call's end."""
        told = self._receive()
        _ = self.pid  # read it, or the next call would get this id
        status, peak_kb = _END.unpack_from(told)
        return CallEnd(os.waitstatus_to_exitcode(status), peak_kb * 1024, told[_END.size :].decode())

    def end_call(self) -> None:
        """Let the call's process write what it has printed (SIGXCPU), and kill it and its process group.

        A call that has ended is no error. Its id may be another's when the call parent has reaped it, which it tells at once.
        """
        pid = self.pid
        if not self._has_ended(0.0):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGXCPU)
            if not self._has_ended(_LAST_WORDS_S):
                end_group(pid)

    def _has_ended(self, wait_s: float) -> bool:
        poller = select.poll()
        poller.register(self._messages, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))

    def _receive(self) -> bytes:
        message = self._messages.recv(1 << 13)
        if not message:
            raise EOFError(_HAS_ENDED)
        return message
