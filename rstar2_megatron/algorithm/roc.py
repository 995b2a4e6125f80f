"""Resample-on-correct: of the 2G rollouts of a problem, choose the G that are trained on.

Paper (arXiv 2508.20722, section 2.2.3). Negatives (reward 0) are halved uniformly, so that the policy sees
every kind of failure. Positives are halved with a preference for clean ones: a trajectory's penalty is
`p_err + p_format`, and positives are drawn with probability inverse to it.

Two modes, by `algorithm.down_sampling.down_sampling_config.mode` (docs/parity.md compares them point by
point):

`paper`: positives are drawn one by one without replacement, each draw with probability proportional to
`1 / (penalty + penalty_epsilon)` among those left; negatives uniformly. Tool errors are typed outcomes, turns
are the trajectory's own. Quotas: `floor(negatives * G / n)` negatives, the rest positives. The minimum counts
of the YAML hold here too (0 gives the paper's plain halves): without them a group with one wrong rollout in
32 would keep no negative, and all its advantages would be zero.

`released`: what the public code does, so that the same trajectories give the same kept indices: positives
sorted by penalty, the first ones kept; negatives in rollout order, the first ones kept; errors found by
substring in the tool response; turns counted in the response text only; quotas rounded half to even.

Where the public code asserts or crashes, and the rule here:
- no group survives: every result is `rejected`, the caller skips the update and counts it;
- quotas that do not add up to G (odd G): RLinf's rule, the G lowest penalties of positives and negatives
  together, in both orders stable (verl's recipe asserts);
- fewer than G usable rollouts (infrastructure dropped some): `released` drops the group as the public code
  does; `paper` keeps all of them. Exactly G: all are kept in both modes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rstar2_megatron.response_text import response_text
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import ToolOutcome, Trajectory

NO_TOOL_PENALTY = 0.5  # p_err of a trajectory without a tool call (paper)
NO_ANSWER_PENALTY = 1.0  # p_format of a trajectory without an answer (paper)


class Rejection(StrEnum):
    """Why a group is not trained on."""

    NONE = ""
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    TOO_FEW = "too_few"  # fewer usable rollouts than G (released), or none at all


@dataclass(frozen=True, slots=True)
class Penalty:
    """Why a trajectory is preferred or not. `error` and `answer_format` are in [0, 1]."""

    error: float
    answer_format: float
    num_answers: int
    """Answers counted: `<answer>` tags of the assistant's turns (paper), closed pairs (released)."""

    def total(self, config: DownSamplingConfig) -> float:
        """p_total under the YAML's switches."""
        return self.error * config.roc_error_ratio + self.answer_format * config.roc_answer_format


@dataclass(slots=True)
class ResampleResult:
    """Outcome for one group. `indices` are positions in the list that was given, ascending."""

    kept: list[Trajectory]
    indices: list[int]
    rejected: bool = False
    reason: Rejection = Rejection.NONE
    penalties: list[Penalty] = field(default_factory=list)
    """One per given trajectory, kept or not."""
    num_positive: int = 0
    num_negative: int = 0
    num_kept_positive: int = 0

    @classmethod
    def keep_all(cls, trajectories: Sequence[Trajectory]) -> ResampleResult:
        """Without down-sampling: every trajectory is trained on."""
        positive = [_reward(t) > 0 for t in trajectories]
        return cls(
            kept=list(trajectories),
            indices=list(range(len(trajectories))),
            rejected=not trajectories,
            reason=Rejection.NONE if trajectories else Rejection.TOO_FEW,
            num_positive=sum(positive),
            num_negative=len(positive) - sum(positive),
            num_kept_positive=sum(positive),
        )


