"""Whole runs of examples/extend: code of the user behind every door."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rstar2_megatron.settings.load import load_settings
from tests.e2e.runs import ROOT, RunProcess, arguments, read_jsonl

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
LIMIT_S = 600


def example(name: str, cache: Path, results: Path, *extra: str) -> list[str]:
    """Two small steps of an example's YAML."""
    settings = arguments(cache, results, name, "evaluation.before_and_after=False", *extra)[1:]
    return [str(ROOT / f"examples/extend/{name}.yaml"), *settings]


def test_own_rewards_train_and_their_code_is_kept(cache: Path, tmp_path: Path) -> None:
    run = RunProcess(example("rewards", cache, tmp_path), tmp_path / "run.log").start()
    assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    assert f"{ROOT}/examples/extend/rewards.py:compute_score  (sha256 " in run.text()
    for row in read_jsonl(tmp_path / "rewards/metrics.jsonl"):
        assert row["rollout/reward/correct"] == pytest.approx(row["rollout/pass_rate"])
        assert 0 <= row["rollout/reward/tool_use"] <= 1 and row["rollout/reward/answer_chars"] > 0
        assert "rollout/user_code_errors/KeyError" not in row
    trajectories = read_jsonl(tmp_path / "rewards/trajectories.jsonl")
    assert {t["reward"] for t in trajectories} <= {0.0, 0.2, 1.0, 1.2}
    for t in trajectories:
        assert t["reward"] == pytest.approx(t["reward_terms"]["correct"] + 0.2 * t["reward_terms"]["tool_use"])
        assert t["positive"] == (t["reward_terms"]["correct"] == 1)
    # The saved configuration loads with the code that ran, wherever the file is by then.
    saved = yaml.safe_load((tmp_path / "rewards/config.yaml").read_text())["reward"]["terms"][1]["function"]
    copy = tmp_path / "rewards/code" / saved["sha256"][:12] / "rewards.py"
    assert copy.read_text() == (ROOT / "examples/extend/rewards.py").read_text()
    code = load_settings(str(tmp_path / "rewards/config.yaml")).reward.terms[1].function
    assert not isinstance(code, str) and code.reference == f"{copy}:tool_use" and code.sha256 == saved["sha256"]


def test_an_exception_ends_the_run_where_that_is_asked_for_and_a_resume_says_that_the_code_changed(
    cache: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(problem, trajectory):\n    return float(len(trajectory.assistant_texts[-1]) % 2)\n")
    command = example("rewards", cache, tmp_path, "reward.terms=[]", f"reward.function={mine}:score", "runner.max_steps=1")
    run = RunProcess(command, tmp_path / "first.log").start()
    assert run.wait(LIMIT_S) == 0, run.text()[-6000:]

    mine.write_text("def score(problem, trajectory):\n    return problem.extra['weight']\n")
    again = [word for word in command if not word.startswith("runner.max_steps")]
    run = RunProcess([*again, "runner.max_steps=2", "runner.user_code_errors=stop"], tmp_path / "stopped.log").start()
    assert run.wait(LIMIT_S) == 1, run.text()[-6000:]
    run.assert_nothing_left()
    assert "reward.function mine.py:score is not the code of the checkpoint: sha256 " in run.text()
    assert f"error: reward mine.py:score failed: {mine}:2, in score: KeyError: 'weight' (problem " in run.text()
    assert "Traceback" not in run.text()


def test_an_environment_trains(cache: Path, tmp_path: Path) -> None:
    run = RunProcess(example("game", cache, tmp_path), tmp_path / "run.log").start()
    assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    rows = read_jsonl(tmp_path / "game/metrics.jsonl")
    assert len(rows) == 2 and all(1 < row["rollout/num_turns"] <= 4 for row in rows)
    assert all(not row["rollout/dropped_infrastructure"] for row in rows)
    trajectories = read_jsonl(tmp_path / "game/trajectories.jsonl")
    assert {t["reward"] for t in trajectories} <= {0.0, 1.0} and trajectories
    for t in trajectories:
        assert set(t.get("observations", [])) <= {"higher", "lower", "no number"} and t["positive"] == (t["reward"] == 1)
        # A turn that the token budget cut off is not played.
        turns = t["turns"][:-1] if t["finish_reason"] == "length_limit" else t["turns"]
        guesses = [int(numbers[-1][:6]) for turn in turns if (numbers := re.findall(r"\d+", turn))]
        assert (t["reward"] == 1) == (int(t["solutions"][0]) in guesses)
