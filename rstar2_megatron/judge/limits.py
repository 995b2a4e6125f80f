"""A submission as the public Code Judge names it, its options (limits, session, files), and the service's defaults.

The sandbox imports this file: standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

MEGABYTE = 1 << 20
MOST = 4096
"""Execution slots, and live interpreters, of one node."""
_SESSION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NO_PATH = re.compile("[\0\ud800-\udfff]")
_MOST_FILES = 64
_FILES_BYTES = MEGABYTE  # of all files together, because they pass through Redis
_KINDS = ("python", "cpp", "math")

# The public server's variables, so that its documented start lines work here.
_ENVIRONMENT = {"MAX_EXECUTION_TIME": "time_limit_s", "MAX_MEMORY": "memory_mb", "MAX_STDOUT_ERROR_LENGTH": "output_chars"}
LEVELS = ("minimal", "partial", "full")  # of isolation
# A call that waits for a core ends after so many time limits at the latest: see sandbox/process_tree.py.
WALL_FACTOR = 8
OPTION_NAMES = tuple(_ENVIRONMENT.values())

# Limits of every call:
OUTPUT_LIMIT_MB = 16  # written output that ends it
DISK_MB = 64  # private tmpfs, or the largest file where there is no tmpfs
PROCESSES = 128
OPEN_FILES = 256
_COMPILE_TIME_S = 15.0  # added to the time limit of a C++ call


def cores() -> int:
    """Cores that this process may use, which a container may have less of than its machine: by affinity, or by a quota."""
    return max(min([len(os.sched_getaffinity(0)), *map(round, _quotas())]), 1)


def _quotas() -> Iterator[float]:
    """Cores that each control group around this process may use, where it has a quota (version 2, or the root of version 1)."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int(Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:
            yield quota / period
    with contextlib.suppress(OSError):
        own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
        group = Path("/sys/fs/cgroup") / own.lstrip("/")
        for place in (place for place in (group, *group.parents) if place.is_relative_to("/sys/fs/cgroup")):
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                quota, period = map(int, (place / "cpu.max").read_text().split())
                yield quota / period


def default_permits() -> int:
    """Calls that may use CPU at the same time (default of `--max-running`): 1.5 for each core of this process.

    A slot also reports and forks between two calls, which uses other cores. One call a core gave fewer calls per second.
    """
    return math.ceil(1.5 * cores())


