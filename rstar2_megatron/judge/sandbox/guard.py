"""Stands between calls and the service where both have one uid, and the machine refuses this user namespaces.

Ubuntu 24.04 refuses them to ordinary users. There a call could signal the service (before Linux 6.12), and the kernel's limit
of processes counts everything that the user runs. So each call parent has a seccomp filter, which its calls inherit: a system
call that signals, enters a process group or starts a process waits until the guard, one process for the whole judge, has looked
at who descends from whom (Linux 5.5). When the guard has died, the kernel refuses these system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
from typing import NoReturn

from rstar2_megatron.judge.limits import PROCESSES
from rstar2_megatron.judge.sandbox import linux, seccomp
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers
from rstar2_megatron.judge.sandbox.process_tree import family, parent_of

# The kernel's seccomp_notif (id, process, flags; number, architecture, instruction, six arguments) and seccomp_notif_resp (id,
# result, error, flags), and the ioctls that read the one and write the other.
_QUESTION, _ANSWER = struct.Struct("<QII iIQ 6Q"), struct.Struct("<QqiI")
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1


def start(layers: IsolationLayers) -> int:
    """In the launcher: start the guard's process where it is needed. Returns its process id, or 0. It ends with its parent."""
    if layers.active & {"pid_namespace", "own_uid"}:
        return 0
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = linux.start_process("guard", lambda: _serve(theirs))
    theirs.close()
    layers.guard = [ours.detach()]
    return pid


def stand_under(layers: IsolationLayers) -> None:
    """In a call parent: from here on the guard decides about this process and its calls. Raises OSError."""
    if "guard" in layers.active:
        listener = seccomp.install_with_listener(layers.guarded)
        with socket.socket(fileno=layers.guard[0]) as channel:
            socket.send_fds(channel, [str(os.getpid()).encode()], [listener])
        os.close(listener)


def _serve(channel: socket.socket) -> NoReturn:
    linux.close_all_but({channel.fileno()})
    names: dict[int, str] = {}
    parents: dict[int, int] = {}  # listener -> call parent
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    while True:
        for fd, event in poller.poll():
            if fd == channel.fileno():
                names = names or seccomp.numbers_of_guarded()
                message, (listener,), _, _ = socket.recv_fds(channel, 64, 1)
                parents[listener] = int(message)
                poller.register(listener, select.POLLIN)
            elif event & select.POLLIN:
                _answer(fd, parents[fd], names)
            else:  # the call parent and its calls have ended
                poller.unregister(fd)
                del parents[fd]
                os.close(fd)


def _answer(listener: int, parent: int, names: dict[int, str]) -> None:
    import fcntl  # here: each call would copy its mappings

    question = bytearray(_QUESTION.size)
    with contextlib.suppress(OSError):  # who asked has ended, or was interrupted and asks again
        fcntl.ioctl(listener, _RECEIVE, question)
        number, caller, _, call, _, _, *arguments = _QUESTION.unpack(question)
        position = seccomp.GUARDED[names[call]]
        if position is None:
            refusal = 0 if caller == parent or _may_start(parent) else errno.EAGAIN
        else:
            refusal = 0 if _may_reach(parent, ctypes.c_int32(arguments[position]).value) else errno.EPERM
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, -refusal, 0 if refusal else _CONTINUE))


def _may_start(parent: int) -> bool:
    """Whether the call of this call parent, all of whose descendants are the call's, has room for another process or thread."""
    count = 0
    for member in family(parent):
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{member}/task"))
    return count - 1 < PROCESSES  # without the call parent


def _may_reach(parent: int, target: int) -> bool:
    """Whether a process, thread or (negative) process group is of this call parent's call."""
    if target == 0:  # its own group, into which no other call's process comes; or a new one
        return True
    above = 0 if target == -1 else abs(target)  # -1: everything that it may signal
    with contextlib.suppress(OSError):  # there is no such process
        while above > 1:
            above = parent_of(above)
            if above == parent:
                return True
    return False
