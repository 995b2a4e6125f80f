"""verl beside this project: the arms' settings, and, for a release, three steps of verl itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.verl.beside import ARMS, Beside, arm_words
from rstar2_megatron.settings.load import CONFIG_DIR, ConfigError, load_settings
from tests.e2e.runs import ProgramRun, read_jsonl
from tests.rollout.memorised import SETTINGS

ROOT = CONFIG_DIR.parent
TINY = "rstar2-tiny-cpu"


def test_every_arm_trains_on_as_many_trajectories_of_a_problem() -> None:
    trained = {}
    for arm in ARMS:
        settings = load_settings(TINY, arm_words(arm, load_settings(TINY)))
        sampling = settings.algorithm.down_sampling
        drawn, config = settings.algorithm.group_size, sampling.down_sampling_config
        trained[arm] = (drawn, config.down_sample_to_n if sampling.do_down_sampling else drawn)
        if sampling.do_down_sampling:
            least = 2 if config.mode == "released" else 0
            assert (arm, config.min_zero_reward_trace_num) == (f"roc-{config.mode}", least)
    assert trained == {"verl": (8, 8), "grpo": (8, 8), "roc-paper": (16, 8), "roc-released": (16, 8)}


def test_an_unknown_arm_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown arms \['ppo'\]; known: verl, grpo"):
        Beside(TINY, [], ["ppo"], [0], tmp_path, Path("python")).run()


def test_finished_runs_are_drawn_and_not_run_again(tmp_path: Path) -> None:
    ours, verl = tmp_path / "grpo-0", tmp_path / "verl-0"
    for directory in (ours, verl):
        directory.mkdir()
    (ours / "finished.json").write_text("{}")
    rows = [{"step": step, "rollout/pass_rate": 0.5, "rollout/total_num_sequence": 128, "time/step": 9.0} for step in (1, 2)]
    (ours / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"critic/rewards/mean": 0.4, "timing_s/step": 9.0, "perf/total_num_tokens": 16384}
    data |= {"prompt_length/mean": 28.0, "response_length/mean": 100.0}
    merged = "".join(json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2))
    (verl / "metrics.jsonl").write_text(merged)
    words = ["cold_start.enabled=False", f"cold_start.cache_dir={tmp_path / 'cache'}", "rollout.model.model_path=/m"]
    words += [f"data.train_data_paths=[{tmp_path / 'x.jsonl'}]", "data.val_data_paths=[]", "cold_start.builder=null"]
    assert Beside(TINY, words, ["verl", "grpo"], [0], tmp_path, Path("absent")).run() == 0
    text = (tmp_path / "comparison.txt").read_text()
    assert "grpo - verl: +0.100 at trajectories 256" in text


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_three_steps_of_verl_itself(memorised_model: Path, tmp_path: Path) -> None:
    """verl's trainer, agent loop and engine with this project's tool, judge and grader. The model knows one of the prompts."""
    problems, out = tmp_path / "problems.jsonl", tmp_path / "beside"
    prompts = ("right?", "a?", "b?", "7?")  # at those that it does not know it is right now and then
    rows = [{"prompt": prompts[i % 4], "solutions": ["42"], "query_id": str(i)} for i in range(16)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {
        "cold_start.enabled": False,
        "cold_start.builder": "null",
        "rollout.model.model_path": memorised_model,
        "data.train_data_paths": f"[{problems}]",
        "data.val_data_paths": "[]",
        "data.rollout_batch_size": 4,
        "algorithm.down_sampling.down_sampling_config.down_sample_to_n": 8,
        "agentloop.system_prompt": f"'{SETTINGS.system_prompt}'",
        "runner.max_steps": 3,
        "runner.save_interval": -1,
    }
    run = ProgramRun(
        [
            *("bash", str(ROOT / "examples/agent/rstar2/compare_with_verl.sh"), TINY),
            *(f"{key}={value}" for key, value in words.items()),
            *("--arms", "verl", "--out", str(out)),
        ],
        tmp_path / "beside.log",
    ).start()
    assert run.wait(1100) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    steps = [row["data"] for row in read_jsonl(out / "verl-0" / "metrics.jsonl")]
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]
    means = [[step[key] for key in ("critic/rewards/mean", "actor/grad_norm", "num_turns/max")] for step in steps]
    rewards, norms, turns = zip(*means, strict=True)
    assert 0 < sum(rewards) < 3 and max(norms) > 0 and max(turns) > 2, means
    assert re.search(r"rollout/pass_rate +verl +1 +1-3 ", (out / "comparison.txt").read_text())
