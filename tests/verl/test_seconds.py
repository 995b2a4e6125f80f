"""Seconds of a step beside verl's: what counts as which part, and the ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verl.beside import VERL
from benchmarks.verl.seconds import OURS, Watch, compared, run_of


def run(step: float, start: float) -> dict[str, Any]:
    steps = [{"wall_s": {"step": step}, "cpu_s": {"step": 2 * step, "engine": step}, "tokens": 1000.0}] * 2
    return {"steps": steps, "start_s": start, "peak_gb": 4.0}


def test_ratios_are_of_means_over_the_steps_of_all_rounds() -> None:
    found = compared({VERL: [run(8.0, 40.0), run(12.0, 60.0)], OURS: [run(4.0, 25.0), run(6.0, 25.0)]})
    assert found[VERL]["wall_s/step"] == 10.0 and found[OURS]["cpu_ms_a_token"] == 10.0
    # a round is drawn with both arms: the second round's slower machine does not widen the interval
    assert found["ours_over_verl"]["wall_s/step"] == [0.5, 0.5, 0.5]
    assert found["ours_over_verl"]["start_s"] == [0.5, 0.417, 0.625]
    assert found["ours_over_verl"]["peak_gb"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("arm", "prefix"), [(VERL, "timing_s/"), (OURS, "time/")])
def test_a_run_is_watched_line_by_line_and_its_first_and_last_step_left_out(tmp_path: Path, arm: str, prefix: str) -> None:
    log = tmp_path / "metrics.jsonl"

    class Runs:
        def run(self) -> int:
            for step in (1, 2, 3, 4):
                part = "gen" if arm == VERL else "rollout"
                row: dict[str, Any] = {f"{prefix}step": 5.0 + step, f"{prefix}{part}": 4.0}
                if arm == VERL:
                    row |= {"response_length/mean": 100.0, "critic/rewards/mean": 0.5}
                    row = {"step": step, "data": row}
                else:
                    row |= {"step": step, "rollout/response_length_all": 100.0, "rollout/pass_rate": 0.5}
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            return 0

    found = run_of(arm, Runs(), log, 10)  # type: ignore[arg-type]
    assert [step["wall_s"]["rollout"] for step in found["steps"]] == [4.0, 4.0]
    assert [step["wall_s"]["rest"] for step in found["steps"]] == [3.0, 4.0]
    assert [step["tokens"] for step in found["steps"]] == [1000.0, 1000.0]


def test_a_log_that_ends_before_it_was_looked_at_is_counted_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    with Watch(log) as watch:
        log.write_text("{}\n{}\n")
    assert len(watch.lines) == 2
