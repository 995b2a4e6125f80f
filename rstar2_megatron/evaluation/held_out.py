"""avg@k on held-out problems through the same agent loop, judge and grader as training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training.rollouts import RolloutCoordinator
from rstar2_megatron.trajectory import Problem


@dataclass
class HeldOutResult:
    """Mean reward over problems of the mean over their samples (pass@1 estimated with k samples)."""

    average: float
    num_problems: int
    num_samples: int
    tool_error_ratio: float
    response_length: float
    seconds: float
    by_task: dict[str, float] = field(default_factory=dict)


def evaluate(
    coordinator: RolloutCoordinator, problems: Sequence[Problem], settings: Settings, label: str
) -> HeldOutResult:
    """Roll out the first `evaluation.num_problems` problems with evaluation sampling and average the rewards."""
    limit = settings.evaluation.num_problems
    chosen = list(problems) if limit < 0 else list(problems)[:limit]
    if not chosen:
        raise ValueError("no held-out problems: data.val_data_paths is empty")
    phase = coordinator.run(chosen, RolloutSpec.evaluation(settings), label)
    scores: list[float] = []
    tasks: Counter[str] = Counter()
    task_scores: Counter[str] = Counter()
    calls = errors = tokens = finished = 0
    for group in phase.groups:
        usable = group.usable
        if not usable:
            continue  # spoiled by infrastructure: counted in the phase's stats, not a failure of the model
        score = sum(group.rewards) / len(usable)
        scores.append(score)
        tasks[group.problem.task] += 1
        task_scores[group.problem.task] += score  # type: ignore[assignment]
        for trajectory in usable:
            calls += len(trajectory.tool_calls)
            errors += trajectory.num_tool_errors
            tokens += len(trajectory.response_ids)
            finished += 1
    return HeldOutResult(
        average=sum(scores) / max(1, len(scores)),
        num_problems=len(scores),
        num_samples=settings.evaluation.num_samples,
        tool_error_ratio=errors / max(1, calls),
        response_length=tokens / max(1, finished),
        seconds=phase.seconds,
        by_task={task: task_scores[task] / count for task, count in tasks.items()},
    )
