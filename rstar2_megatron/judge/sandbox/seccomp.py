"""The system calls that programs may make. Every other one, also of kernels to come, is refused.

libseccomp (every Debian and Ubuntu has it: apt and systemd need it) knows each architecture's numbers and compiles the filters.
Refused is ENOSYS, as by an older kernel, so that the C library falls back where it can; EPERM where a program should read
that it may not. There are two filters: the kernel takes 0.2 ms to install the list, so the zygote does it once, and all
processes of the sandbox inherit it. A call adds the short second one, which refuses what the sandbox itself needs until then.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.judge.sandbox.linux import Step

_NAMES = """
read write open openat openat2 creat close close_range lseek pread64 pwrite64 readv writev preadv pwritev sendfile
copy_file_range dup dup2 dup3 pipe pipe2 fcntl ioctl flock fsync fdatasync truncate ftruncate fallocate fadvise64 readahead
sync_file_range stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents getdents64 getcwd
chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat readlink readlinkat
mknod mknodat chmod fchmod fchmodat chown fchown lchown fchownat umask utime utimes futimesat utimensat setxattr lsetxattr
fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr mmap munmap
mprotect mremap madvise msync mincore mlock mlock2 munlock mlockall munlockall brk membarrier select pselect6 poll ppoll
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create
timerfd_settime timerfd_gettime recvfrom sendto recvmsg sendmsg recvmmsg sendmmsg shutdown getsockname getpeername
getsockopt fork vfork execve execveat exit exit_group wait4 waitid set_tid_address set_robust_list get_robust_list rseq
arch_prctl prctl futex futex_waitv restart_syscall sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_getattr sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority setpriority getcpu getrlimit
setrlimit getrusage times sysinfo uname rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait
rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack kill tkill tgkill pidfd_open pidfd_send_signal pause alarm getitimer setitimer
timer_create timer_settime timer_gettime timer_getoverrun timer_delete nanosleep clock_nanosleep clock_gettime clock_getres
gettimeofday time getrandom getpid getppid gettid getpgid setpgid getpgrp getsid setsid getuid geteuid getgid getegid
getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capget capset
landlock_create_ruleset landlock_add_rule landlock_restrict_self
"""
ALLOWED = _NAMES.split()
NEEDED_BY_THE_SANDBOX = ("seccomp", "mount", "unshare", "setns", "sched_setattr", "memfd_create")

ALLOW, _NOTIFY, _KILL = 0x7FFF0000, 0x7FC00000, 0x80000000
_EPERM, _ENOSYS = (0x00050000 | number for number in (errno.EPERM, errno.ENOSYS))
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8  # attributes of a filter
_INT = 0xFFFFFFFF  # the kernel ignores the upper half of an argument of type int
_NEW_NAMESPACES = 0x7E020000
_F_NOTIFY, _PR_SET_SECCOMP, _MODE_FILTER, _AF_UNIX, _SOCK_DATAGRAM_OR_RAW, _SOCK_SEQPACKET = 1026, 22, 2, 1, 2, 4
_SET_OWNER = (("fcntl", 8), ("fcntl", 15), ("ioctl", 0x8901), ("ioctl", 0x8902))  # whom a descriptor's events signal


class Compare(ctypes.Structure):
    """A condition on a system call's argument, as libseccomp's scmp_arg_cmp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _equal(position: int, value: int, mask: int = _INT) -> Compare:
    """The argument is `value` after `mask`."""
    return Compare(position, _MASKED_EQUAL, mask, value)


class Rule(NamedTuple):
    name: str
    action: int
    when: Compare | None = None


