"""Reading logs of several codes, comparing arms, tables and figures of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.report.compare import (
    Arm,
    area,
    bands_separate,
    best_value,
    caveats,
    comparison_table,
    draw_comparison,
    final_value,
    group_arms,
    largest_gap,
    steps_to_reach,
)
from rstar2_megatron.report.curves import draw_run, main
from rstar2_megatron.report.draw import points
from rstar2_megatron.report.names import COMPARABLE, LENGTH, REWARD, TO_VERL, ours_from_verl
from rstar2_megatron.report.read import Log
from rstar2_megatron.report.table import mean_of, render_table
from tests.report.logs import read_log


def write_run(directory: Path, rewards: list[float], first_step: int = 1) -> Path:
    file = JsonlFile(directory / "metrics.jsonl")
    for step, reward in enumerate(rewards, first_step):
        file.append(
            {
                "step": step,
                "rollout/pass_rate": reward / 2,
                REWARD: reward,
                LENGTH: 100.0 + step,
                "rollout/tool_error_ratio_positive": 1 / step if step else 1.0,
                "time/step": 2.0,
            }
        )
    return directory


def test_a_verl_log_without_resampling_is_marked_on_the_plot(tmp_path: Path) -> None:
    """Plain verl's reward is of all rollouts: it is set against the dotted pass rate, and the figure says so."""
    ours = write_run(tmp_path / "ours", [0.2, 0.4, 0.6])
    plain, recipe = tmp_path / "plain.jsonl", tmp_path / "recipe.jsonl"
    for path, extra in ((plain, {}), (recipe, {"down_sampling/after_sampling_trace_num": 512})):
        rows = [{"step": s, "data": {"critic/rewards/mean": 0.1 * s, **extra}} for s in (1, 2, 3)]
        path.write_text("\n".join(map(json.dumps, rows)))
    arms = group_arms([(None, read_log(ours)), (None, read_log(plain)), (None, read_log(recipe))])
    (note,) = [note for note in caveats(arms) if "NOT COMPARABLE" in note]
    assert "verl plain" in note and "recipe" not in note
    figure = draw_comparison(arms)
    assert note in " ".join(figure.texts[0].get_text().split())
    assert "ours: all rollouts" in [line.get_label() for line in figure.axes[0].lines]


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


# -------------------------------------------------------------------------------------------- comparing


def arm(label: str, *seeds: list[float]) -> Arm:
    logs = []
    for i, values in enumerate(seeds):
        log = Log(Path(f"{label}-seed{i}"), "ours")
        log.series[REWARD] = dict(enumerate(values, 1))
        logs.append(log)
    return Arm(label, logs)


def test_seeds_of_one_name_form_an_arm() -> None:
    logs = [(None, log) for log in arm("a", [1.0], [2.0]).logs + arm("b", [1.0]).logs]
    empty: tuple[str | None, Log] = (None, Log(Path("c"), "ours"))
    assert [(a.label, len(a.logs)) for a in group_arms([*logs, empty])] == [("a", 2), ("b", 1)]
    assert [(a.label, len(a.logs)) for a in group_arms([("x", log) for _, log in logs])] == [("x", 3)]


def test_figures_by_hand() -> None:
    a = arm("a", [0.0, 0.2, 0.4, 0.6], [0.0, 0.4, 0.4, 0.6]).curve(REWARD)
    b = arm("b", [0.0, 0.0, 0.9, 0.6, 0.1]).curve(REWARD)
    assert (a[2].mean, a[2].seeds) == (pytest.approx(0.3), 2)
    assert a[2].deviation == pytest.approx(math.sqrt(0.02))
    assert final_value(a) == pytest.approx((0 + 0.3 + 0.4 + 0.6) / 4)
    assert best_value(b) == (3, 0.9)
    assert area({1: 0.0, 2: 1.0, 4: 1.0}) == pytest.approx(2.5 / 3)
    assert area({5: 0.3}) == 0.3 and area({}) is None
    assert largest_gap(a, b) == (3, pytest.approx(0.5))
    assert largest_gap(a, {}) is None
    assert steps_to_reach(a, 0.2) == 3  # mean of 0, 0.3, 0.4
    assert steps_to_reach(a, 0.9) is None


def test_bands_separate_only_with_seeds() -> None:
    low = arm("low", [0.1] * 6, [0.12] * 6).curve(REWARD)
    high = arm("high", [0.5] * 6, [0.52] * 6).curve(REWARD)
    wide = arm("wide", [0.1] * 6, [0.9] * 6).curve(REWARD)
    assert bands_separate(low, high) == bands_separate(high, low) == "yes"
    assert bands_separate(low, wide) == "no"
    assert bands_separate(low, arm("one", [0.5] * 6).curve(REWARD)).startswith("unknown")
    assert bands_separate(low, {}) == "no common steps"


def test_comparison_table_has_a_row_per_metric_and_arm() -> None:
    heads, rows = comparison_table([arm("a", [0.1, 0.6]), arm("b", [0.3, 0.3])], [0.3])
    assert [row[:4] for row in rows] == [[REWARD, "a", "1", "1-2"], [REWARD, "b", "1", "1-2"]]
    cells = dict(zip(heads, rows[1]))
    assert cells["largest gap (step)"] == "-0.300 (2)" and cells["step of reward 0.3"] == "1"


def test_command_line_compares_with_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "ours-seed1", [0.1, 0.2, 0.3])
    two = write_run(tmp_path / "ours-seed2", [0.2, 0.3, 0.4])
    console = tmp_path / "verl.log"
    console.write_text(
        "".join(f"step:{s} - critic/rewards/mean:0.{s} - response_length/mean:90\n" for s in (1, 2))
    )
    out = tmp_path / "out"
    missing = tmp_path / "missing"
    assert main([str(one), str(two), "--verl", f"theirs={console}", str(missing), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert f"{missing} does not exist" in captured.err
    assert {p.name for p in out.iterdir()} == {"comparison.png", "comparison.html", "comparison.txt"}
    page = (out / "comparison.html").read_text()
    assert "data:image/svg+xml;base64," in page and "src='http" not in page
    text = (out / "comparison.txt").read_text()
    for expected in (
        "theirs",
        "ours",
        "after rejection and resampling",
        "one seed only",
        "missing does not exist",
    ):
        assert expected in text and expected in page
    assert (out / "comparison.png").stat().st_size > 10_000
    assert main([str(missing), "--verl", str(missing)]) == 1


# ----------------------------------------------------------------------------------------------- one run


def test_table_compares_first_and_last_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.2] * 5 + [0.5] * 10 + [0.8] * 5)
    (run / "held_out.json").write_text(
        json.dumps({"before_sft": 0.0, "after_sft": 0.25, "after_rl": None, "seconds": 90})
    )
    text = render_table(run)
    assert "run, 20 steps" in text and "first 5 steps" in text
    assert next(line for line in text.splitlines() if "pass rate" in line).split()[-3:] == [
        "0.100",
        "0.400",
        "+0.300",
    ]
    assert "held-out pass@1: before SFT 0.000, after SFT 0.250" in text and "after RL" not in text
    assert "wall time: 1.5 min" in text


def test_error_ratios_are_averaged_over_calls_not_steps() -> None:
    name, calls = "rollout/tool_error_ratio_positive", "rollout/tool_calls_positive"
    rows = [
        {"step": 1, name: 0.0, calls: 0},
        {"step": 2, name: 0.5, calls: 30},
        {"step": 3, name: 0.1, calls: 10},
    ]
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
    assert main([str(empty)]) == 1
