"""Whole runs with the user's own rows, advantage, loss, filter, rule and penalty: examples/extend/ and one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import RunProcess, arguments, read_jsonl

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
OWN = """
def keep(problem, trajectory):
    return problem.extra["operation"] in ("product", "gcd") and trajectory.rollout_index != 3

def first_half(group, count, rng):
    return range(min(count, len(group.trajectories)))

def length(trajectory):
    return trajectory.response_tokens / 1000

def fails(tokens):
    if "64" in str(tokens.logprobs.dtype):  # of the trial before the start
        return -tokens.advantages * tokens.ratio
    raise KeyError("in training")
"""


def run_own(cache: Path, results: Path, name: str, *words: str) -> RunProcess:
    (results / "rules.py").write_text(OWN)
    sampling = "algorithm.down_sampling.down_sampling_config"
    return RunProcess(
        [
            "examples/extend/own_loss.yaml",
            *arguments(cache, results, name)[1:],
            "data.train_data_paths=[examples/extend/own_data.csv]",
            "data.rows=examples/extend/own_data.py:row",
            f"algorithm.trajectory_filters=[{results}/rules.py:keep]",
            f"{sampling}.mode={results}/rules.py:first_half",
            f"{sampling}.penalty={results}/rules.py:length",
            f"{sampling}.reject_equal_reward=False",
            *words,
        ],
        results / f"{name}.log",
    ).start()


def test_a_run_by_own_rules(cache: Path, tmp_path: Path) -> None:
    run = run_own(cache, tmp_path, "own")
    assert run.wait(600) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    assert "60 problems; data.rows=own_data.py:row dropped 1 rows" in run.text()
    rows = read_jsonl(tmp_path / "own" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/filtered/keep"] == 4
        assert row["rollout/total_num_sequence"] == 4 * 8
        assert row["train/actor/loss/trajectory_ratio"] == pytest.approx(1.0, abs=0.05)
        assert 0 <= row["train/actor/grad_norm"] < 100
    shown = read_jsonl(tmp_path / "own" / "trajectories.jsonl")
    kept = {row["rollout_index"] for row in shown if row["kept"]}
    assert kept == {0, 1, 2, 4, 5, 6, 7, 8}
    assert all(row["penalty"]["error"] == pytest.approx(row["response_tokens"] / 1000) for row in shown if row["kept"])


def test_a_loss_that_fails_ends_the_run_in_a_sentence(cache: Path, tmp_path: Path) -> None:
    run = run_own(cache, tmp_path, "fails", f"algorithm.policy_loss={tmp_path}/rules.py:fails")
    assert run.wait(600) == 1
    run.assert_nothing_left()
    said = f"error: algorithm.policy_loss=rules.py:fails failed: {tmp_path}/rules.py:14, in fails: KeyError: 'in training'"
    assert said in run.text().splitlines() and "Traceback" not in run.text(), run.text()[-4000:]
