"""Thin, typed wrappers of the Linux calls that Python 3.11 lacks: namespaces, mounts, seccomp, landlock.

They use ctypes because the packages for them are unmaintained (pyseccomp: 2021), pre-release (landlock) or need a shared
library that a plain machine lacks. Every function raises OSError with the call's name.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Callable, Iterable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_python_libc = ctypes.PyDLL(None, use_errno=True)  # calls that keep the interpreter's lock

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_ANY_NEW = 0x7E020000 | 0x80  # every namespace flag, CLONE_NEWTIME (0x80) included

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

# Numbers that are the same on every 64-bit architecture (all calls added since 2019, and mount_setattr).
_SYS_CLOSE_RANGE = 436
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE = 444
_SYS_LANDLOCK_ADD = 445
_SYS_LANDLOCK_RESTRICT = 446
_SYS_BY_MACHINE = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}
MACHINE = os.uname().machine

# One system call of a call's process: its name for errors, its expected result, the function, its arguments.
Step = tuple[str, object, Callable[..., object], tuple[Any, ...]]


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _number(name: str) -> int:
    try:
        return _SYS_BY_MACHINE[MACHINE][name]
    except KeyError:
        raise OSError(38, f"{name}: not known for machine type {MACHINE}") from None


def do(steps: Iterable[Step]) -> None:
    """Run prepared steps one after another. OSError when one does not return its expected result."""
    for what, result, call, arguments in steps:
        if call(*arguments) != result:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")


def nothing_step() -> Step:
    """A step that always succeeds and changes nothing."""
    return "nothing", -1, _libc.close, (-1,)


def unshare_step(flags: int) -> Step:
    return f"unshare({flags:#x})", 0, _libc.unshare, (flags,)


def unshare(flags: int) -> None:
    do([unshare_step(flags)])


def setns_step(fd: int, kind: int) -> Step:
    return "setns", 0, _libc.setns, (fd, kind)


def mount_step(source: str, target: str, fstype: str | None, flags: int, data: str = "") -> Step:
    arguments = (
        source.encode(),
        target.encode(),
        None if fstype is None else fstype.encode(),
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    return f"mount {fstype or source} on {target}", 0, _libc.mount, arguments


def mount(source: str, target: str, fstype: str | None, flags: int, data: str = "") -> None:
    do([mount_step(source, target, fstype, flags, data)])


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _check(_libc.syscall(_number("pivot_root"), new.encode(), old.encode()), "pivot_root")


def bind_read_only(source: str, target: str) -> None:
    """Bind `source` with everything mounted below it on `target`, read-only and without set-uid."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = 0x1 | 0x2 | 0x4  # RDONLY, NOSUID, NODEV
    request = struct.pack("<QQQQ", attributes, 0, 0, 0)
    at_fdcwd, at_recursive = -100, 0x8000
    _check(
        _libc.syscall(_SYS_MOUNT_SETATTR, at_fdcwd, target.encode(), at_recursive, request, len(request)),
        f"mount_setattr {target}",
    )


def fork() -> int:
    """Fork without Python's at-fork hooks: 0 in the child, as os.fork.

    The hooks of `threading`, `logging`, `random` and others write 200 pages in the child, and each is copied: 1 ms of CPU.
    Only for single-threaded processes whose child reseeds its random generators itself.
    """
    return _check(_python_libc.fork(), "fork")


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can kill and reap them."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(SUBREAPER)")


def no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def drop_capabilities() -> None:
    """Empty all capability sets and the bounding set (needed where the uid did not change)."""
    for capability in range(41):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.syscall(_number("capset"), header, bytes(24)), "capset")


