"""avg@k, pass@j and majority@k with confidence intervals, from graded attempts. Pure.

Intervals are 95 %. They treat the problems as drawn from a larger population and resample them with replacement
(10,000 times, fixed seed); where all problems have the same score, resampling gives no width, and the Wilson interval
is used. `run_deviation` is another spread: that of the accuracies of the k runs over these problems.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from rstar2_megatron.evaluation.samples import Sample
from rstar2_megatron.reward.comparison import number
from rstar2_megatron.reward.math_grader import CORRECT, quick_grade
from rstar2_megatron.reward.spelling import spell
from rstar2_megatron.trajectory import FinishReason

_RESAMPLES = 10_000
_Z = 1.959963984540054  # of 95 %

Equal = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one set of problems. Means of lengths and tools are over attempts."""

    num_problems: int
    num_samples: int
    k: int
    """Attempts asked for; infrastructure may have spoiled some."""
    average: Estimate
    """avg@k: mean over problems of the share of right attempts (pass@1)."""
    pass_at: dict[int, Estimate]
    """j -> unbiased estimate of the probability that one of j attempts is right; j = 1, 2, 4, ... and k, where each
    problem has j attempts.
    """
    majority: Estimate | None
    """majority@k: the most frequent answer is right; ties count by the share of right ones among them. None: right attempts
    name no answer, because a reward of the user's decides.
    """
    reward: float
    """Mean over problems of the mean reward; avg@k where rewards are 0 and 1."""
    run_deviation: float | None
    """Standard deviation of the accuracy of the k runs; None for k = 1."""
    missing: int
    """Attempts that infrastructure spoiled; no other value counts them."""
    tools: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    endings: dict[str, float] = field(default_factory=dict)
    """Share of attempts by finish reason."""

    def metrics(self) -> dict[str, float]:
        """Flat values for logs, named `average`, `pass@4`, `majority@8`, `tool_calls`, `response_length`, ..."""
        flat = {"average": self.average.value, "average_low": self.average.low, "average_high": self.average.high}
        flat |= {f"pass@{j}": estimate.value for j, estimate in self.pass_at.items() if j > 1}
        if self.k > 1 and self.majority is not None:
            flat[f"majority@{self.k}"] = self.majority.value
        flat["reward"] = self.reward
        flat |= {"problems": self.num_problems, "samples": self.num_samples, "missing": self.missing}
        flat |= self.tools | self.lengths
        flat |= {f"finish/{name}": share for name, share in self.endings.items()}
        return {name: float(value) for name, value in flat.items()}


def score(samples: Sequence[Sample], k: int, *, num_problems: int | None = None, equal: Equal | None = None) -> Scores:
    """Scores of attempts, of which the usable ones count; `k` of each problem were requested.

    num_problems: number of requested problems; None: those that have an attempt. equal: whether two answers count as the
    same vote (None compares spelling and exact numbers). Raises ValueError without a usable attempt.
    """
    by_problem: dict[str, list[Sample]] = {}
    for item in samples:
        if item.usable:
            by_problem.setdefault(item.query_id, []).append(item)
    usable = [item for group in by_problem.values() for item in group]
    if not usable:
        raise ValueError("no usable attempt to score: every one was spoiled by infrastructure, or there was none")
    groups = list(by_problem.values())
    counts = [(len(group), sum(item.positive for item in group)) for group in groups]
    pass_at = {}
    for j in (*(1 << i for i in range(k.bit_length()) if 1 << i < k), k):
        # of some problems alone it would be that of problems whose attempts are seldom spoiled, the short ones
        if all(n >= j for n, _ in counts) and (j == 1 or len(groups) == (num_problems or len(groups))):
            pass_at[j] = estimate([pass_at_j(n, right, j) for n, right in counts])
    asked = (num_problems or len(groups)) * k
    return Scores(
        num_problems=len(groups),
        num_samples=len(usable),
        k=k,
        average=estimate([right / n for n, right in counts]),
        pass_at=pass_at,
        majority=estimate([majority(group, equal or same_answer) for group in groups]) if _can_vote(usable) else None,
        reward=statistics.fmean(statistics.fmean(item.reward for item in group) for group in groups),
        run_deviation=_run_deviation(usable),
        missing=max(0, asked - len(usable)),
        tools=_tools(usable),
        lengths=_lengths(usable),
        endings=_endings(usable),
    )


def score_by(samples: Sequence[Sample], part_of: Mapping[str, str], k: int, equal: Equal | None = None) -> dict[str, Scores]:
    """Scores of each part (a benchmark, a task), `part_of` naming the part of each query_id."""
    parts: dict[str, list[Sample]] = {part: [] for part in part_of.values()}
    for item in samples:
        parts[part_of[item.query_id]].append(item)
    sizes = Counter(part_of.values())
    return {
        part: score(members, k, num_problems=sizes[part], equal=equal)
        for part, members in parts.items()
        if any(item.usable for item in members)
    }


