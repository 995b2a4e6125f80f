"""Comparing runs: what is one arm, differences and what may be concluded, faults of logs, the command line."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import yaml

from rstar2_megatron.report.arms import Arm, check_arms, clock, group_runs, smoothed
from rstar2_megatron.report.compare import (
    RunComparison,
    area,
    best_value,
    bootstrap,
    difference,
    final_value,
    not_comparable,
    steps_to_reach,
)
from rstar2_megatron.report.comparison_files import draw_comparison
from rstar2_megatron.report.curves import main
from rstar2_megatron.report.log_formats import Log
from rstar2_megatron.report.names import LENGTH, LENGTH_ALL, PASS_RATE, REWARD, panel
from rstar2_megatron.report.read import read_logs
from tests.report.logs import read_log, write_run

REWARD_PANEL = [panel("reward")]


def arm(label: str, *seeds: list[float]) -> Arm:
    logs = []
    for i, values in enumerate(seeds):
        log = Log(Path(f"{label}-seed{i}"), "ours")
        log.series[REWARD] = dict(enumerate(values, 1))
        logs.append(log)
    return Arm(label, logs)


def saved_run(directory: Path, rewards: list[float], seed: int, **settings: object) -> Path:
    """A run with its configuration, as a run of this project saves it."""
    write_run(directory, rewards)
    config = {
        "runner": {"experiment_name": directory.name, "output_dir": "results"},
        "rollout": {"model": {"model_path": f"cache/tiny-seed{seed}-{seed:010x}/model"}},
        "actor": {"seed": seed},
        "data": {"seed": seed},
        "agentloop": {"max_assistant_turns": 5, **settings},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


# ------------------------------------------------------------------------------------------------ arms


def test_only_runs_of_one_configuration_but_for_the_seed_are_seeds(tmp_path: Path) -> None:
    """roc-turns5 and roc-turns10 are two experiments, whatever their names end in."""
    paths = [
        saved_run(tmp_path / "roc-turns5", [0.82, 0.83], 0),
        saved_run(tmp_path / "roc-turns10", [0.10, 0.11], 0, max_assistant_turns=10),
        saved_run(tmp_path / "other-name", [0.80, 0.81], 1),
    ]
    arms = group_runs([read_log(path) for path in paths])
    assert [[log.label for log in a.logs] for a in arms] == [["roc-turns5", "other-name"], ["roc-turns10"]]
    assert arms[0].curve(REWARD)[1].mean == pytest.approx(0.81) and arms[1].curve(REWARD)[1].mean == 0.10


def test_runs_without_a_saved_configuration_are_arms_of_their_own(tmp_path: Path) -> None:
    logs = [read_log(write_run(tmp_path / d / "exp-seed1", [0.1 * i])) for i, d in enumerate("ab", 1)]
    labels = [a.label for a in group_runs(logs)]
    assert len(set(labels)) == 2 and all(label.startswith("exp-seed1 (") for label in labels)


def test_one_run_named_twice_or_copied_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2])
    copy = write_run(tmp_path / "copy", [0.1, 0.2])
    with pytest.raises(ValueError, match="is named twice"):
        check_arms([Arm("a", [read_log(run), read_log(tmp_path / "copy" / ".." / "run")])])
    with pytest.raises(ValueError, match="hold the same values at every step"):
        check_arms([Arm("a", [read_log(run)]), Arm("b", [read_log(copy)])])
    assert main(["--arm", f"a={run},{run}"]) == 2


def test_an_arm_of_two_codes_is_an_error(tmp_path: Path) -> None:
    verl = tmp_path / "verl.log"
    verl.write_text("step:1 - critic/rewards/mean:0.1\n")
    with pytest.raises(ValueError, match="arm both mixes runs of ours and verl"):
        check_arms([Arm("both", [read_log(write_run(tmp_path / "ours", [0.2])), read_log(verl)])])


def test_a_run_that_ended_early_does_not_bend_the_mean() -> None:
    both = arm("a", [0.2, 0.2, 0.2], [0.8, 0.8])
    assert list(both.curve(REWARD)) == [1, 2]
    (note,) = [note for note in RunComparison([both], REWARD_PANEL).faults if "unequal length" in note]
    assert "a-seed0 3, a-seed1 2 steps" in note


def test_an_arm_whose_seed_stops_calling_says_where_its_curve_ends() -> None:
    errors = panel("tool-errors")
    roc = arm("roc", [0.1] * 6, [0.2] * 6)
    for log, calls in zip(roc.logs, (6, 3)):
        log.series[errors.metric] = dict.fromkeys(range(1, calls + 1), 0.5)
    found = RunComparison([roc], [panel("reward"), errors])
    assert max(roc.curve(errors.metric)) == 3
    said = f"{errors.metric} of roc ends at step 3: roc-seed1 has none after it"
    assert [note for note in found.caveats if "ends at step" in note] == [said] and not found.faults


def test_runs_of_one_name_are_told_apart_where_their_lengths_differ(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / d / "run", rewards) for d, rewards in (("x", [0.1, 0.2, 0.3]), ("y", [0.2, 0.4])))
    (note,) = RunComparison([Arm("a", [read_log(one), read_log(two)])], REWARD_PANEL).faults
    assert f"{one} 3, {two} 2 steps" in note
    assert main(["--arm", f"a={one},{two}", "--out", str(tmp_path / "out"), "--strict"]) == 2


def test_smoothing_and_axes() -> None:
    assert smoothed({1: 0.0, 2: 1.0, 5: 2.0}, 2) == {1: 0.0, 2: 0.5, 5: 2.0}
    log = Log(Path("a"), "ours", first_step=0)
    log.series = {
        LENGTH: {0: 10.0, 1: 20.0},
        "rollout/total_num_sequence": {0: 4.0, 1: 2.0, 2: 0.0},
        "rollout/generated_tokens": {0: 90.0, 1: 70.0},
        "time/step": {0: 1800.0, 1: 1800.0},
    }
    assert clock(log, "generated") == {1: 90.0, 2: 160.0}
    assert clock(log, "step") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert clock(log, "trajectories") == {1: 4.0, 2: 6.0, 3: 6.0}
    assert clock(log, "tokens") == {1: 40.0, 2: 80.0, 3: 80.0}
    assert clock(log, "time") == {1: 0.5, 2: 1.0}
    verl = Log(Path("v"), "verl")
    verl.series = {LENGTH: {1: 30.0}, "rollout/prompt_length": {1: 20.0}, "perf/total_num_tokens": {1: 400.0}}
    assert clock(verl, "trajectories") == {1: 8.0}


# ---------------------------------------------------------------------------------- figures and differences


def test_figures_by_hand() -> None:
    a = arm("a", [0.0, 0.2, 0.4, 0.6], [0.0, 0.4, 0.4, 0.6]).curve(REWARD)
    b = arm("b", [0.0, 0.0, 0.9, 0.6, 0.1]).curve(REWARD)
    assert a[2].mean == pytest.approx(0.3)
    assert a[2].deviation == pytest.approx(math.sqrt(0.02))
    assert final_value(a, 3) == pytest.approx((0.3 + 0.4 + 0.6) / 3)
    assert best_value(b) == (3, 0.9)
    assert area({1: 0.0, 2: 1.0, 4: 1.0}) == pytest.approx(2.5 / 3)
    assert area({5: 0.3}) == 0.3
    assert steps_to_reach(a, 0.4) == 3 and steps_to_reach(a, 0.9) is None


def test_bootstrap_intervals_cover_a_true_difference_about_as_often_as_they_say() -> None:
    """95 % of 200 experiments of 8 seeds; few seeds cover less, which is why the verdict needs at least three."""
    rng = random.Random(0)
    covered = 0
    for _ in range(200):
        interval = bootstrap([rng.gauss(0.5, 0.1) for _ in range(8)], [rng.gauss(0.6, 0.1) for _ in range(8)])
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= 0.1 <= interval.high
    assert 180 <= covered <= 199
    assert bootstrap([0.1], [0.2, 0.3]).low is None


def test_what_may_be_concluded() -> None:
    low = arm("low", [0.1] * 6, [0.12] * 6, [0.11] * 6)
    high = arm("high", [0.5] * 6, [0.52] * 6, [0.51] * 6)
    wide = arm("wide", [0.0] * 6, [0.9] * 6, [0.1] * 6)
    found = difference(low, high, REWARD)
    assert found is not None and found.place == 6 and found.at.value == pytest.approx(0.4)
    assert found.verdict.startswith("higher")
    reverse = difference(high, low, REWARD)
    assert reverse is not None and reverse.verdict.startswith("lower")
    unclear = difference(low, wide, REWARD)
    assert unclear is not None and unclear.verdict.startswith("no difference may be concluded")
    single = difference(low, arm("one", [0.9] * 6), REWARD)
    assert single is not None and single.at.low is None and "one run" in single.verdict
    two = difference(low, arm("two", [0.9] * 6, [0.9] * 6), REWARD)
    assert two is not None and "fewer than 3 seeds" in two.verdict
    assert difference(low, arm("none"), REWARD) is None


def test_pairs_of_equal_seeds_tell_what_seeds_that_differ_hide() -> None:
    """Seeds differ by 0.4, and the arm is 0.05 to 0.06 above the reference under each; a run of another seed has no pair."""
    reference, other = (
        arm("a", *([rate] * 6 for rate in (0.1, 0.3, 0.5, 0.7))),
        arm("b", *([r] * 6 for r in (0.56, 0.15, 0.36))),
    )
    for logs, seeds in ((reference.logs, (0, 1, 2, 3)), (other.logs, (2, 0, 1))):
        for log, seed in zip(logs, seeds, strict=True):
            log.settings = {"actor": {"seed": seed}, "data": {"seed": seed}}
    apart, paired = (difference(reference, other, REWARD, paired=paired) for paired in (False, True))
    assert apart is not None and apart.verdict.startswith("no difference")
    assert paired is not None and paired.seeds == (3, 3)
    assert paired.last.value == pytest.approx((0.06 + 0.05 + 0.06) / 3)
    assert paired.means == pytest.approx((0.3, (0.56 + 0.15 + 0.36) / 3))
    assert paired.verdict == "higher, by more than the differences of equal seeds vary"
    assert paired.last.low is not None and paired.last.low > 0.04
    for log in other.logs:
        log.settings = None
    assert difference(reference, other, REWARD, paired=True) is None


def test_the_difference_is_taken_where_all_runs_still_are() -> None:
    short, long = arm("short", [0.0, 0.1, 0.2]), arm("long", [0.0, 0.2, 0.4, 0.6, 0.8])
    found = difference(short, long, REWARD, last=2)
    assert found is not None and found.place == 3
    assert found.at.value == pytest.approx(0.2) and found.last.value == pytest.approx(0.3 - 0.15)


def test_the_last_steps_of_a_metric_with_few_values_are_steps() -> None:
    """Evaluations every third step: the value before training must not bend the curve of one arm, nor its final value."""
    both = {3: 0.5, 6: 0.7, 9: 0.8, 12: 0.8}
    before, after = arm("before"), arm("after")
    before.logs, after.logs = [Log(Path("b"), "ours")], [Log(Path("a"), "ours")]
    before.logs[0].series, after.logs[0].series = {REWARD: {0: 0.1, **both}}, {REWARD: both}
    for log in (*before.logs, *after.logs):
        log.first_step = 1
    assert final_value(before.curve(REWARD), 5) == final_value(after.curve(REWARD), 5) == pytest.approx(0.8)
    assert before.curve(REWARD, 5)[6].mean == after.curve(REWARD, 5)[6].mean == pytest.approx(0.6)
    found = difference(before, after, REWARD, last=5)
    assert found is not None and (found.at.value, found.last.value) == (0.0, 0.0)


def test_comparison_table_has_a_row_per_metric_and_arm() -> None:
    heads, rows = RunComparison([arm("a", [0.1, 0.6]), arm("b", [0.3, 0.3])], REWARD_PANEL, levels=[0.3]).table
    assert [row[:4] for row in rows] == [[REWARD, "a", "1", "1-2"], [REWARD, "b", "1", "1-2"]]
    cells = dict(zip(heads, rows[1]))
    assert cells["difference"] == "-0.050" and cells["step of 0.3"] == "1"


def test_a_verl_log_without_resampling_is_set_against_the_pass_rate(tmp_path: Path) -> None:
    """Plain verl's reward is of all rollouts: as a reward after resampling it is not comparable, as a pass rate it is."""
    ours = read_log(write_run(tmp_path / "ours", [0.2, 0.4, 0.6]))
    plain, recipe = tmp_path / "plain.jsonl", tmp_path / "recipe.jsonl"
    for path, extra in ((plain, {}), (recipe, {"down_sampling/after_sampling_trace_num": 512})):
        rows = [
            {"step": s, "data": {"critic/rewards/mean": 0.1 * s, "response_length/mean": 9, "timing_s/step": 2, **extra}}
            for s in (1, 2, 3)
        ]
        path.write_text("\n".join(map(json.dumps, rows)))
    arms = group_runs([ours, read_log(plain), read_log(recipe)])
    assert arms[1].logs[0].series[PASS_RATE] == arms[1].logs[0].series[REWARD]
    assert LENGTH_ALL in arms[1].logs[0].series and PASS_RATE not in arms[2].logs[0].series
    assert "verl plain trains on every rollout" in (not_comparable(arms[0], arms[1], REWARD) or "")
    assert not_comparable(arms[0], arms[1], PASS_RATE) is None
    assert not_comparable(arms[0], arms[2], REWARD) is None
    assert not_comparable(arms[0], arms[2], "rollout/tool_error_ratio") is not None
    comparison = RunComparison(arms, [panel("reward"), panel("pass-rate")])
    (note,) = [line for line in comparison.conclusions if "NOT COMPARABLE" in line]
    figure = draw_comparison(comparison)
    assert note in " ".join(figure.texts[0].get_text().split())
    assert [axes.get_ylabel() for axes in figure.axes] == ["mean reward", "mean reward"]


