"""Thin, typed wrappers of the Linux calls that Python 3.11 lacks: namespaces, mounts, landlock.

They use ctypes because the packages for them are unmaintained or pre-release (landlock). Every function raises OSError with
the call's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rstar2_megatron.services.parent_death import die_with_parent

_libc = ctypes.CDLL(None, use_errno=True)
prctl, system_call, flush_c_streams = _libc.prctl, _libc.syscall, _libc.fflush
_python_libc = ctypes.PyDLL(None, use_errno=True)  # calls that keep the interpreter's lock

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_VM = 0x100
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38

# Numbers that are the same on every 64-bit architecture (all calls added since 2019, and mount_setattr).
_SYS_CLOSE_RANGE, _SYS_MOUNT_SETATTR = 436, 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
MACHINE = os.uname().machine
# -1: the kernel answers that it has no such call
_SYS_SCHED_SETATTR, SYS_SECCOMP = {"x86_64": (314, 317), "aarch64": (274, 277)}.get(MACHINE, (-1, -1))

# One system call of a call's process: its name for errors, its expected result, the function, its arguments.
Step = tuple[str, object, Callable[..., object], tuple[Any, ...]]


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise _failed(what)
    return result


def do(steps: Iterable[Step]) -> None:
    """Run prepared steps one after another. OSError when one does not return its expected result."""
    for what, result, call, arguments in steps:
        if call(*arguments) != result:
            raise _failed(what)


def unshare_step(flags: int) -> Step:
    return f"unshare({flags:#x})", 0, _libc.unshare, (flags,)


def return_step(name: str, kind: int) -> Step:
    """Return to the namespace `name` of /proc/self/ns that this process has now."""
    return "setns", 0, _libc.setns, (os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), kind)


def prctl_step(what: str, option: int, value: int) -> Step:
    return what, 0, prctl, (option, value, 0, 0, 0)


def mount_step(source: str, target: str, fstype: str | None, flags: int, data: str = "") -> Step:
    what, kind = f"mount {fstype or source} on {target}", fstype and fstype.encode()
    return what, 0, _libc.mount, (source.encode(), target.encode(), kind, ctypes.c_ulong(flags), data.encode() or None)


def mount(source: str, target: str, fstype: str | None, flags: int, data: str = "") -> None:
    do([mount_step(source, target, fstype, flags, data)])


def mount_id(path: str) -> int:
    """The kernel's number of the mount that `path` lies on."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            return int(file.read().split("mnt_id:")[1].split()[0])
    finally:
        os.close(descriptor)


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(new.encode(), old.encode()), "pivot_root")


