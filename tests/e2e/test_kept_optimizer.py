"""A stage with `optimizer: keep` continues exactly where the stage before stopped: the same steps as one longer run.

Everything is real but the rollouts, which are written here, so that both see the same ones.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rstar2_megatron.records.trajectory_files import rollouts_path, write_groups
from rstar2_megatron.trajectory import FinishReason, Group, Problem, Trajectory, VersionSpan
from tests.e2e.runs import RunProcess, read_jsonl
from tests.rollout.memorised import SETTINGS

LIMIT_S = 600
ELSEWHERE = 9  # weight version of the rollouts: another run's, so that their log-probs are not compared with ours
SHARED: dict[str, Any] = {
    "cold_start.enabled": False,
    "cold_start.builder": None,
    "cluster.component_placement": {"actor,rollout,reward": "0"},
    "rollout.max_total_tokens": 8192,
    "data.val_data_paths": [],
    "data.rollout_batch_size": 2,
    "agentloop.system_prompt": SETTINGS.system_prompt,
    "algorithm.group_size": 4,
    "algorithm.down_sampling.do_down_sampling": False,
    "actor.model.tensor_model_parallel_size": 1,
    "actor.optim.lr": 2e-4,
    "actor.lr_sched.lr_decay_style": "constant",
    "actor.lr_sched.lr_warmup_iters": 2,
    "evaluation.before_and_after": False,
    "tools.codejudge.num_workers": 1,
}


def group(name: str, seed: int) -> Group:
    """Four answers of random tokens; the first two are right."""
    rng = random.Random(seed)
    trajectories = []
    for number in range(4):
        n = rng.randint(10, 30)
        trajectories.append(
            Trajectory(
                query_id=name,
                rollout_index=number,
                prompt_ids=[rng.randrange(400) for _ in range(8)],
                response_ids=[rng.randrange(400) for _ in range(n)],
                loss_mask=[1] * n,
                rollout_logprobs=[-6.0] * n,
                version_spans=[VersionSpan(0, n, ELSEWHERE)],
                assistant_texts=["42"],
                finish_reason=FinishReason.ANSWERED,
                reward=float(number < 2),
            )
        )
    return Group(Problem(name, [{"role": "user", "content": f"{name}?"}], ["42"]), trajectories)


def rl(name: str, rollouts: Path, steps: int, **more: Any) -> dict[str, Any]:
    """A stage of `steps` steps on the rollouts of a directory."""
    return {"name": name, "overrides": {"runner.max_steps": steps, "runner.replay_rollouts": str(rollouts)}, **more}


@pytest.mark.timeout(1200)
@pytest.mark.release
def test_two_stages_are_one_longer_run(memorised_model: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{i}?", "solutions": ["42"], "query_id": str(i)} for i in range(8)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [[group(f"{step}-{i}", 10 * step + i) for i in range(2)] for step in range(3)]
    whole, early, late = (tmp_path / "rollouts" / name for name in ("whole", "early", "late"))
    for directory, those in ((whole, steps), (early, steps[:2]), (late, steps[2:])):
        for number, groups in enumerate(those, start=1):
            write_groups(rollouts_path(directory, number), groups)
    recipes = {"once": [rl("whole", whole, 3)], "twice": [rl("early", early, 2), rl("late", late, 1, optimizer="keep")]}
    runs = {}
    for name, stages in recipes.items():  # side by side: each needs one core
        overrides = {**SHARED, "rollout.model.model_path": str(memorised_model), "data.train_data_paths": [str(problems)]}
        recipe = {"config": "rstar2-tiny-cpu", "overrides": overrides, "stages": stages}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        words = [f"recipe={path}", f"runner.output_dir={tmp_path}"]
        runs[name] = RunProcess(words, tmp_path / f"{name}.log").start()
    for run in runs.values():
        assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    for run in runs.values():
        run.assert_nothing_left()
    assert f"starting from {tmp_path}/twice/early/checkpoints/global_step_2" in runs["twice"].text()

    once = read_jsonl(tmp_path / "once" / "metrics.jsonl")
    twice = read_jsonl(tmp_path / "twice" / "metrics.jsonl")
    assert [row["train/actor/optimizer_steps"] for row in twice] == [1, 2, 3]
    assert [row["train/actor/lr"] for row in twice] == pytest.approx([1e-4, 2e-4, 2e-4])  # one warm-up
    for ours, theirs in zip(twice, once, strict=True):
        for key in ("policy_loss", "grad_norm", "lr"):
            assert ours[f"train/actor/{key}"] == theirs[f"train/actor/{key}"], key
        assert ours["train/actor/grad_norm"] > 0
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("twice/late", "once/whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