def test_verl_dual_clip_and_rollout_correction_have_our_names(tmp_path: Path) -> None:
    path = tmp_path / "verl.log"
    path.write_text(
        "step:1 - actor/pg_clipfrac_lower:0.01 - rollout_corr/k3_kl:0.002 - rollout_corr/rollout_is_mean:1.5 "
        "- rollout_corr/rollout_is_max:3.0 - rollout_corr/rollout_is_ratio_fraction_high:0.1\n"
    )
    assert read_log(path).series == {
        "train/actor/dual_clip_fraction": {1: 0.01},
        "train/actor/rollout_kl": {1: 0.002},
        "train/actor/tis_ratio": {1: 1.5},
        "train/actor/tis_ratio_max": {1: 3.0},
        "train/actor/tis_clip_fraction": {1: 0.1},
    }


# -------------------------------------------------------------------------------------------- command line


def test_command_line_compares_with_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "ours-seed1", [0.1, 0.2, 0.3])
    two = write_run(tmp_path / "ours-seed2", [0.2, 0.3, 0.4])
    console = tmp_path / "verl.log"
    console.write_text(
        "".join(f"step:{s} - critic/rewards/mean:0.{s} - response_length/mean:90 - timing_s/step:3\n" for s in (1, 2))
    )
    out = tmp_path / "out"
    words = ["--arm", f"ours={one},{two}", "--verl", str(console), "--out", str(out)]
    assert main([*words, "--metrics", "pass-rate", "reward", "time"]) == 0
    captured = capsys.readouterr()
    assert "runs of unequal length (ours-seed1 3, ours-seed2 3, verl 2 steps)" in captured.err
    assert {p.name for p in out.iterdir()} == {"comparison.png", "comparison.html", "comparison.txt"}
    page = (out / "comparison.html").read_text()
    assert "data:image/svg+xml;base64," in page and "src='http" not in page
    text = (out / "comparison.txt").read_text()
    for expected in ("NOT COMPARABLE", "one run in an arm", "ours is ours-seed1, ours-seed2", "unequal length"):
        assert expected in text and expected in page
    assert (out / "comparison.png").stat().st_size > 10_000
    assert main([*words, "--strict"]) == 2


