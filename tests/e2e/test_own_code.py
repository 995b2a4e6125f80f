"""Whole runs of examples/extend: code of the user behind every door."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rstar2_megatron.settings.load import load_settings
from tests.e2e.runs import ONE_SLOT, ROOT, RunProcess, arguments, read_jsonl

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
LIMIT_S = 600
EXAMPLES = ROOT / "examples/extend"
SAMPLING = "algorithm.down_sampling.down_sampling_config"
RULES = """
def keep(problem, trajectory):
    return problem.extra["operation"] in ("product", "gcd") and trajectory.rollout_index != 3

def first_half(group, count, rng):
    return range(min(count, len(group.trajectories)))

def length(trajectory):
    return trajectory.response_tokens / 1000
"""
FAILS = """
def fails(tokens):
    if len(tokens.logprobs) < 20:  # the trial before the start
        return -tokens.advantages * tokens.ratio
    raise KeyError("in training")
"""


def example(name: str, cache: Path, results: Path, *extra: str) -> list[str]:
    """Two small steps of an example's YAML."""
    settings = arguments(cache, results, name, *ONE_SLOT, "evaluation.before_and_after=False", *extra)[1:]
    return [str(EXAMPLES / f"{name}.yaml"), *settings]


@dataclass
class OwnRun:
    """A finished run of two steps whose rows, rewards, filter, rule, penalty, advantage and loss are the user's."""

    command: list[str]
    directory: Path
    rules: Path
    text: str


