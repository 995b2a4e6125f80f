"""The map of names, and tables and figures of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2_megatron.report.curves import main
from rstar2_megatron.report.draw import draw_run, points
from rstar2_megatron.report.names import COMPARABLE, LENGTH, REWARD, TO_VERL, ours_from_verl
from rstar2_megatron.report.table import mean_of, render_table
from tests.report.logs import write_run


def test_the_name_map_is_one_to_one() -> None:
    theirs = [name for names in TO_VERL.values() for name in names]
    assert len(theirs) == len(set(theirs))
    assert all(ours_from_verl(name) == ours for ours, names in TO_VERL.items() for name in names)
    assert ours_from_verl("actor/unknown") == "actor/unknown"
    assert ours_from_verl("val-core/math/500/acc/maj@8/mean") == "eval/math/500/majority@8"
    assert ours_from_verl("val-aux/aime24/reward/best@16/mean") == "eval/aime24/pass@16"
    assert ours_from_verl("val-aux/aime24/reward/best@16/std") == "val-aux/aime24/reward/best@16/std"
    assert REWARD in COMPARABLE and LENGTH in COMPARABLE


def test_the_document_holds_the_whole_map_and_every_caveat() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    for ours, names in TO_VERL.items():
        assert all(f"`{name}`" in rows[f"`{ours}`"] for name in names), ours
    for name, caveat in COMPARABLE.items():
        assert f"- `{name}`: {caveat}" in text, name


# ----------------------------------------------------------------------------------------------- one run


def test_table_compares_first_and_last_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.2] * 5 + [0.5] * 10 + [0.8] * 5)
    (run / "held_out.json").write_text(json.dumps({"before_sft": 0.0, "after_sft": 0.25, "after_rl": None, "seconds": 90}))
    text = render_table(run)
    assert "run, 20 steps" in text and "first 5 steps" in text
    assert next(line for line in text.splitlines() if "pass rate" in line).split()[-3:] == ["0.100", "0.400", "+0.300"]
    assert "held-out pass@1: before SFT 0.000, after SFT 0.250" in text and "after RL" not in text
    assert "wall time: 1.5 min" in text


def test_error_ratios_are_averaged_over_calls_not_steps() -> None:
    name, calls = "rollout/tool_error_ratio_positive", "rollout/tool_calls_positive"
    rows = [{"step": 1, calls: 0}, {"step": 2, name: 0.5, calls: 30}, {"step": 3, name: 0.1, calls: 10}]
    assert mean_of(rows, name) == pytest.approx(16 / 40)
    assert mean_of(rows[:1], name) is None
    assert points(rows, name) == ([2, 3], [0.5, 0.1])


def test_curves_of_a_run_and_of_a_short_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [0.5])
    assert main([str(run)]) == 0
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in run.iterdir()} == {"metrics.jsonl", "curves.png"}
    assert "first step" in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no steps to draw"):
        draw_run(empty)
    assert main([str(empty)]) == 2


def test_options_of_a_comparison_count_for_one_run_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [0.2, 0.4, 0.9])
    assert main([str(run), "--metrics", "entrpy"]) == 2
    assert "no log has entrpy; --metrics takes" in capsys.readouterr().err
    assert main([str(run), "--metrics", "reward", "--last", "2", "--x", "trajectories"]) == 2
    assert "does not log what --x trajectories needs" in capsys.readouterr().err
    assert main([str(run), "--metrics", "reward", "--last", "2"]) == 0
    text = (run / "comparison.txt").read_text()
    assert f"{REWARD}  run  1      1-3    0.650" in text and LENGTH not in text
    with pytest.raises(SystemExit):
        main([str(run), "--paired"])
    assert "--paired compares runs of equal seeds, and one run is named" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + json.dumps({"step": 4, REWARD: None}) + "\n")
    assert main([str(run), "--strict"]) == 2
    assert f"{REWARD} is NaN or infinite at 1 steps (4)" in capsys.readouterr().err
