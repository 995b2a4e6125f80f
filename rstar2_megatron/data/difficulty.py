"""Pass counts of problems, and the problems that are dropped for theirs. Pure.

Before its third stage the paper draws 8 rollouts of each problem and drops problems solved 8 times (arXiv 2508.20722,
section 3.2). A problem that is never solved gives no gradient either, but the model may learn to solve it
later, so it is dropped only on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.settings.schema import DifficultyFilterSettings
from rstar2_megatron.trajectory import Problem


@dataclass(frozen=True, slots=True)
class PassCount:
    """Usable attempts at one problem, and how many of them were right."""

    query_id: str
    solved: int
    samples: int


def pass_counts(problems: Sequence[Problem], verdicts: Iterable[tuple[str, bool]]) -> list[PassCount]:
    """Counts in the order of the problems, of (query_id, whether it is right) of every usable attempt."""
    solved: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for query_id, right in verdicts:
        samples[query_id] += 1
        solved[query_id] += right
    return [PassCount(p.query_id, solved[p.query_id], samples[p.query_id]) for p in problems]


def dropped_problems(counts: Iterable[PassCount], options: DifficultyFilterSettings, wanted: int) -> dict[str, str]:
    """The reason by query_id of each problem that `options` drop.

    A problem with fewer than `wanted` usable attempts stays, because its pass rate is not known.
    """
    reasons: dict[str, str] = {}
    for count in counts:
        if count.samples < wanted:
            continue
        if options.drop_always_solved and count.solved == count.samples:
            reasons[count.query_id] = "always solved"
        elif options.drop_never_solved and not count.solved:
            reasons[count.query_id] = "never solved"
    return reasons


def difficulty_report(counts: Sequence[PassCount], dropped: Mapping[str, str], wanted: int) -> dict[str, Any]:
    """Rows in and out, why problems were dropped, and how many problems were solved how often."""
    histogram = Counter(count.solved for count in counts if count.samples == wanted)
    samples = sum(count.samples for count in counts)
    return {
        "rows_in": len(counts),
        "rows_out": len(counts) - len(dropped),
        "dropped": dict(Counter(dropped.values())),
        "samples": wanted,
        "pass_rate": sum(count.solved for count in counts) / samples if samples else None,
        "problems_by_times_solved": {str(n): histogram[n] for n in range(wanted + 1)},
        "problems_with_spoiled_attempts": sum(count.samples < wanted for count in counts),
    }


def render_report(report: Mapping[str, Any]) -> str:
    lines = [f"{report['rows_in']:>8,} problems x {report['samples']} attempts"]
    if report["pass_rate"] is not None:
        lines[0] += f", pass rate {report['pass_rate']:.3f}"
    lines += [f"{count:>8,} solved {times} times" for times, count in report["problems_by_times_solved"].items()]
    if report["problems_with_spoiled_attempts"]:
        lines.append(f"{report['problems_with_spoiled_attempts']:>8,} kept because attempts were spoiled")
    lines += [f"{count:>8,} dropped: {why}" for why, count in report["dropped"].items()]
    lines.append(f"{report['rows_out']:>8,} left")
    return "\n".join(lines)
