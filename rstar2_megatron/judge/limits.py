"""Limits of a call, and the service's defaults from flags and environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

MEGABYTE = 1 << 20

# The public server's variables, so that its documented start lines work here.
_ENVIRONMENT = {
    "MAX_EXECUTION_TIME": "time_limit_s",
    "MAX_MEMORY": "memory_mb",
    "MAX_STDOUT_ERROR_LENGTH": "output_chars",
}
LEVELS = ("minimal", "partial", "full")  # of isolation
OPTION_NAMES = ("time_limit_s", "memory_mb", "output_chars")


def default_permits() -> int:
    """Calls that may use CPU at the same time (default of `--max-running`): 1.5 for each core of this process.

    A slot also reports and forks between two calls, which uses other cores. One call a core gave fewer calls per second.
    """
    return math.ceil(1.5 * len(os.sched_getaffinity(0)))


class CallLimits(NamedTuple):
    """Limits of one call. All are enforced from outside the program."""

    time_limit_s: float = 10.0  # wall time; CPU time is bounded by it too
    memory_mb: int = 512  # beyond the interpreter with numpy and sympy loaded
    output_chars: int = 1000  # of stdout and of stderr that are returned
    output_limit_mb: int = 16  # written output that ends the call
    disk_mb: int = 64  # private tmpfs, or the largest file where there is no tmpfs
    processes: int = 64
    open_files: int = 256
    compile_time_s: float = 15.0  # added to the time limit of a C++ call

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CallLimits:
        """Defaults, overridden by the public server's environment variables. ValueError names a bad one."""
        limits = cls()
        for variable, name in _ENVIRONMENT.items():
            if variable in environment:
                try:
                    limits = limits.with_options({name: environment[variable]}, ceiling=None)
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
        return cls(**{name: values[name] for name in cls._fields if name in values})
