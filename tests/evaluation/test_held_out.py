"""From a finished phase to `eval/...` values and the file of trajectories; tests/e2e runs the phase itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rstar2_megatron.cluster.phases.coordinator import PhaseResult
from rstar2_megatron.evaluation.held_out import evaluate
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.training.known_metrics import unknown_metric
from rstar2_megatron.trajectory import FinishReason, Group, Problem
from tests.algorithm.trajectories import trajectory


class FinishedPhase:
    """Hands back given rewards; None is a trajectory that the infrastructure spoiled."""

    def __init__(self, rewards: dict[str, list[float | None]]) -> None:
        self.rewards = rewards
        self.spec: RolloutSpec | None = None

    def run(self, problems: Sequence[Problem], spec: RolloutSpec, label: str) -> PhaseResult:
        self.spec = spec
        groups = []
        for problem in problems:
            attempts = []
            for index, reward in enumerate(self.rewards[problem.query_id]):
                finish = FinishReason.INFRASTRUCTURE if reward is None else FinishReason.ANSWERED
                attempt = trajectory(reward, [], index=index, finish=finish)
                attempt.query_id = problem.query_id
                attempts.append(attempt)
            groups.append(Group(problem, attempts))
        return PhaseResult(groups, 2.0)


PROBLEMS = [Problem(name, [], ["1"], task) for name, task in (("a", "easy"), ("b", "easy"), ("c", "hard"), ("d", "x"))]


def settings(*words: str):
    return load_settings("rstar2-tiny-cpu", ["evaluation.num_samples=2", "evaluation.num_problems=3", *words])


def test_scores_of_all_and_of_each_task(tmp_path: Path) -> None:
    phase = FinishedPhase({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, None]})
    result = evaluate(phase, PROBLEMS, settings("evaluation.temperature=0.3"), "held-out at step 4", tmp_path / "e")  # type: ignore[arg-type]
    assert phase.spec is not None and (phase.spec.samples, phase.spec.sampling.temperature) == (2, 0.3)
    metrics = result.metrics()
    assert result.average == metrics["eval/average"] == pytest.approx(0.5)
    assert metrics["eval/missing"] == 1 and metrics["eval/problems"] == 3
    assert metrics["eval/easy/average"] == 0.75 and metrics["eval/hard/average"] == 0.0
    assert metrics["eval/easy/pass@2"] == 1.0 and "eval/x/average" not in metrics
    assert [name for name in metrics if unknown_metric(name)] == []  # a condition may be on each
    assert "avg@2 0.500" in str(result) and "1 attempts spoiled" in str(result)
    rows = [json.loads(line) for line in (tmp_path / "e" / "held-out_at_step_4.jsonl").read_text().splitlines()]
    assert [(row["query_id"], row["reward"]) for row in rows][-2:] == [("c", 0.0), ("c", None)]


def test_nothing_usable_is_no_end_of_the_run() -> None:
    result = evaluate(FinishedPhase({n: [None, None] for n in "abc"}), PROBLEMS, settings(), "x")  # type: ignore[arg-type]
    assert result.average is None and result.metrics() == {"eval/seconds": 2.0}
    assert "no usable attempt" in str(result)


def test_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.val_data_paths is empty"):
        evaluate(FinishedPhase({}), [], settings(), "x")  # type: ignore[arg-type]