def raise_open_files() -> None:
    """Raise the limit of open descriptors to its maximum: each waiting client needs one, each slot two."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def close_from_step(first: int) -> Step:
    """Close every descriptor from `first` up, without an upper bound."""
    if _libc.syscall(_SYS_CLOSE_RANGE, 0x7FFFFFFF, 0xFFFFFFFF, 0) == 0:
        return "close_range", 0, _libc.syscall, (_SYS_CLOSE_RANGE, first, 0xFFFFFFFF, 0)
    return "close what is open", None, _close_listed_from, (first,)  # kernels before 5.9


def _close_listed_from(first: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first:
            try:
                os.close(int(name))
            except OSError:
                continue


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor above standard error that is not in `kept`."""
    first = 3
    for fd in sorted(fd for fd in kept if fd >= 3):
        if fd > first and _libc.syscall(_SYS_CLOSE_RANGE, first, fd - 1, 0) < 0:  # kernels before 5.9
            os.closerange(first, fd)
        first = fd + 1
    do([close_from_step(first)])


def _own_mappings() -> list[tuple[int, int, str, str]]:
    """This process's mappings: start, end, access as in "rw-p", and the file's path, "[heap]" or the like, or ""."""
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    mappings = []
    for region in regions:
        start, end = (int(part, 16) for part in region[0].split("-"))
        mappings.append((start, end, region[1], region[5] if len(region) > 5 else ""))
    return mappings


def collapse_heap() -> int:
    """Back this process's private memory by huge pages (kernel 6.1 and later). Returns the bytes.

    A fork then copies one page-table entry for 2 MB instead of 512: half the cost of forking a 60 MB interpreter.
    """
    huge, madv_collapse = 2 << 20, 25
    total = 0
    for start, end, access, name in _own_mappings():
        if "w" not in access or name not in ("", "[heap]"):
            continue
        start, end = -(-start // huge) * huge, end // huge * huge
        # one huge page at a time: a page without memory fails and stays as it is
        for address in range(start, end, huge):
            if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(huge), madv_collapse) == 0:
                total += huge
    return total


def copy_code_at_fork() -> None:
    """Make a fork copy the page tables of Python's code; otherwise a child faults once for each 64 KB of it.

    The kernel skips mappings without a private page, so each one gets one: its first byte is written back unchanged.
    """
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for start, _, access, name in _own_mappings():
            if access not in ("r--p", "r-xp"):
                continue
            if not os.path.basename(name).startswith(("libpython", "python", "libc.", "ld-")):
                continue
            memory.seek(start)
            byte = memory.read(1)
            memory.seek(start)
            memory.write(byte)


# ---------------------------------------------------------------------------------------------- seccomp