def test_wrong_words_are_errors_that_say_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2])
    many = [write_run(tmp_path / "many" / f"run{i}", [0.1]) for i in range(33)]
    for words, message in (
        ([str(tmp_path / "missing"), str(run)], "missing does not exist"),
        (["--arm", str(run)], "write NAME=PATH,PATH"),
        (["--arm", f"a={run}", "--arm", f"a={many[0]}"], "two --arm have one name"),
        (["--arm", f"a={run}", "--metrics", "entrpy"], "no log has entrpy; --metrics takes pass-rate, reward"),
        (["--arm", f"a={run}", "--x", "tokens"], "does not log what --x tokens needs"),
        ([str(tmp_path / "many")], "holds 33 runs, at most 32 can be read at once"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_points_that_are_no_numbers_and_empty_logs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": 1, REWARD: 0.1}, {"step": 2, REWARD: None}, {"step": 3, REWARD: 0.3}, {"step": 3, REWARD: 0.4}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = tmp_path / "verl.log"
    console.write_text("step:1 - critic/rewards/mean:nan\nstep:2 - critic/rewards/mean:np.float64(inf)\n")
    console.write_text(console.read_text() + "step:3 - critic/rewards/mean:0.5\n")
    (tmp_path / "empty.log").touch()
    words = [str(run), "--verl", str(console), str(tmp_path / "empty.log"), "--out", str(tmp_path / "out")]
    assert main(words) == 1  # for the log that gave nothing; the others are drawn
    assert (tmp_path / "out" / "comparison.png").is_file()
    capsys.readouterr()
    assert main([*words, "--strict"]) == 2
    errors = capsys.readouterr().err
    assert f"{run}: {REWARD} is NaN or infinite at 1 steps (2), marked x" in errors
    assert f"{console}: {REWARD} is NaN or infinite at 2 steps (1, 2)" in errors
    assert f"{run}: 1 steps are logged more than once (3); the last counts" in errors
    assert "empty.log: no training curves found" in errors
    arms = group_runs([*read_logs(run), *read_logs(console, verl=True)])
    axes = draw_comparison(RunComparison(arms, REWARD_PANEL)).axes[0]
    crosses = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[2.0], [1.0, 2.0]]


def test_conclusions_name_every_pair_once() -> None:
    arms = [arm("a", [0.1, 0.2]), arm("b", [0.3, 0.4]), arm("c", [0.5, 0.6])]
    lines = RunComparison(arms, [*REWARD_PANEL, panel("entropy")]).conclusions
    assert len(lines) == 2 and "b - a: +0.200 at step 2" in lines[0] and "c - a" in lines[1]
