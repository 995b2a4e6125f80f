"""The isolation layers around a call: set up once for all slots where possible, else for each call.

Once (zygote): user namespace for an ordinary user; PID, network, IPC and host-name namespaces; a root file
system that holds only the interpreter and system libraries, read-only. For each call: own PID and mount
namespace, a private tmpfs with the working directory, resource limits, the slot's own uid, landlock, and seccomp for the
calls that the sandbox itself needs (all others are refused from the zygote on).
Where namespaces are refused to an ordinary user, the guard (guard.py) stands between calls and the service.
Layers that the machine refuses are recorded in `IsolationLayers.missing` and shown in /status and the log.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.judge.libraries import LIBRARIES
from rstar2_megatron.judge.limits import DISK_MB, MEGABYTE, OPEN_FILES, PROCESSES
from rstar2_megatron.judge.sandbox import linux, seccomp
from rstar2_megatron.judge.sandbox.linux import Step

# A call's tmpfs; /dev/shm leads there too. An interpreter that lies below one of the two is mounted in the tmpfs and seen
# there, so the working directory, which starts empty, is a directory of the tmpfs.
CALL_TMPFS = "/tmp"
CALL_DIRECTORY = "/tmp/judge-call"
_SHARED_MEMORY = Path("/dev/shm")
# Second mount of interpreter files that a call's tmpfs hides.
_UNCOVERED = "/uncovered"
COMMANDS = "/judge"  # in front of the other commands and modules
_NO_PIP = (
    "ERROR: pip cannot install anything here, because programs have no network. Beside the standard library a program may "
    f"import: {', '.join(LIBRARIES.values())}."
)
USER = "program"  # the name of every slot's uid
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": CALL_DIRECTORY,
    "USER": USER,
    "LOGNAME": USER,
    "TMPDIR": CALL_DIRECTORY,
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # each further one reserves 128 MB of a thread's address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "PIP_NO_INDEX": "1",  # where there is no private root to put COMMANDS in
}
# The level `full` needs all of these; landlock is extra, because the file system is already read-only.
_NAMESPACES = ("pid_namespace", "network_namespace", "ipc_namespace")
_ROOT = ("private_root", "private_tmpfs")
_REQUIRED = {"own_uid", *_NAMESPACES, *_ROOT, "memory_cgroup", "process_limit", "seccomp", "clean_environment"}
_SYSTEM_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SYSTEM_FILES = ("etc/ld.so.cache", "etc/localtime", "etc/alternatives", "etc/mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_READ_BY_PROGRAMS = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu")
# At the level `partial` a call can neither signal the service nor read its files, by one of each.
_WALLS = (("seccomp",), ("pid_namespace", "own_uid", "landlock_scope", "guard"), ("private_root", "own_uid", "landlock"))


class IsolationLayers:
    """The active layers. `missing` maps each other layer to the reason."""

    def __init__(self) -> None:
        self.active: set[str] = set()
        self.missing: dict[str, str] = {}
        self.uid_base: int | None = None  # slot i runs as uid_base + i
        self.uids: Sequence[int] = (os.geteuid(),)  # of all calls
        self.in_user_namespace = False
        self.filters = seccomp.Filters(b"", b"")
        self.landlock = 0
        self.guard: list[int] = []  # descriptor of its socket, where there is a guard
        self.guarded = b""  # filter of the call parents under it
        self.covered: dict[str, str] = {}  # interpreter's directory -> its second mount

    def record(self, layer: str, why_missing: object = None) -> None:
        """A layer is active, or missing for a reason."""
        if why_missing is None:
            self.active.add(layer)
            self.missing.pop(layer, None)
        else:
            self.active.discard(layer)
            self.missing[layer] = str(why_missing)

    @property
    def level(self) -> str:
        if self.active.issuperset(_REQUIRED):
            return "full"
        return "minimal" if any(self.active.isdisjoint(wall) for wall in _WALLS) else "partial"

    def report(self) -> dict[str, Any]:
        return {"level": self.level, "active": sorted(self.active), "missing": self.missing}


def enter_namespaces(layers: IsolationLayers) -> None:
    """In the launcher: new namespaces for the zygote that is forked next, and for its descendants."""
    wanted = linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()

    def enter() -> None:
        try:
            if uid != 0:
                raise PermissionError(1, "not root")
            linux.do([linux.unshare_step(wanted)])
        except OSError as as_root:
            try:
                linux.do([linux.unshare_step(linux.CLONE_NEWUSER | wanted)])
                with contextlib.suppress(FileNotFoundError):
                    Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
                Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
                layers.in_user_namespace = True
            except OSError as error:
                raise OSError(f"{as_root}; {error}{_apparmor_remedy()}") from None

    # First in a child: AppArmor refuses what comes after the namespaces are made, and nothing leads back from them.
    _try_in_child(layers, "pid_namespace", enter)
    if "pid_namespace" in layers.active:
        enter()
    for layer in _NAMESPACES:
        layers.record(layer, layers.missing.get("pid_namespace"))


def _apparmor_remedy() -> str:
    """The command by which an administrator lets this Python make user namespaces, where AppArmor refuses them; or ""."""
    with contextlib.suppress(OSError):
        if Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").read_text().strip() != "0":
            python, place = os.path.realpath(sys.executable), "/etc/apparmor.d/rstar2-judge"
            profile = f"abi <abi/4.0>, profile rstar2-judge {python} flags=(unconfined) {{ userns, }}"
            return f". To allow them: echo '{profile}' | sudo tee {place} && sudo apparmor_parser -r {place}"
    return ""


def choose_uids(layers: IsolationLayers, slots: int) -> None:
    """In the launcher: one uid for each slot, in a range derived from its process id, so that two workers differ."""
    if os.geteuid() != 0:
        layers.record("own_uid", f"not root: calls run as uid {os.geteuid()}")
        return
    if layers.in_user_namespace:
        layers.record("own_uid", "root without the right to make namespaces: only one uid is mapped")
        return
    mapped = max(int(line.split()[0]) + int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    first = 1_000_000_000 if mapped > 2_100_000_000 else 20_000
    size = 1 << slots.bit_length()  # a node's workers have a slot more or less, and process ids beside each other
    ranges = (min(mapped, 2_100_000_000) - first) // size
    if ranges < 1:
        layers.record("own_uid", f"uids up to {mapped} only: calls run as uid 0")
        return
    base = first + os.getpid() % ranges * size
    layers.uid_base = base
    layers.uids = range(base, base + slots)
    layers.record("own_uid")


def build_private_root(layers: IsolationLayers) -> None:
    """In the zygote: a read-only root file system that holds only system libraries and the interpreter."""
    _try_in_child(layers, "private_root", _refuse_a_chroot)
    try:
        if "private_root" in layers.missing:
            raise OSError(layers.missing["private_root"])
        linux.do([linux.unshare_step(linux.CLONE_NEWNS)])
        linux.mount("none", "/", None, linux.MS_PRIVATE | linux.MS_REC)
        layers.covered = _pivot_into_view(layers.uids)
        layers.record("private_root")
    except OSError as error:
        for layer in _ROOT:
            layers.record(layer, error)


def _refuse_a_chroot() -> None:
    """Raises OSError in a chroot: who returns to a mount namespace of it, as the zygote does, is in the root outside."""
    linux.do([linux.unshare_step(linux.CLONE_NEWNS)])  # an ordinary user may return to one of its own only
    before = linux.mount_id("/")
    linux.do([linux.return_step("mnt", linux.CLONE_NEWNS)])
    if linux.mount_id("/") != before:
        raise OSError("the judge runs in a chroot: start it outside of that, or in a container")


def package_directories() -> list[str]:
    """Where `sys.path` finds installed packages."""
    return [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]


def _interpreter_directories() -> list[Path]:
    """Directories of the interpreter and its packages outside the system directories, by each name that they have."""
    named = [Path(name) for name in (sys.base_prefix, sys.prefix, *package_directories())]
    kept: list[Path] = []
    for path in sorted({*named, *(path.resolve() for path in named)}, key=lambda path: len(path.parts)):
        inside = any(path == other or other in path.parents for other in [Path("/usr"), *kept])
        if path.is_dir() and not inside:
            kept.append(path)
    return kept


def _pivot_into_view(uids: Sequence[int]) -> dict[str, str]:
    """`uids` get a name. Returns the interpreter's directories that a call's tmpfs will cover, with their second mounts."""
    # A .venv may be a symbolic link; it is resolved here, because the new root does not hold its target.
    interpreter = {path: path.resolve() for path in _interpreter_directories()}
    base = CALL_TMPFS  # any directory: a tmpfs covers it in this mount namespace only
    linux.mount("tmpfs", base, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    os.makedirs(f"{base}/new")
    os.makedirs(f"{base}/old")
    linux.pivot_root(base, f"{base}/old")
    os.chdir("/")
    old, new = Path("/old"), Path("/new")
    linux.mount("tmpfs", "/new", "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
    for name in _SYSTEM_DIRECTORIES:
        source = old / name
        if source.is_symlink():
            (new / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            linux.bind_read_only(str(source), str(new / name))
    covered: dict[str, str] = {}
    for path, source in interpreter.items():
        if _SHARED_MEMORY in path.parents:
            path = CALL_TMPFS / path.relative_to(_SHARED_MEMORY)
        places = [path]
        if Path(CALL_TMPFS) in path.parents:
            places.append(Path(_UNCOVERED) / str(len(covered)))
            covered[str(path)] = str(places[-1])
        for place in places:
            linux.bind_read_only(f"/old{source}", f"/new{place}")
    for name in ("etc", "dev", "proc", "tmp"):
        (new / name).mkdir(exist_ok=True)
    for name in _SYSTEM_FILES:
        if (old / name).exists():
            linux.bind_read_only(str((old / name).resolve()), str(new / name))
    users = [f"{USER}:x:{uid}:{uid}::{CALL_DIRECTORY}:/bin/sh\n" for uid in uids]
    (new / "etc/passwd").write_text("root:x:0:0::/:/bin/false\n" + "".join(users))
    (new / "etc/group").write_text("".join([f"{USER}:x:{uid}:\n" for uid in uids]))
    commands = new / COMMANDS[1:]
    commands.mkdir()
    (commands / "pip.py").write_text(f"raise SystemExit({_NO_PIP!r})\n")
    # matplotlib asks fc-list for the system's fonts at each import: that takes time and, without /etc, prints an error.
    for name, said in (("pip", f"echo '{_NO_PIP}' >&2\n"), ("pip3", f"echo '{_NO_PIP}' >&2\n"), ("fc-list", "")):
        (commands / name).write_text(f"#!/bin/sh\n{said}exit 1\n")
        (commands / name).chmod(0o755)
    for name in _DEVICES:
        (new / "dev" / name).touch()
        linux.mount(f"/old/dev/{name}", f"/new/dev/{name}", None, linux.MS_BIND)
    (new / "dev/shm").symlink_to(CALL_TMPFS)
    (new / "dev/fd").symlink_to("/proc/self/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (new / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    linux.mount("proc", "/new/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    os.chdir("/new")
    linux.pivot_root(".", ".")  # the last root lies over the new one until it is unmounted
    linux.unmount(".")
    os.chdir("/")
    linux.mount("none", "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID)
    return covered


def choose_remaining_layers(layers: IsolationLayers) -> None:
    """In the zygote: find out which per-call layers work, by trying them in a child process."""
    try:
        layers.landlock = linux.landlock_version()
        layers.record("landlock")
        has_scope = layers.landlock >= linux.LANDLOCK_SCOPE_VERSION
        layers.record("landlock_scope", None if has_scope else f"landlock version {layers.landlock}: Linux 6.12 has it")
    except OSError as error:
        layers.record("landlock", error)
    layers.record("clean_environment")
    if "private_root" in layers.active:
        layers.record("private_tmpfs")  # until it fails: without it there are no steps to try
        _try_in_child(layers, "private_tmpfs", lambda: linux.do(directory_steps(layers, 0)))
    told = _try_in_child(layers, "seccomp", _compile_and_try_filters)
    if told:
        layers.filters = seccomp.Filters(*marshal.loads(told))
    if layers.guard:
        layers.guarded = _try_in_child(layers, "guard", _compile_and_try_guarded)
    if layers.in_user_namespace:
        # Each call gets a user namespace of its own, because the kernel counts the processes of a uid in each namespace.
        _try_in_child(layers, "process_limit", lambda: linux.do([linux.unshare_step(linux.CLONE_NEWUSER)]))
    else:
        is_shared = layers.active.isdisjoint({"own_uid", "guard"})
        layers.record("process_limit", "one uid: the limit counts all processes of this user" if is_shared else None)


def raise_inherited_layers(layers: IsolationLayers) -> None:
    """In the zygote, last: restrictions that all descendants inherit and the zygote itself can live with."""
    linux.no_new_privileges()
    if "seccomp" in layers.active:
        linux.do([seccomp.install_step(layers.filters.inherited)])


def _compile_and_try_filters() -> bytes:
    filters = seccomp.compile_filters()
    linux.no_new_privileges()
    linux.do(seccomp.install_step(program) for program in filters)
    return marshal.dumps(tuple(filters))


def _compile_and_try_guarded() -> bytes:
    program = seccomp.compile_filter(seccomp.ALLOW, seccomp.GUARDED_RULES)
    linux.no_new_privileges()
    seccomp.install_with_listener(program)
    return program


def _try_in_child(layers: IsolationLayers, layer: str, attempt: Callable[[], bytes | None]) -> bytes:
    """What `attempt` returned in a child process; the layer is active if it did not raise OSError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = b"\0" + (attempt() or b"")
        except OSError as error:
            told = str(error).encode()
        os.write(writer, told)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    if told[:1] == b"\0":
        layers.record(layer)
        return told[1:]
    layers.record(layer, told.decode(errors="replace") or "the trial process died")
    return b""