@pytest.fixture(scope="module")
def own(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> OwnRun:
    results = tmp_path_factory.mktemp("own")
    rules = results / "rules.py"
    rules.write_text(RULES)
    terms = yaml.safe_load((EXAMPLES / "rewards.yaml").read_text())["reward"]
    command = example(
        "own_loss",
        cache,
        results,
        f"data.train_data_paths=[{EXAMPLES}/own_data.csv]",
        "data.rows=own_data.py:row",
        f"reward={yaml.safe_dump(terms, default_flow_style=True, width=10_000).strip()}",
        f"algorithm.trajectory_filters=[{rules}:keep]",
        f"{SAMPLING}.mode={rules}:first_half",
        f"{SAMPLING}.penalty={rules}:length",
        f"{SAMPLING}.reject_equal_reward=False",
    )
    run = RunProcess(command, results / "run.log").start()
    assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    return OwnRun(command, results / "own_loss", rules, run.text())


def test_own_rewards_train_and_their_code_is_kept(own: OwnRun) -> None:
    assert f"{EXAMPLES}/rewards.py:compute_score  (sha256 " in own.text
    for row in read_jsonl(own.directory / "metrics.jsonl"):
        assert row["rollout/reward/correct"] == pytest.approx(row["rollout/pass_rate"])
        assert 0 <= row["rollout/reward/tool_use"] <= 1 and row["rollout/reward/correct/answer_chars"] > 0
        assert "rollout/user_code_errors/KeyError" not in row
    trajectories = read_jsonl(own.directory / "trajectories.jsonl")
    assert {t["reward"] for t in trajectories} <= {0.0, 0.2, 1.0, 1.2}
    for t in trajectories:
        assert t["reward"] == pytest.approx(t["reward_terms"]["correct"] + 0.2 * t["reward_terms"]["tool_use"])
        assert t["positive"] == (t["reward_terms"]["correct"] == 1)
    # The saved configuration loads with the code that ran, wherever the file is by then.
    saved = yaml.safe_load((own.directory / "config.yaml").read_text())["reward"]["terms"][1]["function"]
    copy = own.directory / "code" / saved["sha256"][:12] / "rewards.py"
    assert copy.read_text() == (EXAMPLES / "rewards.py").read_text()
    code = load_settings(str(own.directory / "config.yaml")).reward.terms[1].function
    assert not isinstance(code, str) and code.reference == f"{copy}:tool_use" and code.sha256 == saved["sha256"]


def test_a_run_by_own_rows_and_rules(own: OwnRun) -> None:
    assert "60 problems; data.rows=own_data.py:row dropped 1 rows" in own.text
    rows = read_jsonl(own.directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/filtered/keep"] == 4
        assert row["rollout/total_num_sequence"] == 4 * 8
        assert row["train/actor/loss/trajectory_ratio"] == pytest.approx(1.0, abs=0.05)
        assert 0 <= row["train/actor/grad_norm"] < 100
    shown = read_jsonl(own.directory / "trajectories.jsonl")
    kept = {row["rollout_index"] for row in shown if row["kept"]}
    assert kept == {0, 1, 2, 4, 5, 6, 7, 8}
    assert all(row["penalty"]["error"] == pytest.approx(row["response_tokens"] / 1000) for row in shown if row["kept"])


def test_a_loss_that_fails_ends_the_run_in_a_sentence_and_a_resume_says_that_the_code_changed(own: OwnRun) -> None:
    own.rules.write_text(RULES + FAILS)
    again = [word for word in own.command if not word.startswith("runner.max_steps")]
    words = ["runner.max_steps=3", f"algorithm.policy_loss={own.rules}:fails"]
    run = RunProcess([*again, *words], own.directory.with_suffix(".fails.log")).start()
    assert run.wait(LIMIT_S) == 1, run.text()[-6000:]
    run.assert_nothing_left()
    assert "the checkpoint is of a run with algorithm.trajectory_filters.0.sha256='" in run.text()
    assert "the checkpoint is of a run with algorithm.policy_loss.reference='" in run.text()
    line = (RULES + FAILS).splitlines().index('    raise KeyError("in training")') + 1
    said = f"error: algorithm.policy_loss=rules.py:fails failed: {own.rules}:{line}, in fails: KeyError: 'in training'"
    assert said in run.text().splitlines() and "Traceback" not in run.text(), run.text()[-4000:]


def test_an_exception_of_a_reward_ends_the_run_where_that_is_asked_for(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(problem, trajectory):\n    return problem.extra['weight']\n")
    words = ("reward.terms=[]", f"reward.function={mine}:score", "runner.user_code_errors=stop")
    run = RunProcess(example("rewards", cache, tmp_path, *words), tmp_path / "stopped.log").start()
    assert run.wait(LIMIT_S) == 1, run.text()[-6000:]
    run.assert_nothing_left()
    assert f"error: reward mine.py:score failed: {mine}:2, in score: KeyError: 'weight' (problem " in run.text()
    assert "Traceback" not in run.text()


def test_an_environment_trains(cache: Path, first_run: Path, tmp_path: Path) -> None:
    words = ("cold_start.phases=[]", f"rollout.model.model_path={first_run}/model")  # any model; this one is there
    run = RunProcess(example("game", cache, tmp_path, *words), tmp_path / "run.log").start()
    assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    assert "no tool that needs the Code Judge" in run.text() and not (tmp_path / "game/logs/judge.log").exists()
    rows = read_jsonl(tmp_path / "game/metrics.jsonl")
    assert len(rows) == 2 and all(1 < row["rollout/num_turns"] <= 4 for row in rows)
    assert all(not row["rollout/dropped_infrastructure"] for row in rows)
    trajectories = read_jsonl(tmp_path / "game/trajectories.jsonl")
    assert {t["reward"] for t in trajectories} <= {0.0, 1.0} and trajectories
    for t in trajectories:
        assert set(t.get("observations", [])) <= {"higher", "lower", "no number"} and t["positive"] == (t["reward"] == 1)
        assert t["opening"] == "You have 4 guesses."
        # A turn that the token budget cut off is not played.
        turns = t["turns"][:-1] if t["finish_reason"] == "length_limit" else t["turns"]
        guesses = [int(numbers[-1][:6]) for turn in turns if (numbers := re.findall(r"\d+", turn))]
        assert (t["reward"] == 1) == (int(t["solutions"][0]) in guesses)
