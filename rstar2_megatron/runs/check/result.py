"""A check and its result. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["passed", "failed", "skipped"]


class CheckFailed(Exception):
    """A check found something wrong. `remedy` replaces the check's own; `details` goes into the report alone."""

    def __init__(self, words: str, figures: dict[str, Any] | None = None, *, remedy: str = "", details: str = "") -> None:
        super().__init__(words)
        self.words, self.remedy, self.details, self.figures = words, remedy, details, figures or {}


class CheckSkipped(Exception):
    """The check cannot be made on this machine or with this YAML; the text says why."""


@dataclass
class Finding:
    """A check passed: one line for people, figures for the report."""

    words: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One question to the machine."""

    name: str
    run: Callable[[Any], Finding]
    """Called with the `Context`. Raises CheckFailed, or CheckSkipped."""
    remedy: str
    deadline_s: float = 120.0
    after: tuple[str, ...] = ()
    """Checks that must have passed: otherwise this one is skipped, with the reason."""
    gpu: bool = False
    """Only where the YAML trains on GPUs."""
    ranks: int = 1
    """Accelerators or CPU slots of one node that it needs."""
    nodes: int = 1


@dataclass
class CheckResult:
    """The entry of one check in the report."""

    name: str
    state: State
    words: str
    seconds: float = 0.0
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    details: str = ""

    def line(self, width: int) -> str:
        """One aligned line; a failure has its remedy on the next."""
        state = "FAILED" if self.state == "failed" else self.state
        text = f"{state:8}{self.name:{width}}  {_one_line(self.words)}"
        if self.state != "skipped":
            text += f"  ({self.seconds:.1f} s)"
        return f"{text}\n{'':8}{'':{width}}  -> {self.remedy}" if self.state == "failed" else text


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:380]} ... (see the report)"