def resample_on_correct(
    trajectories: Sequence[Trajectory], config: DownSamplingConfig, rng: random.Random
) -> ResampleResult:
    """Choose `config.down_sample_to_n` of the graded, usable trajectories of one problem, in rollout order.

    Raises ValueError for a trajectory that has not been graded or that infrastructure spoiled, and for
    minimum counts that exceed the target. `rng` is only used in `paper` mode.
    """
    target = config.down_sample_to_n
    if config.min_zero_reward_trace_num + config.min_non_zero_reward_trace_num > target:
        raise ValueError(
            f"min_zero_reward_trace_num={config.min_zero_reward_trace_num} + min_non_zero_reward_trace_num="
            f"{config.min_non_zero_reward_trace_num} exceed down_sample_to_n={target}; lower them"
        )
    spoiled = next((t for t in trajectories if not t.usable), None)
    if spoiled is not None:
        raise ValueError(
            f"trajectory {spoiled.query_id}#{spoiled.rollout_index}: spoiled by infrastructure, drop it first"
        )
    rewards = [_reward(t) for t in trajectories]
    measure = paper_penalty if config.mode == "paper" else released_penalty
    penalties = [measure(t) for t in trajectories]
    positives = [i for i, reward in enumerate(rewards) if reward > 0]
    negatives = [i for i, reward in enumerate(rewards) if reward <= 0]

    reason = Rejection.NONE
    chosen: list[int] = []
    if not trajectories:
        reason = Rejection.TOO_FEW
    elif config.reject_equal_reward and _all_close(rewards):
        reason = Rejection.ALL_CORRECT if positives else Rejection.ALL_WRONG
    elif len(trajectories) < target and config.mode == "released":
        reason = Rejection.TOO_FEW
    elif len(trajectories) <= target:
        chosen = list(range(len(trajectories)))
    else:
        totals = [penalty.total(config) for penalty in penalties]
        if config.mode == "paper":
            chosen = _choose_as_in_paper(positives, negatives, totals, config, rng)
        else:
            chosen = _choose_as_released(positives, negatives, totals, config)

    chosen.sort()
    kept_positive = sum(rewards[i] > 0 for i in chosen)
    return ResampleResult(
        kept=[trajectories[i] for i in chosen],
        indices=chosen,
        rejected=reason is not Rejection.NONE,
        reason=reason,
        penalties=penalties,
        num_positive=len(positives),
        num_negative=len(negatives),
        num_kept_positive=kept_positive,
    )


# ----------------------------------------------------------------------------------------- penalties


def paper_penalty(trajectory: Trajectory) -> Penalty:
    """Typed outcomes; calls that infrastructure spoiled count neither as calls nor as errors."""
    calls = [c for c in trajectory.tool_calls if c.outcome is not ToolOutcome.INFRASTRUCTURE]
    errors = sum(c.outcome.is_model_error for c in calls)
    error = errors / len(calls) if calls else NO_TOOL_PENALTY
    answers = sum(text.count("<answer>") for text in trajectory.assistant_texts)
    if answers == 0:
        answer_format = NO_ANSWER_PENALTY
    else:
        answer_format = min(1.0, (answers - 1) / max(trajectory.num_turns, 1))
    return Penalty(error, answer_format, answers)


def released_penalty(trajectory: Trajectory) -> Penalty:
    """The public code's measures on the response text, with their known deviations from the paper.

    A substring "error" makes a tool response an error (a timeout has none; printed text may); the first
    turn's header stands in the prompt, so an answer without a tool call counts no turn and gets p_format 1;
    answer tags that do not pair up get 1.
    """
    text = response_text(trajectory)
    responses = list(_spans(text, "<tool_response>", "</tool_response>"))
    errors = sum("error" in response.lower() for response in responses)
    error = errors / len(responses) if responses else NO_TOOL_PENALTY

    opened, closed = text.count("<answer>"), text.count("</answer>")
    pairs = sum(1 for _ in _spans(text, "<answer>", "</answer>"))
    if not opened or not closed:
        return Penalty(error, 1.0, 0)
    turns = sum(1 for _ in _spans(text, "<|im_start|>assistant", "<|im_end|>"))
    if opened != pairs or closed != pairs or turns == 0:
        return Penalty(error, 1.0, pairs)
    return Penalty(error, min((pairs - 1) / turns, 1.0), pairs)


