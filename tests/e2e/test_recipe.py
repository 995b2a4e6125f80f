"""`run_rstar2.sh recipe=...` with every part real: SFT, difficulty filter, RL; stopped, killed and gone on with."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import yaml

from rstar2_megatron.runs.main import main
from tests.e2e.runs import RunProcess, read_jsonl
from tests.rollout.memorised import ANSWER, SETTINGS

LIMIT_S = 600
# The filter's model has learnt to answer 42: one problem is always solved, one never.
SOLUTIONS = {"right": "42", "broken": "41"}
ATTEMPTS = 16  # at each problem, a few at a time, so that the filter can be stopped among them
STEPS = 3  # the condition ends RL after so many of its nine steps; the kill comes after the first


@pytest.fixture
def recipe(memorised_model: Path, tmp_path: Path) -> Path:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{name}?", "solutions": [s], "query_id": name} for name, s in SOLUTIONS.items()]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = tmp_path / "conversations.jsonl"
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": ANSWER}]
    conversations.write_text((json.dumps({"messages": messages}) + "\n") * 24)
    path = tmp_path / "short.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "config": "rstar2-tiny-cpu",
                "overrides": {
                    "cold_start.enabled": False,
                    "cold_start.builder": None,
                    "cluster.component_placement": {"actor,rollout,reward": "0"},
                    "rollout.model.model_path": str(memorised_model),
                    "rollout.max_total_tokens": 8192,
                    "data.train_data_paths": [str(problems)],
                    "data.val_data_paths": [],
                    "data.rollout_batch_size": 1,
                    "agentloop.system_prompt": SETTINGS.system_prompt,
                    "agentloop.max_assistant_turns": 2,
                    "algorithm.group_size": 4,
                    # Groups of equal reward are all that this model makes; let them reach the actor.
                    "algorithm.down_sampling.do_down_sampling": False,
                    "actor.model.tensor_model_parallel_size": 1,
                    "evaluation.before_and_after": False,
                    "tools.codejudge.num_workers": 1,
                },
                "stages": [
                    {
                        "name": "sft",
                        "task": "sft",
                        "overrides": {
                            "sft.train_data_paths": [str(conversations)],
                            "sft.val_data_paths": [str(conversations)],
                            "sft.batch_size": 2,
                            "sft.epochs": 1,
                            "sft.lr": 1e-6,
                            "runner.save_interval": 2,
                        },
                    },
                    {
                        "name": "filter",
                        "task": "difficulty_filter",
                        "overrides": {
                            "difficulty_filter.num_samples": ATTEMPTS,
                            "rollout.max_running_requests": 2,
                            "algorithm.sampling_params.temperature": 0.0,
                        },
                    },
                    {
                        "name": "rl",
                        "problems_from": "filter",
                        "overrides": {
                            "runner.max_steps": 9,
                            "runner.save_interval": 1,
                            "runner.stop_when": [{"metric": "rollout/pass_rate", "at_most": 0.5, "times": STEPS}],
                        },
                    },
                ],
            }
        )
    )
    return path


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_stages_run_in_order_and_go_on_where_they_were_stopped(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"recipe={recipe}", f"runner.output_dir={tmp_path}"]
    root = tmp_path / "short"

    def status() -> dict[str, str]:
        stages = json.loads((root / "recipe.json").read_text())["stages"]
        return {name: stage["status"] for name, stage in stages.items()}

    # Ctrl-C in the first stage
    interrupted = RunProcess(words, tmp_path / "interrupted.log").start()
    checkpoints = root / "sft" / "checkpoints"
    interrupted.wait_for(lambda: bool(list(checkpoints.glob("global_step_?"))), LIMIT_S, "a checkpoint of SFT")
    interrupted.send(signal.SIGINT)
    assert interrupted.wait(LIMIT_S) == 130, interrupted.text()[-4000:]
    interrupted.assert_nothing_left()
    assert status() == {"sft": "running"}

    # SIGTERM among the attempts of the filter
    attempts = root / "filter" / "trajectories.jsonl"
    stopped = RunProcess(words, tmp_path / "stopped.log").start()
    stopped.wait_for(lambda: len(read_jsonl(attempts)) > 2, LIMIT_S, "attempts of the filter")
    stopped.send(signal.SIGTERM)
    assert stopped.wait(LIMIT_S) == 143, stopped.text()[-4000:]
    stopped.assert_nothing_left()
    assert f"resuming from {root}/sft/checkpoints/global_step_" in stopped.text()
    assert status() == {"sft": "done", "filter": "running"}
    before = read_jsonl(attempts)
    assert 2 < len(before) < 2 * ATTEMPTS

    # every process gone at once in the last stage, as when the machine fails
    killed = RunProcess(words, tmp_path / "killed.log").start()
    killed.wait_for(lambda: (root / "rl" / "checkpoints" / "global_step_1").is_dir(), LIMIT_S, "a checkpoint of RL")
    killed.kill_all()
    killed.assert_nothing_left(60, killed=True)
    assert killed.text().count("done before") == 1
    assert status() == {"sft": "done", "filter": "done", "rl": "running"}
    assert not (root / "rl" / "finished.json").exists()
    # what had been drawn was not drawn again
    drawn = read_jsonl(attempts)
    assert drawn[: len(before)] == before and len(drawn) == 2 * ATTEMPTS
    assert len({(row["query_id"], row["rollout_index"]) for row in drawn}) == 2 * ATTEMPTS

    last = RunProcess(words, tmp_path / "last.log").start()
    assert last.wait(LIMIT_S) == 0, last.text()[-6000:]
    last.assert_nothing_left()
    assert last.text().count("done before") == 2
    assert f"resuming from {root}/rl/checkpoints/global_step_" in last.text()
    assert status() == dict.fromkeys(("sft", "filter", "rl"), "done")

    losses = read_jsonl(root / "sft" / "metrics.jsonl")
    assert [row["step"] for row in losses] == list(range(1, 13))
    assert losses[-1]["eval/sft_loss"] == pytest.approx(losses[-1]["train/sft/token_loss"], rel=0.05)
    assert (root / "sft" / "curves.png").stat().st_size > 5000

    counts = {row["query_id"]: (row["solved"], row["samples"]) for row in read_jsonl(root / "filter" / "pass_counts.jsonl")}
    assert counts == {"right": (ATTEMPTS, ATTEMPTS), "broken": (0, ATTEMPTS)}
    assert [row["query_id"] for row in read_jsonl(root / "filter" / "train.jsonl")] == ["broken"]

    # the stage ended by its condition, whose count the kill did not reset, on the problem that the filter left
    rows = read_jsonl(root / "metrics.jsonl")
    assert [(row["step"], row["stage"], row["stage_step"]) for row in rows] == [
        (step, "rl", step) for step in range(1, STEPS + 1)
    ]
    assert {row["query_id"] for row in read_jsonl(root / "rl" / "trajectories.jsonl")} == {"broken"}
    assert json.loads((root / "rl" / "finished.json").read_text())["condition"].startswith("rollout/pass_rate <= 0.5")
    assert f"model_path: {root / 'sft' / 'model'}" in (root / "rl" / "config.yaml").read_text()
    assert (root / "rl" / "model" / "config.json").is_file() and (root / "curves.png").stat().st_size > 10_000

    capsys.readouterr()
    assert main(words) == 0 and capsys.readouterr().out.count("done before") == 3
    assert main([*words, "rl/runner.max_steps=8"]) == 2
    assert "stage rl in" in (message := capsys.readouterr().err) and "was run with other settings" in message