# System calls that programs do not need and that reach beyond their own processes. x86_64 numbers.
DENIED_IN_CALLS = dict(mount=165, umount2=166, unshare=272, setns=308)  # noqa: C408  # the sandbox needs these itself
DENIED_EVERYWHERE = dict(  # noqa: C408
    socket=41, connect=42, bind=49, listen=50, accept=43, accept4=288,
    ptrace=101, process_vm_readv=310, process_vm_writev=311, process_madvise=440, kcmp=312, pidfd_getfd=438,
    pivot_root=155, chroot=161, mount_setattr=442,
    open_tree=428, move_mount=429, fsopen=430, fsconfig=431, fsmount=432, fspick=433, open_by_handle_at=304,
    name_to_handle_at=303, bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425,
    io_uring_enter=426, io_uring_register=427, keyctl=250, add_key=248, request_key=249, shmget=29, shmat=30,
    semget=64, msgget=68, mq_open=240, kexec_load=246, kexec_file_load=320, init_module=175,
    finit_module=313, delete_module=176, reboot=169, swapon=167, swapoff=168, sethostname=170,
    setdomainname=171, settimeofday=164, clock_settime=227, clock_adjtime=305, adjtimex=159, acct=163,
    syslog=103, quotactl=179, quotactl_fd=443, iopl=172, ioperm=173, memfd_secret=447, fanotify_init=300,
    vhangup=153, personality=135, lookup_dcookie=212, nfsservctl=180, move_pages=279, migrate_pages=256,
    mbind=237, set_mempolicy=238, modify_ldt=154,
)  # fmt: skip
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def _denylist_program(denied: dict[str, int]) -> bytes:
    """Classic BPF over seccomp_data: EPERM for denied calls and for namespace flags of clone, ENOSYS for clone3.

    A filter cannot read the flags of clone3, which lie in memory; glibc then falls back to clone.
    """
    numbers = sorted(denied.values())
    ops: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # architecture
        (_JUMP_EQUAL, 1, 0, 0xC000003E),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # call number
        (_JUMP_GREATER_EQUAL, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),  # x32 calls
        (_JUMP_EQUAL, 0, 1, 435),
        (_RETURN, 0, 0, _ENOSYS),
        (_JUMP_EQUAL, 0, 3, 56),  # clone
        (_LOAD, 0, 0, 16),  # its flags, low half
        (_JUMP_ANY_BIT, len(numbers) + 2, 0, _CLONE_ANY_NEW & ~0x80),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for index, number in enumerate(numbers):
        ops.append((_JUMP_EQUAL, len(numbers) - index, 0, number))
    ops += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("<HBBI", *op) for op in ops)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    def __init__(self, denied: dict[str, int]) -> None:
        program = _denylist_program(denied)
        super().__init__(len(program) // 8, program)


_inherited_filter = _FilterProgram(DENIED_EVERYWHERE)
_call_filter = _FilterProgram(DENIED_IN_CALLS)


def _install_step(program: _FilterProgram) -> Step:
    if MACHINE != "x86_64":
        raise OSError(38, f"seccomp: the call table is written for x86_64, this machine is {MACHINE}")
    return "seccomp", 0, _libc.syscall, (_number("seccomp"), 1, 0, ctypes.byref(program))


def install_inherited_filter() -> None:
    """Refuse DENIED_EVERYWHERE in this process and its descendants. Needs no_new_privileges() first.

    Installing a list this long takes the kernel 0.2 ms, so it is done once and inherited.
    """
    do([_install_step(_inherited_filter)])


def call_filter_step() -> Step:
    """Also refuse DENIED_IN_CALLS, which the sandbox has needed until then."""
    return _install_step(_call_filter)


# --------------------------------------------------------------------------------------------- landlock

_LANDLOCK_READ = 1 | 4 | 8  # execute, read a file, read a directory
_LANDLOCK_WRITE_FILE = 2 | (1 << 14)  # write and truncate


def landlock_version() -> int:
    """The kernel's landlock version. OSError without landlock."""
    return _check(_libc.syscall(_SYS_LANDLOCK_CREATE, None, 0, 1), "landlock")


def confine_writes_steps(directory: str, version: int, free_fd: int) -> list[Step]:
    """Allow writing only below `directory` (and to /dev/null). Reading is not restricted.

    `free_fd` is the lowest free descriptor at that moment; the steps rely on it for the descriptors that they open.
    """
    handled = (1 << 13) - 1 & ~_LANDLOCK_READ
    if version >= 2:
        handled |= 1 << 13  # rename and link across directories
    if version >= 3:
        handled |= 1 << 14  # truncate
    ruleset, opened = free_fd, free_fd + 1
    call, flags = _libc.syscall, os.O_PATH | os.O_CLOEXEC
    attributes = struct.pack("<Q", handled)
    steps: list[Step] = [("landlock_create_ruleset", ruleset, call, (_SYS_LANDLOCK_CREATE, attributes, 8, 0))]
    for path, rights in ((directory, handled), ("/dev/null", _LANDLOCK_WRITE_FILE & handled)):
        rule = struct.pack("<Qi", rights, opened)
        steps += [
            (f"open {path}", opened, _libc.open, (path.encode(), flags)),
            (f"landlock_add_rule {path}", 0, call, (_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)),
            (f"close {path}", 0, _libc.close, (opened,)),
        ]
    return [
        *steps,
        ("landlock_restrict_self", 0, call, (_SYS_LANDLOCK_RESTRICT, ruleset, 0)),
        ("close the ruleset", 0, _libc.close, (ruleset,)),
    ]