def directory_steps(layers: IsolationLayers, slot: int) -> list[Step]:
    """A mount namespace with a private tmpfs, and the working directory in it; none where the machine refuses that."""
    if "private_tmpfs" not in layers.active:
        return []
    uid = None if layers.uid_base is None else layers.uid_base + slot
    owner = "" if uid is None else f",uid={uid},gid={uid}"
    options = f"size={DISK_MB}m,nr_inodes=10000,mode=700{owner}"
    steps: list[Step] = [
        linux.unshare_step(linux.CLONE_NEWNS),
        linux.mount_step("tmpfs", CALL_TMPFS, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options),
        (f"make {CALL_DIRECTORY}", None, os.mkdir, (CALL_DIRECTORY, 0o700)),
    ]
    if uid is not None:
        steps.append((f"own {CALL_DIRECTORY}", None, os.chown, (CALL_DIRECTORY, uid, uid)))
    for path, place in layers.covered.items():
        steps.append((f"make {path}", None, os.makedirs, (path,)))
        steps.append(linux.mount_step(place, path, None, linux.MS_BIND))  # read-only, as the second mount is
    return steps


def _readable_paths() -> list[str]:
    """What programs need to read where no private root hides the rest."""
    names = [*_SYSTEM_DIRECTORIES, *_SYSTEM_FILES, *(f"dev/{name}" for name in _DEVICES)]
    paths = [*(f"/{name}" for name in names), *_READ_BY_PROGRAMS, *map(str, _interpreter_directories())]
    return [path for path in paths if os.path.exists(path)]


