"""Arms times seeds of one file: the shipped file, what is refused, what is run again, the comparison."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rstar2_megatron.report.arms import changes, work_of
from rstar2_megatron.runs.ablation import Ablation, ArmRun, _start, run_ablation
from rstar2_megatron.runs.main import main, parse
from rstar2_megatron.runs.stages import override_words, read_section
from rstar2_megatron.settings.load import CONFIG_DIR, ConfigError, load, print_config, to_plain
from tests.runs.inputs.models import write_directory

TINY = CONFIG_DIR.parent / "examples" / "ablations" / "tiny.yaml"
ARMS = {"plain": {"algorithm.down_sampling.do_down_sampling": False}, "roc": {}, "cispo": {"algorithm.policy_loss": "cispo"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An ablation of a model and problems that are here."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1?"}], "solutions": [str(i + 1)], "query_id": f"q{i}"} for i in range(20)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "config": "rstar2-tiny-cpu",
        "seeds": [0, 1, 2],
        "metrics": ["pass-rate", "held-out"],
        "overrides": {
            "runner": {"experiment_name": "three", "output_dir": str(tmp_path), "max_steps": 4},
            "cold_start.enabled": False,
            "rollout.model.model_path": str(write_directory(tmp_path / "model")),
            "data": {"train_data_paths": [str(tmp_path / "train.jsonl")], "val_data_paths": []},
        },
        "arms": ARMS,
    }
    (tmp_path / "ablation.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path / "ablation.yaml"


def ended(directory: Path, rate: float, words: list[str], steps: int = 4, condition: str = "") -> None:
    """A run of `words` as it ends: `rate` is its pass rate."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(print_config(load("rstar2-tiny-cpu", words).settings))
    (directory / "finished.json").write_text(json.dumps({"step": steps, "condition": condition, "seconds": 1.0}))
    rows = [{"step": step, "rollout/pass_rate": rate, "rollout/generated_tokens": 100.0} for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of(file: Path, arm: str, seed: int) -> list[str]:
    ablation = read_section(file, Ablation)
    keys = {**ablation.overrides, **ablation.arms[arm], "actor.seed": seed, "data.seed": seed, "cold_start.seed": 0}
    return override_words(keys)


def test_the_shipped_arms_differ_in_the_algorithm_alone() -> None:
    ablation = read_section(TINY, Ablation)
    work = {arm: work_of(to_plain(load(ablation.config, words_of(TINY, arm, 0)).settings)) for arm in ablation.arms}
    for arm in list(work)[1:]:
        changed = {key for key in work["grpo"] if work[arm].get(key) != work["grpo"][key]} | work[arm].keys() - work[
            "grpo"
        ].keys()
        assert changed and all(key.startswith("algorithm.") for key in changed), (arm, changed)
    assert {row["algorithm.group_size"] for row in work.values()} == {16}
    assert {row["agentloop.tool_noise"] for row in work.values()} == {0.15}


def test_what_is_there_is_drawn_and_only_the_rest_is_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the third seed one run is missing; another process holds its name, so that it fails. Two pairs are there."""

    def terminate(pid: int, **grace: float) -> None:
        raise AssertionError(f"{pid} has ended, and its number may be another process's")

    monkeypatch.setattr("rstar2_megatron.runs.ablation.terminate_tree", terminate)
    root = tmp_path / "three"
    for seed, (plain, roc) in enumerate([(0.2, 0.3), (0.5, 0.65), (0.8, 0.85)]):
        ended(root / f"plain-{seed}", plain, words_of(file, "plain", seed))
        if seed < 2:
            ended(root / f"roc-{seed}", roc, words_of(file, "roc", seed))
    with (root / ".roc-2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_ablation(str(file), [], ["plain", "roc"], [], dry_run=False) == 1
    errors = capsys.readouterr().err
    assert "error: roc-2 ended with exit code 2" in errors and "is in use by a run" in errors
    assert sorted(path.name for path in root.glob("*.log")) == ["roc-2.log"]
    gap = "+0.125 [+0.090, +0.160]"
    said = f"Pass rate (all rollouts), roc - plain: {gap} at generated 400, {gap} over the last 5 steps"
    text = (root / "comparison.txt").read_text()
    assert f"{said} (2 pairs of equal seeds): nothing may be concluded" in text
    assert (root / "comparison.png").stat().st_size > 10_000
    assert run_ablation(str(file), [], ["plain"], ["0", "1"], dry_run=False) == 0, "all of it is finished"


@pytest.mark.parametrize(("at_once", "finished", "together"), [(1, True, 1), (2, True, 2), (2, False, 1)])
def test_runs_come_side_by_side_once_one_has_a_step(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, finished: bool, together: int
) -> None:
    """Another process holds the names of two runs, so that they end after their start-up, which takes many polls."""
    root = tmp_path / "three"
    file.write_text(file.read_text().replace("metrics:", f"at_once: {at_once}\nmetrics:"))
    if finished:
        ended(root / "plain-0", 0.5, words_of(file, "plain", 0))
    root.mkdir(exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    alive: list[int] = []

    def start(config: str, run: ArmRun) -> subprocess.Popen[bytes]:
        started.append(_start(config, run))
        alive.append(sum(process.poll() is None for process in started))
        return started[-1]

    monkeypatch.setattr("rstar2_megatron.runs.ablation._start", start)
    monkeypatch.setattr("rstar2_megatron.runs.ablation._POLL_S", 0.01)
    arms = ["plain", "roc", "cispo"] if finished else ["roc", "cispo"]
    with contextlib.ExitStack() as held:
        for arm in ("roc", "cispo"):
            fcntl.flock(held.enter_context((root / f".{arm}-0.lock").open("w")), fcntl.LOCK_EX)
        assert run_ablation(str(file), [], arms, ["0"], dry_run=False) == 1
    assert alive == [1, together]
    assert sorted(path.name for path in root.glob("*.log")) == ["cispo-0.log", "roc-0.log"]


def test_runs_on_gpus_come_one_after_another(file: Path) -> None:
    file.write_text(file.read_text().replace("metrics:", "at_once: 2\nmetrics:"))
    with pytest.raises(ConfigError, match="at_once=2: runs on GPUs come one after another"):
        run_ablation(str(file), ["cluster.node_groups=null"], [], [], dry_run=True)


def test_a_plan_says_what_each_run_would_do(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path / "three" / "plain-0", 0.5, words_of(file, "plain", 0))
    ended(tmp_path / "three" / "plain-1", 0.5, words_of(file, "plain", 1), steps=2)
    command = ["--ablate", str(file), "--arms", "plain,cispo", "--seeds=0,1", "--dry-run"]
    assert main(command) == 0
    lines = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    continues = "continues, if it has a checkpoint"
    assert lines == ["plain, seed 0: finished", "cispo, seed 0: to run", f"plain, seed 1: {continues}", "cispo, seed 1: to run"]
    assert main([*command, "runner.max_steps=6"]) == 0
    assert f"plain, seed 0: {continues}" in capsys.readouterr().out


def test_a_run_that_a_condition_ended_continues_without_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = "rollout/pass_rate at least 0.4"
    ended(tmp_path / "three" / "plain-0", 0.5, words_of(file, "plain", 0), steps=2, condition=condition)
    command = ["--ablate", str(file), "--arms", "plain", "--seeds=0", "--dry-run"]
    assert main([*command, "runner.stop_when=[{metric: rollout/pass_rate, at_least: 0.4}]"]) == 0
    assert "plain, seed 0: finished" in capsys.readouterr().out
    assert main(command) == 0
    assert "plain, seed 0: continues, if it has a checkpoint" in capsys.readouterr().out


RUN = """#!{python}
import signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(140))
print("runs", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGUSR2, 140)])
def test_a_run_ends_with_its_ablation(file: Path, tmp_path: Path, number: int, code: int) -> None:
    """Also where the ablation cannot end it; SIGUSR2 reaches it, and no other run is started."""
    (tmp_path / "run").write_text(RUN.format(python=sys.executable))
    (tmp_path / "run").chmod(0o755)
    program = "import sys; from rstar2_megatron.runs.main import main; arguments = sys.argv[2:]; sys.executable = sys.argv[1]; "
    command = ["--ablate", str(file), "--arms", "plain,roc", "--seeds=0"]
    process = subprocess.Popen([sys.executable, "-c", f"{program} sys.exit(main(arguments))", str(tmp_path / "run"), *command])
    try:
        log, deadline = tmp_path / "three" / "plain-0.log", time.monotonic() + 60
        while not (log.is_file() and log.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        (run,) = psutil.Process(process.pid).children()
        os.kill(process.pid, number)
        assert process.wait(30) == code
        run.wait(10)
    finally:
        process.kill()
    assert [path.name for path in (tmp_path / "three").glob("*.log")] == ["plain-0.log"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "rock"], "--arms rock: ablation.yaml has no such arm; it has plain, roc, cispo"),
        (["--seeds", "0,x"], "--seeds x: give whole numbers"),
        (["algorithm.policy_loss=clipped"], "arms roc and cispo are one configuration"),
        (["algorithm.groupsize=3"], "unknown key algorithm.groupsize; the nearest valid key is algorithm.group_size"),
        (["--arms=roc", "algorithm.group_size=4"], "arm roc: down_sample_to_n=8 exceeds algorithm.group_size=4"),
        (["--arms", ""], "an ablation is --ablate FILE"),
        (["rstar2-tiny-cpu"], "an ablation is --ablate FILE"),
        (["actor.optim.lr=0.5"], "plain-0 holds a run with actor.optim.lr=0.0003, now 0.5; give the ablation another"),
    ],
)
def test_bad_words_are_refused_before_anything_runs(
    file: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(tmp_path / "three" / "plain-0", 0.5, words_of(file, "plain", 0))
    assert main(["--ablate", str(file), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "three").glob("*.log"))


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("config: rstar2-tiny-cpu\nseeds: []\nmetrics: [reward]\narms: {'a b': {}}\n")
    with pytest.raises(ConfigError, match=r"x\.yaml: seeds: List should have at least 1 item.*arms\.a b"):
        run_ablation(str(tmp_path / "x.yaml"), [], [], [], dry_run=True)
    with pytest.raises(ConfigError, match=r"no file .*absent\.yaml"):
        run_ablation(str(tmp_path / "absent.yaml"), [], [], [], dry_run=True)
    with pytest.raises(ConfigError, match="an ablation is --ablate FILE"):
        parse(["--arms", "a"])
    for option in ("--check", "--print-config"):  # which would run all of it
        with pytest.raises(ConfigError, match="are for one configuration: give the NAME that the ablation's FILE names"):
            parse(["--ablate", "a.yaml", option])


def test_what_a_resume_says_of_another_configuration() -> None:
    """Keys that were changed, own code by its hash; another directory, seed or number of steps is no change of the work."""
    then = load("rstar2-tiny-cpu", []).settings
    assert changes(to_plain(then), to_plain(then)) == []
    words = ["runner.max_steps=99", "runner.experiment_name=other", "actor.seed=7", "reward.positive_above=0.5"]
    now = load("rstar2-tiny-cpu", [*words, "algorithm.policy_loss=examples/extend/own_loss.py:of_trajectories"]).settings
    found = changes(to_plain(then), to_plain(now))
    assert found[0] == "algorithm.policy_loss='clipped', now None" and found[-1] == "reward.positive_above=0.0, now 0.5"
    assert [line.partition("=")[0] for line in found[1:-1]] == [
        "algorithm.policy_loss.reference",
        "algorithm.policy_loss.sha256",
    ]