INHERITED_RULES = [
    *(Rule(name, ALLOW) for name in (*ALLOWED, *NEEDED_BY_THE_SANDBOX)),
    Rule("clone", ALLOW, _equal(0, 0, _NEW_NAMESPACES)),  # clone3's flags lie in memory: glibc falls back to clone
    Rule("socketpair", ALLOW, _equal(0, _AF_UNIX)),
    Rule("prlimit64", ALLOW, _equal(0, 0)),  # only its own limits, where other processes have the same uid
    Rule("sched_setaffinity", ALLOW, _equal(0, 0)),
    Rule("socket", _EPERM),
]
CALL_RULES = [
    *(Rule(name, _EPERM) for name in NEEDED_BY_THE_SANDBOX[:-1]),
    Rule("memfd_create", _ENOSYS),  # memory that no limit but a control group's counts
    Rule("prctl", _EPERM, _equal(0, _PR_SET_SECCOMP)),
    Rule("fcntl", _EPERM, _equal(1, _F_NOTIFY)),  # what the machine does in directories that calls can read
    # a datagram or packet socket can send to any name; a connected stream cannot
    Rule("socketpair", _EPERM, _equal(1, _SOCK_DATAGRAM_OR_RAW, _SOCK_DATAGRAM_OR_RAW)),
    Rule("socketpair", _EPERM, _equal(1, _SOCK_SEQPACKET, _SOCK_SEQPACKET)),
    Rule("setpriority", _EPERM, Compare(0, _NOT_EQUAL, 0)),  # only its own niceness
    Rule("setpriority", _EPERM, Compare(1, _NOT_EQUAL, 0)),
]

_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open")  # the only way to another's pidfd
# The argument that names a process or a group, of each system call that the guard decides about; None: it starts a process.
GUARDED: dict[str, int | None] = {**dict.fromkeys(_SIGNALS, 0), "setpgid": 1, **dict.fromkeys(("clone", "fork", "vfork"))}
GUARDED_RULES = [
    *(Rule(name, _NOTIFY) for name in GUARDED),
    *(Rule(name, _EPERM, _equal(1, command)) for name, command in _SET_OWNER),
]


def compile_filter(default: int, rules: Iterable[Rule], architecture: str | None = None) -> bytes:
    """The kernel's program (classic BPF) for `rules`. Names that the architecture or libseccomp lacks get `default`.

    `architecture` as libseccomp names it ("aarch64"); None: this machine's. Maps libseccomp into this process. Raises OSError.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise OSError(errno.ENOENT, f"{error}: install libseccomp (Debian, Ubuntu: apt-get install libseccomp2)") from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(default)))
    try:
        if architecture is not None:
            token = ctypes.c_uint32(library.seccomp_arch_resolve_name(architecture.encode()))
            _check(library.seccomp_arch_add(context, token), f"seccomp_arch_add {architecture}")
            _check(library.seccomp_arch_remove(context, library.seccomp_arch_native()), "seccomp_arch_remove")
        _check(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, ctypes.c_uint32(_KILL)), "seccomp_attr_set")
        library.seccomp_attr_set(context, _OPTIMIZE, 2)  # a binary tree; libseccomp 2.4 makes a list
        for name, action, when in rules:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == -1:
                continue
            conditions = (0, None) if when is None else (1, ctypes.byref(when))
            added = library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, *conditions)
            _check(added, f"seccomp_rule_add {name}")
        with open(os.memfd_create("filter"), "rb") as file:
            _check(library.seccomp_export_bpf(context, file.fileno()), "seccomp_export_bpf")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")


def numbers_of_guarded() -> dict[int, str]:
    """Number of each guarded system call of this machine, and its name. As `compile_filter`."""
    library = ctypes.CDLL("libseccomp.so.2")
    return {library.seccomp_syscall_resolve_name(name.encode()): name for name in GUARDED}


class Filters(NamedTuple):
    inherited: bytes
    call: bytes


def compile_filters(architecture: str | None = None) -> Filters:
    """What all processes of the sandbox inherit, and what a call adds. As `compile_filter`."""
    return Filters(compile_filter(_ENOSYS, INHERITED_RULES, architecture), compile_filter(ALLOW, CALL_RULES, architecture))


class _Program(ctypes.Structure):
    """The kernel's sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_step(program: bytes) -> Step:
    """Filter this process and its descendants from then on. Needs no_new_privileges() first."""
    return "seccomp", 0, linux.prctl, (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(program) // 8, program)))


def install_with_listener(program: bytes) -> int:
    """As `install_step`. Returns the descriptor by which another process decides what the filter does not. Raises OSError."""
    set_filter, new_listener, filters = 1, 8, _Program(len(program) // 8, program)
    listener: int = linux.system_call(linux.SYS_SECCOMP, set_filter, new_listener, ctypes.byref(filters))
    if listener < 0:
        raise OSError(ctypes.get_errno(), f"seccomp with a listener: {os.strerror(ctypes.get_errno())}")
    return listener