def _spans(text: str, opening: str, closing: str) -> Iterator[str]:
    """What stands between each opening and the next closing, as a lazy regular expression finds it, but ten times
    faster: a step holds hundreds of megabytes of text.
    """
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield text[start:stop]
        end = stop + len(closing)


# -------------------------------------------------------------------------------------------- choice


def _choose_as_in_paper(
    positives: list[int],
    negatives: list[int],
    totals: list[float],
    config: DownSamplingConfig,
    rng: random.Random,
) -> list[int]:
    num_positive, num_negative = paper_quotas(len(positives), len(negatives), config)
    weights = [1.0 / (totals[i] + config.penalty_epsilon) for i in positives]
    drawn = draw_without_replacement(weights, num_positive, rng)
    return [positives[i] for i in drawn] + rng.sample(negatives, num_negative)


def paper_quotas(num_positive: int, num_negative: int, config: DownSamplingConfig) -> tuple[int, int]:
    """(positives, negatives) kept of a group of more than G: G in all, the minimum counts where there are so many."""
    target = config.down_sample_to_n
    negative = math.floor(num_negative * target / (num_positive + num_negative))
    negative = max(negative, min(config.min_zero_reward_trace_num, num_negative))
    positive = target - negative
    positive = max(positive, min(config.min_non_zero_reward_trace_num, num_positive))
    # Both minimum counts fit into the target, so the side that gives way still has its own.
    positive = min(positive, num_positive)
    return positive, min(target - positive, num_negative)


def draw_without_replacement(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Indices of `count` draws, each proportional to weight among those left, in the order drawn.

    Exponential races (Efraimidis and Spirakis): item i arrives at Exp(1) / weight_i, the earliest win.
    Raises ValueError for a weight that is not positive and finite, or a count beyond the items.
    """
    if not 0 <= count <= len(weights):
        raise ValueError(f"cannot draw {count} of {len(weights)}")
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"weights must be positive and finite, got {weight}")
    arrival = [rng.expovariate(1.0) / weight for weight in weights]
    return sorted(range(len(weights)), key=arrival.__getitem__)[:count]


def released_quotas(num_positive: int, num_negative: int, config: DownSamplingConfig) -> tuple[int, int]:
    """(positives, negatives) that the public code asks for; with odd targets they may not add up."""
    target = config.down_sample_to_n
    total = num_positive + num_negative
    negative = round(num_negative * target / total)  # half to even, as theirs
    positive = round(num_positive * target / total)
    least_negative = min(config.min_zero_reward_trace_num, num_negative)
    least_positive = min(config.min_non_zero_reward_trace_num, num_positive)
    if negative <= least_negative:
        negative = least_negative
        positive = target - negative
    if positive <= least_positive:
        positive = least_positive
        negative = target - positive
    return positive, negative


def _choose_as_released(
    positives: list[int], negatives: list[int], totals: list[float], config: DownSamplingConfig
) -> list[int]:
    num_positive, num_negative = released_quotas(len(positives), len(negatives), config)
    by_penalty = sorted(positives, key=totals.__getitem__)
    chosen = by_penalty[:num_positive] + negatives[:num_negative]
    if len(chosen) != config.down_sample_to_n:
        chosen = sorted(by_penalty + negatives, key=totals.__getitem__)[: config.down_sample_to_n]
    return chosen


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.query_id}#{trajectory.rollout_index} has not been graded")
    return trajectory.reward


def _all_close(rewards: Sequence[float]) -> bool:
    """Equal up to the tolerance of torch.allclose, which the public code uses."""
    return all(abs(rewards[0] - r) <= 1e-8 + 1e-5 * abs(r) for r in rewards)