def default_processes(slots: int) -> int:
    """Worker processes of a node with so many slots (default of `--processes`): one for 8 cores and 8 slots.

    A worker's own thread takes 0.2 to 0.5 ms a call; 8 cores run at most 3,500 short calls a second.
    """
    return max(1, min(cores(), slots) // 8)


def default_sessions() -> int:
    """Live interpreters of a node (default of `--sessions`): 32 a core, as far as its open files go.

    Under control groups of version 1 each holds five in its worker's sandbox, open or not.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(32 * cores(), MOST, MOST if files == resource.RLIM_INFINITY else files // 8)


class CallLimits(NamedTuple):
    """Limits of one call. All are enforced from outside the program."""

    time_limit_s: float = 10.0  # wall time; longer while it waits for a core
    memory_mb: int = 512  # beyond the interpreter with numpy and sympy loaded
    output_chars: int = 1000  # of stdout and of stderr that are returned

    def longest_s(self, kind: str) -> float:
        """Seconds after which a call of this type ("cpp" is compiled first) has ended, however busy the machine is."""
        return WALL_FACTOR * self.usual_s(kind)

    def usual_s(self, kind: str) -> float:
        """Seconds after which it has ended on a machine with a free core."""
        return self.time_limit_s + (_COMPILE_TIME_S if kind == "cpp" else 0.0)

    @classmethod
    def from_environment(cls) -> CallLimits:
        """Defaults, overridden by the public server's environment variables. ValueError names a bad one."""
        limits = cls()
        for variable, name in _ENVIRONMENT.items():
            if variable in os.environ:
                try:
                    limits = limits.with_options({name: os.environ[variable]}, ceiling=None)
                except ValueError as error:
                    raise ValueError(f"environment variable {variable}: {error}") from None
        return limits

    def with_options(self, options: Mapping[str, Any], *, ceiling: CallLimits | None) -> CallLimits:
        """These limits changed by a submission's options, at most `ceiling`. ValueError names a bad option."""
        changed: dict[str, Any] = {}
        for name in OPTION_NAMES:
            if name not in options:
                continue
            kind = float if name == "time_limit_s" else int
            try:
                value = kind(options[name])
            except (TypeError, ValueError):
                raise ValueError(f"{name}={options[name]!r} is not a number") from None
            if not value > 0:
                raise ValueError(f"{name}={options[name]!r} must be above 0")
            changed[name] = value if ceiling is None else min(value, getattr(ceiling, name))
        return self._replace(**changed) if changed else self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CallLimits:
        """Those of a server of another version may have further fields."""
        return cls(**{name: values[name] for name in cls._fields if name in values})


class FieldError(ValueError):
    """A request whose field `place` is missing or has a wrong type."""

    def __init__(self, place: tuple[str | int, ...], why: str) -> None:
        super().__init__(f"{'.'.join(map(str, place))}: {why}")
        self.place, self.why = place, why


class Submission(NamedTuple):
    """One program to run."""

    type: str
    solution: str
    input: str | None = None
    expected_output: str | None = None
    sub_id: str | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def from_wire(cls, fields: Any, place: tuple[str | int, ...] = ()) -> Submission:
        """Unknown fields are ignored. Raises FieldError."""
        if not isinstance(fields, dict):
            raise FieldError(place, "must be an object")
        given: dict[str, Any] = {name: fields.get(name) for name in cls._fields}
        for name, value in given.items():
            if name == "type" and value not in _KINDS:
                raise FieldError((*place, name), f"must be one of {', '.join(_KINDS)}")
            if name == "options" and not isinstance(value, dict | None):
                raise FieldError((*place, name), "must be an object")
            if name != "options" and not isinstance(value, str if name == "solution" else str | None):
                raise FieldError((*place, name), "must be a string")
        return cls(**given)

    @classmethod
    def batch_from_wire(cls, fields: Any) -> tuple[str | None, list[Submission]]:
        """Id and submissions of a batch. Raises FieldError."""
        if not isinstance(fields, dict) or fields.get("type", "batch") != "batch":
            raise FieldError(("type",), "must be batch")
        sub_id, items = fields.get("sub_id"), fields.get("submissions")
        if not isinstance(sub_id, str | None):
            raise FieldError(("sub_id",), "must be a string")
        if not isinstance(items, list) or not items:
            raise FieldError(("submissions",), "must be a list with at least one submission")
        return sub_id, [cls.from_wire(item, ("submissions", i)) for i, item in enumerate(items)]


def check_text(submission: Submission) -> None:
    """Raises ValueError for a lone surrogate, which JSON can hold and UTF-8 cannot."""
    for name in ("sub_id", "solution", "input", "expected_output"):
        try:
            (getattr(submission, name) or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: {error}") from None


def check_session_name(name: object) -> str:
    """The name, if the queue can use it in a key. Raises ValueError."""
    if not isinstance(name, str) or not _SESSION_NAME.fullmatch(name):
        raise ValueError(f"session={name!r}: 1 to 128 letters, digits, or characters of '_.:-'")
    return name


def check_session(options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields session and session_must_exist of a job; none without a session. Raises ValueError."""
    if options.get("session") is None:
        return {}
    name = check_session_name(options["session"])
    if kind != "python":
        raise ValueError(f"session={name!r}: only submissions of type python have sessions, not {kind}")
    given = str(options.get("session_must_exist", "false")).lower()
    if given not in ("true", "false"):
        raise ValueError(f"session_must_exist={given!r}: true or false")
    return {"session": name, "session_must_exist": given == "true"}


def check_files(options: Mapping[str, Any], kind: str) -> dict[str, dict[str, str]]:
    """The field files of a job, none without files: path -> base64. Given as text, or {"base64": ...}. Raises ValueError.

    The JSON text of such a dictionary is accepted too, because the public server's options are strings.
    """
    files = options.get("files") or {}
    if isinstance(files, str):
        try:
            files = json.loads(files)
        except ValueError as error:
            raise ValueError(f"files: no JSON ({error})") from None
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise ValueError(f'files: give {{"path": "text" or {{"base64": ...}}}}, at most {_MOST_FILES}')
    if files and kind == "math":
        raise ValueError("files: not for submissions of type math")
    checked, places = {}, []
    for path, content in files.items():
        place = PurePosixPath(path)
        size = len(path.encode("utf-8", "surrogatepass"))
        if not place.parts or place.is_absolute() or ".." in place.parts or _NO_PATH.search(path) or size > 255:
            raise ValueError(f"files: {path!r} is not a path below the working directory")
        checked[path] = _content(path, content)
        places.append(place.parts)
    for one, other in itertools.pairwise(sorted(places)):
        if other[: len(one)] == one:
            raise ValueError(f"files: {'/'.join(one)!r} and {'/'.join(other)!r} cannot both be written")
    size = sum(map(len, checked.values())) * 3 // 4
    if size > _FILES_BYTES:
        raise ValueError(f"files: {size} bytes together, at most {_FILES_BYTES}")
    return {"files": checked} if checked else {}


def _content(path: str, content: Any) -> str:
    if isinstance(content, str):
        return base64.b64encode(content.encode("utf-8", "surrogatepass")).decode()
    encoded = content.get("base64") if isinstance(content, dict) else None
    if not isinstance(encoded, str):
        raise ValueError(f'files: {path!r} is neither text nor {{"base64": ...}}')
    try:
        base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(f"files: {path!r}: {error}") from None
    return encoded
