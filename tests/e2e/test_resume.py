"""Whole runs that are killed at a chosen moment of a step and resumed: their metrics are those of an uninterrupted run.

The runs train on saved trajectories (`runner.replay_rollouts`), so nothing is left to chance. The model's head and
embedding are tied, which a pipeline shares between its first and last stage.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rstar2_megatron.tiny.build import build_tiny
from rstar2_megatron.tiny.recipe import TinyModelShape
from tests.e2e.runs import ONE_SLOT, RunProcess, arguments, read_jsonl
from tests.tiny.small import AGENTLOOP

LIMIT_S = 600
pytestmark = pytest.mark.timeout(1200)  # two whole runs in a test, on a machine that may be busy
LAYOUTS = {"TP2": (), "PP2": ("actor.model.tensor_model_parallel_size=1", "actor.model.pipeline_model_parallel_size=2")}
PP3 = (  # the tiny model has three layers
    "actor.model.tensor_model_parallel_size=1",
    "actor.model.pipeline_model_parallel_size=3",
    "cluster.node_groups.0.hardware.configs.0.num_slots=3",
)
TRAINED = ("policy_loss", "grad_norm", "lr", "entropy", "clip_fraction", "logprob_diff_max", "skipped_update")


def killed_and_resumed(command: list[str], directory: Path, moment: str, step: int, resumed: list[str] | None = None) -> str:
    """SIGKILL at `moment` of `step`, then the same command again or `resumed`, until its end; returns what that printed."""
    checkpoints = directory / "checkpoints"
    run = RunProcess(command, directory.with_suffix(".killed.log")).start()
    published = checkpoints / f"global_step_{step - 1}"
    run.wait_for(published.is_dir, LIMIT_S, f"the checkpoint before step {step}")  # done right before training
    unfinished = checkpoints / f"global_step_{step}.unfinished"
    if moment == "training":
        time.sleep(0.2)
    elif moment == "checkpoint":
        run.wait_for(unfinished.is_dir, LIMIT_S, f"the checkpoint of step {step} being written")
    else:  # the weight sync begins when the checkpoint's last file has been begun
        run.wait_for((unfinished / "data" / "data.pt").is_file, LIMIT_S, f"the weight sync of step {step}")
    run.send(signal.SIGKILL)
    run.assert_nothing_left(30, killed=True)
    assert len(read_jsonl(directory / "metrics.jsonl")) == step - 1
    assert not (checkpoints / f"global_step_{step}").exists()

    again = RunProcess(resumed or command, directory.with_suffix(".resumed.log"), temporary=run.temporary).start()
    assert again.wait(LIMIT_S) == 0, again.text()[-6000:]
    again.assert_nothing_left()
    assert f"resuming from {published}" in again.text()
    return again.text()


@pytest.mark.ci
def test_a_pipeline_killed_in_training_and_resumed_data_parallel_trains_as_the_tensor_parallel_run(
    cache: Path, first_run: Path, tmp_path: Path
) -> None:
    """The trajectories of the first run (TP 2) again: their first step under PP 3, their second under DP 2."""
    replay = (f"runner.replay_rollouts={first_run}/rollouts", "evaluation.before_and_after=False")
    pipeline = arguments(cache, tmp_path, "pp3", *PP3, *replay)
    data_parallel = arguments(cache, tmp_path, "pp3", "actor.model.tensor_model_parallel_size=1", *replay)
    killed_and_resumed(pipeline, tmp_path / "pp3", "training", 2, data_parallel)
    ours, theirs = (read_jsonl(directory / "metrics.jsonl") for directory in (tmp_path / "pp3", first_run))
    assert [row["step"] for row in ours] == [1, 2]
    for mine, right in zip(ours, theirs, strict=True):
        assert mine["rollout/pass_rate"] == right["rollout/pass_rate"]
        assert mine["train/actor/skipped_update"] == right["train/actor/skipped_update"]
        if not mine["train/actor/skipped_update"]:
            for name, tolerance in (("policy_loss", 1e-5), ("grad_norm", 1e-4)):
                key = f"train/actor/{name}"
                assert mine[key] == pytest.approx(right[key], rel=tolerance, abs=1e-6), key


@pytest.mark.ci
def test_a_run_that_is_asked_to_end_saves_the_step_it_is_in(cache: Path, tmp_path: Path) -> None:
    """SIGUSR2, which scripts/slurm.sbatch sends before the time limit; no checkpoint is due before the last step."""
    words = (*ONE_SLOT, "runner.save_interval=100", "evaluation.before_and_after=False")
    rows = tmp_path / "asked" / "metrics.jsonl"
    run = RunProcess(arguments(cache, tmp_path, "asked", "runner.max_steps=100", *words), tmp_path / "asked.log").start()
    run.wait_for(lambda: len(read_jsonl(rows)) > 0, LIMIT_S, "the first step")
    run.send(signal.SIGUSR2)
    assert run.wait(LIMIT_S) == 140, run.text()[-6000:]
    run.assert_nothing_left()
    (saved,) = (tmp_path / "asked" / "checkpoints").iterdir()
    assert saved.name == f"global_step_{len(read_jsonl(rows))}"
    more = f"runner.max_steps={len(read_jsonl(rows)) + 1}"
    again = RunProcess(arguments(cache, tmp_path, "asked", more, *words), tmp_path / "again.log").start()
    assert again.wait(LIMIT_S) == 0, again.text()[-6000:]
    assert f"resuming from {saved}" in again.text()


@pytest.mark.release
def test_metrics_after_a_kill_in_the_sync_are_those_of_the_run_before(cache: Path, first_run: Path, tmp_path: Path) -> None:
    """The first run's trajectories again, in its layout: nothing but the kill differs."""
    command = arguments(
        cache, tmp_path, "killed", f"runner.replay_rollouts={first_run}/rollouts", "evaluation.before_and_after=False"
    )
    killed_and_resumed(command, tmp_path / "killed", "sync", 2)
    assert_same_metrics(read_jsonl(tmp_path / "killed" / "metrics.jsonl"), read_jsonl(first_run / "metrics.jsonl"))