# ---------------------------------------------------------------------------------------------- estimates


def pass_at_j(n: int, right: int, j: int) -> float:
    """Unbiased estimate, from n attempts of which `right` are right, that one of j is: 1 - C(n-right, j) / C(n, j)."""
    if not 0 <= right <= n or not 1 <= j <= n:
        raise ValueError(f"pass@{j} of {n} attempts with {right} right")
    return 1.0 - math.comb(n - right, j) / math.comb(n, j)


class Vote(Protocol):
    """One attempt's answer; None does not vote."""

    @property
    def answer(self) -> str | None: ...

    @property
    def positive(self) -> bool: ...


V = TypeVar("V", bound=Vote)


def answer_classes(votes: Iterable[V], equal: Equal) -> list[list[V]]:
    """Votes whose answers are equal, class by class in the order of their first votes."""
    classes: defaultdict[str, list[V]] = defaultdict(list)  # by their first answers
    by_key: dict[object, list[V]] = {}
    for item in votes:
        if (answer := item.answer) is None:
            continue
        key = answer_key(answer)
        if key not in by_key:
            by_key[key] = classes[next((first for first in classes if equal(first, answer)), answer)]
        by_key[key].append(item)
    return list(classes.values())


def _can_vote(samples: Sequence[Sample]) -> bool:
    """Whether attempts name answers. An attempt that is right without one was graded by something else than its answer."""
    return any(item.answer is not None for item in samples) or not any(item.positive for item in samples)


def majority(group: Sequence[Vote], equal: Equal) -> float:
    """1 when the most frequent answer of a problem is right, 0 when it is wrong, the share of right answers in a tie.

    Attempts without an answer do not vote; without any vote it is 0.
    """
    classes = answer_classes(group, equal)
    if not classes:
        return 0.0
    most = max(len(members) for members in classes)
    winners = [members for members in classes if len(members) == most]
    return statistics.fmean(statistics.fmean(item.positive for item in members) for members in winners)


def answer_key(answer: str) -> object:
    """Equal for answers of the same spelling or the same exact number."""
    text = spell(answer)
    value = number(text)
    return text if value is None else value


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are equal as text or as exact numbers."""
    return quick_grade(a, [b]) == CORRECT


def estimate(scores: Sequence[float]) -> Estimate:
    """Mean of scores in [0, 1], one a problem, and its 95 % interval. Raises ValueError for none."""
    if not scores:
        raise ValueError("no problem to average over")
    values = np.asarray(scores, dtype=np.float64)
    mean = float(values.mean())
    if values.min() == values.max():
        return Estimate(mean, *wilson(mean, len(values)))
    return bootstrap(values)


def bootstrap(values: np.ndarray) -> Estimate:
    """Mean of values, one a problem, and the 95 % interval of means of problems drawn anew (fixed seed)."""
    rng = np.random.default_rng(0)
    means = np.empty(_RESAMPLES)
    for start in range(0, _RESAMPLES, 500):  # bounded memory for data sets of many thousand problems
        picked = rng.integers(0, len(values), (min(500, _RESAMPLES - start), len(values)))
        means[start : start + 500] = values[picked].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share seen in `count` trials."""
    z2 = _Z * _Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _run_deviation(usable: Sequence[Sample]) -> float | None:
    runs: dict[int, list[float]] = {}
    for item in usable:
        runs.setdefault(item.index, []).append(float(item.positive))
    return statistics.stdev(map(statistics.fmean, runs.values())) if len(runs) > 1 else None


# ---------------------------------------------------------------------------------------- how it was done


def _tools(usable: Sequence[Sample]) -> dict[str, float]:
    calls = sum(item.num_tool_calls for item in usable)
    right = [item for item in usable if item.positive]
    return {
        "tool_calls": calls / len(usable),
        "tool_error_ratio": _ratio(sum(item.num_tool_errors for item in usable), calls),
        "tool_error_ratio_positive": _ratio(
            sum(item.num_tool_errors for item in right), sum(item.num_tool_calls for item in right)
        ),
        "no_tool_ratio": sum(not item.num_tool_calls for item in usable) / len(usable),
        "num_turns": statistics.fmean(item.num_turns for item in usable),
    }


def _lengths(usable: Sequence[Sample]) -> dict[str, float]:
    lengths = np.asarray([item.response_tokens for item in usable])
    p50, p90 = np.quantile(lengths, (0.5, 0.9))
    return {
        "response_length": float(lengths.mean()),
        "response_length_p50": float(p50),
        "response_length_p90": float(p90),
        "max_of_response_length": float(lengths.max()),
        "generated_length": statistics.fmean(item.generated_tokens for item in usable),
    }


def _endings(usable: Sequence[Sample]) -> dict[str, float]:
    endings = Counter(item.finish_reason for item in usable)
    reasons = [reason.value for reason in FinishReason if reason is not FinishReason.INFRASTRUCTURE]
    return {reason: endings[reason] / len(usable) for reason in reasons}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