def bind_read_only(source: str, target: str) -> None:
    """Bind `source` with everything mounted below it on `target`, which is made, read-only and without set-uid."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL))
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = 0x1 | 0x2 | 0x4  # RDONLY, NOSUID, NODEV
    at_fdcwd, at_recursive, request = -100, 0x8000, struct.pack("<QQQQ", attributes, 0, 0, 0)
    arguments = (at_fdcwd, target.encode(), at_recursive, request, len(request))
    _check(system_call(_SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {target}")


def fork() -> int:
    """Fork without Python's at-fork hooks: 0 in the child, as os.fork.

    The hooks of `threading`, `logging`, `random` and others write 200 pages in the child, and each is copied: 1 ms of CPU.
    Only for single-threaded processes whose child reseeds its random generators itself.
    """
    return _check(_python_libc.fork(), "fork")


def start_process(name: str, work: Callable[[], object]) -> int:
    """Fork one of the service's own processes: it does `work`, and ends with this one. Returns its id.

    What `work` raises is told on standard error.
    """
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL)
            work()
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(2, f"judge {name}: {error!r}\n".encode())
        finally:
            os._exit(1)
    return pid


_init_stack = (ctypes.c_char * 4096)()
_init_stack_end = ctypes.c_void_p((ctypes.addressof(_init_stack) + 4096) & ~15)
_all_signals, _signals_before = ctypes.create_string_buffer(b"\xff" * 128, 128), ctypes.create_string_buffer(128)


def start_init() -> int:
    """Start the first process of the PID namespace that the next children of this process enter. Returns its id.

    The kernel keeps signals from a namespace's first process, so a program that were the first one could not end itself by a
    signal. This one only waits, in the memory of this process, which is 2 MB and 1 ms less than a fork; it ends by SIGKILL from
    outside, and all others of the namespace end with it. One at a time.
    """
    set_mask, mask_signals = 2, _python_libc.pthread_sigmask
    mask_signals(set_mask, _all_signals, _signals_before)  # or it would run this process's signal handlers, in its memory
    try:
        return _check(_python_libc.clone(_libc.pause, _init_stack_end, _CLONE_VM | signal.SIGCHLD, None), "clone")
    finally:
        mask_signals(set_mask, _signals_before, None)


def memory_file(content: bytes) -> int:
    """Descriptor of an anonymous file with `content`, at its start, which nobody can change or enlarge."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    add_seals, all_seals = 1033, 0xF  # not by the module fcntl: each call would copy its mappings
    _check(_libc.fcntl(fd, add_seals, all_seals), "fcntl(F_ADD_SEALS)")
    return fd


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can kill and reap them."""
    _check(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(SUBREAPER)")


def no_new_privileges() -> None:
    _check(prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def drop_capabilities() -> None:
    """Empty all capability sets and the bounding set (needed where the uid did not change)."""
    for capability in range(41):
        if prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, bytes(24)), "capset")


USUAL_SLICE = 0.0  # the kernel's own choice


def set_slice(slice_s: float, niceness: int) -> None:
    """Set how long this process and its children may keep a core while others wait (0.1 to 100 ms), and their niceness.

    A process with a shorter slice interrupts one with a longer slice as soon as it needs a core, and gets no more of it. Before
    Linux 6.12 only the niceness is set.
    """
    attributes = struct.pack("<IIQiIQQQ", 48, os.SCHED_OTHER, 0, niceness, 0, int(slice_s * 1e9), 0, 0)
    _check(system_call(_SYS_SCHED_SETATTR, 0, attributes, 0), "sched_setattr")


def raise_open_files() -> None:
    """Raise the limit of open descriptors to its maximum: each waiting client needs one, each slot two."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def close_from_step(first: int) -> Step:
    return "close_range", 0, system_call, (_SYS_CLOSE_RANGE, first, 0xFFFFFFFF, 0)


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor above standard error that is not in `kept`."""
    first = 3
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = max(first, fd + 1)
    do([close_from_step(first)])


def collapse_heap() -> None:
    """Back this process's private memory by huge pages (kernel 6.1 and later).

    A fork then copies one page-table entry for 2 MB instead of 512: a call with sympy imported costs 6 to 15% less.
    """
    huge, madv_collapse = 2 << 20, 25
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for extent, access, _, _, _, *name in regions:
        if "w" not in access or name not in ([], ["[heap]"]):
            continue
        start, end = (int(part, 16) for part in extent.split("-"))
        # one huge page at a time: a page without memory fails and stays as it is
        for address in range(-(-start // huge) * huge, end // huge * huge, huge):
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(huge), madv_collapse)


# --------------------------------------------------------------------------------------------- landlock

_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1, 4, 8
_WRITE_FILE = 2 | (1 << 14)  # write and truncate
LANDLOCK_SCOPE_VERSION = 6


def landlock_version() -> int:
    """The kernel's landlock version. OSError without landlock."""
    return _check(system_call(_SYS_LANDLOCK_CREATE, None, 0, 1), "landlock")


def landlock_steps(directory: str, readable: Sequence[str] | None, version: int, free_fd: int) -> list[Step]:
    """Allow writing only below `directory` (and to /dev/null), reading only there and below `readable` (None: everywhere).

    Where the kernel has it, TCP is refused too, and signals and abstract sockets reach only what the process itself starts.
    `free_fd` is the lowest free descriptor at that moment; the steps rely on it for the descriptors that they open.
    """
    handled = (1 << 13) - 1
    if version >= 2:
        handled |= 1 << 13  # rename and link across directories
    if version >= 3:
        handled |= 1 << 14  # truncate
    reading = _EXECUTE | _READ_FILE | _READ_DIRECTORY
    if readable is None:
        handled &= ~reading
    size = 24 if version >= LANDLOCK_SCOPE_VERSION else 16 if version >= 4 else 8
    attributes = struct.pack("<QQQ", handled, 3, 3)[:size]  # files; TCP; abstract sockets and signals
    ruleset, opened = free_fd, free_fd + 1
    flags = os.O_PATH | os.O_CLOEXEC
    steps: list[Step] = [("landlock_create_ruleset", ruleset, system_call, (_SYS_LANDLOCK_CREATE, attributes, size, 0))]
    rules = [(path, reading if os.path.isdir(path) else _EXECUTE | _READ_FILE) for path in readable or ()]
    for path, rights in (*rules, (directory, handled), ("/dev/null", _WRITE_FILE | _READ_FILE)):
        rule = struct.pack("<Qi", rights & handled, opened)
        steps += [
            (f"open {path}", opened, _libc.open, (path.encode(), flags)),
            (f"landlock_add_rule {path}", 0, system_call, (_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)),
            (f"close {path}", 0, _libc.close, (opened,)),
        ]
    steps.append(("landlock_restrict_self", 0, system_call, (_SYS_LANDLOCK_RESTRICT, ruleset, 0)))
    steps.append(("close the ruleset", 0, _libc.close, (ruleset,)))
    return steps
