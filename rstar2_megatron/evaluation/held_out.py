"""Scores on held-out problems inside a run: through the run's own engines, agent loop, judge and grader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rstar2_megatron.cluster.phases.coordinator import RolloutCoordinator
from rstar2_megatron.evaluation.samples import Sample
from rstar2_megatron.evaluation.scores import Scores, score, score_by
from rstar2_megatron.records.trajectory_row import trajectory_row
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Problem

_OF_TASKS = ("average", "reward", "pass@", "majority@", "response_length", "tool_calls")


@dataclass
class HeldOutResult:
    """Scores over all problems and by task; `scores` is None when infrastructure spoiled every attempt."""

    scores: Scores | None
    seconds: float
    by_task: dict[str, Scores] = field(default_factory=dict)

    @property
    def average(self) -> float | None:
        """avg@k."""
        return self.scores.average.value if self.scores else None

    def metrics(self) -> dict[str, float]:
        """`eval/...` values: all scores, and the main scores of each task when there are several tasks."""
        metrics = {f"eval/{name}": value for name, value in self.scores.metrics().items()} if self.scores else {}
        if len(self.by_task) > 1:
            for task, scores in self.by_task.items():
                chosen = {name: v for name, v in scores.metrics().items() if name.startswith(_OF_TASKS)}
                metrics |= {f"eval/{task}/{name}": value for name, value in chosen.items()}
        metrics["eval/seconds"] = self.seconds
        return metrics

    def __str__(self) -> str:
        if self.scores is None:
            return f"no usable attempt, the infrastructure spoiled all of them ({self.seconds:.0f} s)"
        s = self.scores
        missing = f", {s.missing} attempts spoiled" if s.missing else ""
        return (
            f"avg@{s.k} {s.average.value:.3f} [{s.average.low:.3f}, {s.average.high:.3f}] on {s.num_problems} problems"
            f"{missing} ({self.seconds:.0f} s)"
        )


def evaluate(
    coordinator: RolloutCoordinator, problems: Sequence[Problem], settings: Settings, label: str, directory: Path | None = None
) -> HeldOutResult:
    """Roll out the first `evaluation.num_problems` problems with evaluation sampling and score them.

    With a directory, every trajectory is written to `{directory}/{label}.jsonl`, with underscores for blanks.

    Raises ValueError without problems, and the errors of `RolloutCoordinator.run`.
    """
    limit = settings.evaluation.num_problems
    chosen = list(problems) if limit < 0 else list(problems)[:limit]
    if not chosen:
        raise ValueError("no held-out problems: data.val_data_paths is empty")
    phase = coordinator.run(chosen, RolloutSpec.evaluation(settings), label)
    rows = [trajectory_row(group.problem, t) for group in phase.groups for t in group.trajectories]
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_jsonl(directory / f"{label.replace(' ', '_')}.jsonl", rows)
    samples = [sample for sample in map(Sample.from_row, rows) if sample.usable]
    k = settings.evaluation.num_samples
    tasks = {problem.query_id: problem.task for problem in chosen}
    return HeldOutResult(
        scores=score(samples, k, num_problems=len(chosen)) if samples else None,
        seconds=phase.seconds,
        by_task=score_by(samples, tasks, k),
    )