def assert_same_metrics(ours: list[dict], theirs: list[dict]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    names = [f"train/actor/{name}" for name in TRAINED] + ["rollout/pass_rate", "rollout/groups_kept"]
    for mine, right in zip(ours, theirs, strict=True):
        assert {name: mine.get(name) for name in names} == {name: right.get(name) for name in names}


@dataclass
class Uninterrupted:
    """Runs of each layout on the same saved trajectories, which the first of them rolled out."""

    model: str
    rollouts: str
    rows: dict[str, list[dict]]


@pytest.fixture(scope="module")
def uninterrupted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    root = tmp_path_factory.mktemp("uninterrupted")
    shape = replace(TinyModelShape(), num_layers=4)
    model = f"rollout.model.model_path={build_tiny(cache, 0, agentloop=AGENTLOOP, shape=shape).model}"
    rows, source = {}, ""
    for layout, overrides in LAYOUTS.items():
        how = f"runner.replay_rollouts={source}" if source else "runner.save_rollout_tokens=True"
        command = arguments(
            cache, root, layout, model, *overrides, how, "runner.max_steps=4", "evaluation.before_and_after=False"
        )
        run = RunProcess(command, root / f"{layout}.log").start()
        assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
        run.assert_nothing_left()
        source = source or str(root / layout / "rollouts")
        rows[layout] = read_jsonl(root / layout / "metrics.jsonl")
    return Uninterrupted(model, source, rows)


@pytest.mark.release
@pytest.mark.parametrize("layout, moment", [("PP2", "training"), ("PP2", "checkpoint"), ("PP2", "sync"), ("TP2", "sync")])
def test_metrics_after_a_kill_are_those_of_the_uninterrupted_run(
    cache: Path, uninterrupted: Uninterrupted, tmp_path: Path, layout: str, moment: str
) -> None:
    command = arguments(
        cache,
        tmp_path,
        "killed",
        *LAYOUTS[layout],
        uninterrupted.model,
        f"runner.replay_rollouts={uninterrupted.rollouts}",
        "runner.max_steps=4",
        "evaluation.before_and_after=False",
    )
    killed_and_resumed(command, tmp_path / "killed", moment, 3)
    ours = read_jsonl(tmp_path / "killed" / "metrics.jsonl")
    assert len(ours) == 4
    assert_same_metrics(ours, uninterrupted.rows[layout])