def isolation_steps(layers: IsolationLayers, slot: int, directory: str, free_fd: int) -> list[Step]:
    """The system calls by which a process in a directory of its own enters all other layers, before it runs the program.

    `free_fd` is the lowest free descriptor at that moment.
    """
    uid = None if layers.uid_base is None else layers.uid_base + slot
    steps: list[Step] = []
    if {"private_tmpfs", "pid_namespace"} <= layers.active:
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        steps.append(linux.mount_step("proc", "/proc", "proc", flags, "hidepid=2"))  # hides the namespace's first process
    steps.append(("chdir", None, os.chdir, (directory,)))
    if layers.in_user_namespace and "process_limit" in layers.active:
        steps.append(linux.unshare_step(linux.CLONE_NEWUSER))
    for kind, value in (
        *([] if "guard" in layers.active else [(resource.RLIMIT_NPROC, PROCESSES)]),  # the guard counts itself
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_FSIZE, DISK_MB * MEGABYTE),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        steps.append((f"limit {kind}", None, resource.setrlimit, (kind, (value, value))))
    if "landlock" in layers.active:  # before the uid changes, which may not be able to reach the interpreter
        readable = None if "private_root" in layers.active else _readable_paths()
        writable = CALL_TMPFS if "private_tmpfs" in layers.active else directory
        steps += linux.landlock_steps(writable, readable, layers.landlock, free_fd)
    if uid is not None:
        steps += [
            ("setgroups", None, os.setgroups, ([],)),
            ("setresgid", None, os.setresgid, (uid, uid, uid)),
            ("setresuid", None, os.setresuid, (uid, uid, uid)),  # from root: all capabilities go with it
        ]
    elif layers.in_user_namespace or os.geteuid() == 0:
        steps.append(("drop capabilities", None, linux.drop_capabilities, ()))
    steps.append(linux.prctl_step("die with the parent", linux.PR_SET_PDEATHSIG, signal.SIGKILL))
    if "seccomp" in layers.active:
        steps.append(seccomp.install_step(layers.filters.call))
    return steps
