"""The filters of system calls: what they allow on each architecture, and what calls are refused for that reason."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from rstar2_megatron.judge.sandbox import linux, seccomp
from tests.judge.conftest import Run
from tests.judge.sandbox.conftest import need

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
AUDIT_CODES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# of Linux 6.8 and later: statmount, listmount, lsm_set_self_attr, mseal, setxattrat, open_tree_attr; and none yet
NEW_CALLS = (457, 458, 460, 462, 463, 467, 600, 5000)


def decide(program: bytes, audit_code: int, number: int, *arguments: int) -> int:
    """What the kernel does with a call: runs the filter's classic BPF over its seccomp_data."""
    data = struct.pack("<iIQ6Q", number, audit_code, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:  # return
            return int(value)
        elif code == 0x05:
            at += value
        else:
            tests = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
            at += if_true if tests[code] else if_false


def number_of(name: str, architecture: str) -> int:
    library = ctypes.CDLL("libseccomp.so.2")
    token = ctypes.c_uint32(library.seccomp_arch_resolve_name(architecture.encode()))
    return int(library.seccomp_syscall_resolve_name_arch(token, name.encode()))


@pytest.mark.parametrize("architecture", AUDIT_CODES)
def test_only_named_calls_pass(architecture: str) -> None:
    inherited, of_calls = seccomp.compile_filters(None if architecture == linux.MACHINE else architecture)
    audit_code = AUDIT_CODES[architecture]
    allowed = {number_of(name, architecture) for name in (*seccomp.ALLOWED, *seccomp.NEEDED_BY_THE_SANDBOX)}
    with_conditions = ("clone", "socketpair", "prlimit64", "sched_setaffinity", "socket")
    conditional = {number_of(name, architecture) for name in with_conditions}
    assert {number for number in allowed if number >= 0} > {
        number_of(name, architecture) for name in ("read", "openat", "execve", "futex", "mmap", "exit_group")
    }
    for number in (*range(600), *NEW_CALLS):
        if number not in conditional:
            assert decide(inherited, audit_code, number) == (ALLOW if number in allowed else ENOSYS), number
    other = next(code for code in AUDIT_CODES.values() if code != audit_code)
    assert {decide(program, other, 0) for program in (inherited, of_calls)} == {KILL}

    def both(name: str, *arguments: int) -> set[int]:
        number = number_of(name, architecture)
        return {decide(program, audit_code, number, *arguments) for program in (inherited, of_calls)}

    sigchld, new_user, high = 17, 0x10000000, 1 << 32
    assert both("clone", sigchld) == both("socketpair", 1, 1 | 0o2000000) == both("fcntl", 0, 3) == {ALLOW}
    assert both("clone", sigchld | new_user) == both("prlimit64", 7) == {ALLOW, ENOSYS}
    refused = [("socketpair", 1, 2), ("socketpair", 1, 5), ("setpriority", 0, 7), ("setpriority", 2, 0)]
    refused += [("fcntl", 0, 1026), ("fcntl", 0, high | 1026), ("prctl", 22), ("mount",), ("unshare",), ("setns",)]
    for name, *arguments in refused:
        assert both(name, *arguments) == {ALLOW, EPERM}, (name, arguments)
    assert both("setpriority", 0, 0, 5) == {ALLOW}
    assert EPERM in both("socket", 1, 1)


@pytest.mark.skipif(linux.MACHINE != "x86_64", reason="numbers of x86-64")
def test_calls_are_refused_what_reaches_beyond_them(run: Run, layers: set[str]) -> None:
    need(layers, "seccomp")
    names = """ptrace process_vm_readv kcmp pidfd_getfd pivot_root chroot move_mount fsopen open_tree umount2 bpf
    perf_event_open userfaultfd io_uring_setup keyctl add_key shmget semget msgget mq_open init_module reboot syslog personality
    inotify_init inotify_init1 fanotify_init name_to_handle_at open_by_handle_at modify_ldt mbind sync setsockopt connect bind
    process_madvise memfd_secret vmsplice splice quotactl acct swapon iopl kexec_load memfd_create clone3"""
    enosys = sorted([number_of(name, "x86_64") for name in names.split()] + list(NEW_CALLS))
    eperm = [number_of(name, "x86_64") for name in ("socket", "mount", "unshare", "setns", "seccomp")]
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def errno(number, *arguments):
    return ctypes.get_errno() if libc.syscall(number, *arguments, 0, 0, 0, 0) == -1 else 0
print([number for number in {enosys} if errno(number) != 38], [number for number in {eperm} if errno(number) != 1])
print(errno(56, {linux.CLONE_NEWUSER}))
print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Seccomp')])
"""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    filters = int(status["Seccomp_filters"]) + 2  # a container may have one of its own
    result = run(program)
    assert result["stdout"] == f"[] []\n38\n['2', '{filters}']\n", result


@pytest.mark.parametrize("options", [{}, {"session": "state-of-input"}])
def test_memory_that_no_limit_counts_is_refused(run: Run, layers: set[str], options: dict[str, str]) -> None:
    """An anonymous file belongs to no process, so without control groups nothing bounds it: 3 GB were written."""
    need(layers, "seccomp")
    program = """
import os
attempts = [lambda: os.memfd_create('x'), lambda: os.ftruncate(0, 1 << 20), lambda: os.write(0, b'x' * 100),
            lambda: os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')]
for attempt in attempts:
    try: print('DONE', attempt())
    except OSError as error: print('refused')
print(input())
"""
    assert run(program, input="word", options=options)["stdout"] == "refused\n" * 4 + "word\n"


def test_flags_of_descriptor_0_end_with_the_call(run: Run) -> None:
    program = """
import fcntl, os
print(bool(fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND)))
fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
"""
    assert {run(program)["stdout"] for _ in range(6)} == {"False\n"}


@pytest.mark.parametrize("threads", [8, 24])
def test_threads_fit_the_address_space(run: Run, threads: int) -> None:
    program = f"""
import threading
together, filled = threading.Barrier({threads}), []
def fill():
    together.wait(5)
    filled.append(len([bytes(100_000) for _ in range(10)]))
workers = [threading.Thread(target=fill) for _ in range({threads})]
for worker in workers: worker.start()
for worker in workers: worker.join()
print(len(filled))
"""
    result = run(program)
    assert result["stdout"] == f"{threads}\n", result


def test_files_that_cannot_be_written_are_the_clients_error(run: Run) -> None:
    """The sandbox's own failures are told where no program can write, so that no program can pretend one."""
    for path in ("x" * 255, "directory/."):
        result = run("print(1)", options={"files": {path: "a", "ä" * 200: "b"}})
        assert (result["outcome"], result["reason"]) == ("invalid_input", "invalid_input"), result
        assert result["stderr"].startswith("files: "), result
    forged = run(f"import os, sys\nsys.stderr.write({result['stderr']!r})\nsys.stderr.flush()\nos._exit(250)")
    assert (forged["outcome"], forged["exit_code"]) == ("error", 250)
