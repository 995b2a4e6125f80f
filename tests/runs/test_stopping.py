"""Conditions that end a stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.report.corridor import METRICS, Corridor, read_corridor
from rstar2_megatron.report.corridor import main as make_corridor_file
from rstar2_megatron.report.names import PASS_RATE, panel
from rstar2_megatron.runs.stopping import MetricWatch, condition_problems, first_that_holds, span_means
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.schema import StopCondition

CLIP = "rollout/clip_ratio"


def rows(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": n, **({} if v is None else {CLIP: v})} for n, v in enumerate(values, 1)]


def held(values: list[float | None], **condition: Any) -> str:
    return first_that_holds([StopCondition(metric=CLIP, **condition)], rows(*values))


def test_so_many_values_in_a_row() -> None:
    assert not held([0.1, 0.12], at_least=0.1, times=3)
    assert not held([0.1, 0.05, 0.12, 0.12], at_least=0.1, times=3)
    assert held([0.0, 0.1, 0.12, 0.2], at_least=0.1, times=3) == ("rollout/clip_ratio >= 0.1 3 times (0.1, 0.12, 0.2)")
    assert held([0.5, 0.04], at_most=0.05) and not held([0.5, 0.06], at_most=0.05)
    assert held([0.1], at_least=0.08, at_most=0.12) and not held([0.2], at_least=0.08, at_most=0.12)


def test_steps_without_the_metric_are_no_values() -> None:
    """Evaluations come every few steps only."""
    assert held([None, 0.2, None, None, 0.3, None], at_least=0.1, times=2)
    assert not held([None, None], at_least=0.1)


def test_means_are_over_whole_spans_from_the_first_step() -> None:
    assert span_means(rows(0.0, 0.2, 0.1, 0.3, 0.9), CLIP, 2) == pytest.approx([0.1, 0.2])
    assert held([0.0, 0.2, 0.1, 0.3, 0.9], at_least=0.1, times=2, average_over=2)
    assert not held([0.0, 0.1, 0.3, 0.3, 0.9], at_least=0.1, times=2, average_over=2)
    assert span_means(rows(0.1, float("nan"), 0.3), CLIP, 1) == [0.1, 0.3]


def test_any_condition_will_do_and_none_never_holds() -> None:
    conditions = [StopCondition(metric="eval/average", at_least=0.5), StopCondition(metric=CLIP, at_least=0.1)]
    assert first_that_holds(conditions, rows(0.2)).startswith(CLIP)
    assert first_that_holds([], rows(0.2)) == ""
    with pytest.raises(ValidationError, match="at_least or at_most"):
        StopCondition(metric=CLIP)
    with pytest.raises(ValidationError, match=r"at_least=0\.5 is above at_most=0\.1"):
        StopCondition(metric=CLIP, at_least=0.5, at_most=0.1)


def test_bounds_may_be_factors_of_the_first_steps() -> None:
    values = [1.0, 1.0, 4.0, 6.0, 6.5]
    said = "rollout/clip_ratio over its mean of the first 3 steps >= 3.0 2 times (3, 3.25)"
    assert held(values, at_least=3.0, times=2, times_first=3) == said
    assert not held(values[:4], at_least=3.0, times=2, times_first=3)
    assert not held([0.0, 0.0, 5.0], at_least=3.0, times_first=2), "no factor of 0"
    assert not held([1.0, 5.0], at_least=1.0, times_first=3), "the first steps are not complete"


CALLS, VOID = "rollout/calls_per_trajectory", "rollout/void_turn_ratio"


def warned(calls: list[float], void: list[float], *words: str) -> list[tuple[int, str]]:
    """(step, metric) of each warning."""
    watch = MetricWatch(load_settings("rstar2-tiny-cpu", words))
    steps = [{"step": n, CALLS: c, VOID: v} for n, (c, v) in enumerate(zip(calls, void, strict=True), 1)]
    return [(n, line.split()[0]) for n, step in enumerate(steps, 1) for line in watch.lines(steps[: n - 1], step)]


def test_signs_of_a_collapse_are_told_once_each_time_that_they_begin() -> None:
    quiet = [0.0] * 14
    assert warned([1.0, 1.2, 0.8, 1.1, 0.9, *[1.5] * 9], quiet) == []
    assert warned([1.0] * 5 + [4.0] * 5 + [1.0] + [4.0] * 3, quiet) == [(8, CALLS), (14, CALLS)]
    assert warned([1.0] * 5 + [0.05] * 9, quiet) == [(8, CALLS)]
    assert warned([1.0] * 14, [0.1] * 4 + [0.4] * 10) == [(7, VOID)]
    assert warned([1.0] * 14, [0.4] * 14, "reward.function=environment") == [], "another answer than a box"
    assert warned([1.0] * 5 + [4.0] * 9, quiet, "runner.warn_when=[]") == []
    own = f"runner.warn_when=[{{metric: {CALLS}, at_least: 2, times: 2}}]"
    assert warned([1.0] * 5 + [4.0] * 9, quiet, own) == [(7, CALLS)]


def test_a_condition_on_no_metric_is_refused_with_the_nearest() -> None:
    settings = load_settings("rstar2-tiny-cpu", ["runner.stop_when=[{metric: rollout/clip_ratios, at_least: 0.5}]"])
    (problem,) = condition_problems(settings)
    assert problem.startswith(
        "runner.stop_when: no run has a metric 'rollout/clip_ratios'; the nearest are rollout/clip_ratio,"
    )
    assert not list(condition_problems(load_settings("rstar2-tiny-cpu", ["runner.warn_when=[]"])))


def seeds(directory: Path, *rates: float) -> list[str]:
    """Runs of 8 steps with these pass rates, as seeds of one configuration."""
    for seed, rate in enumerate(rates):
        (directory / f"s{seed}").mkdir()
        write_jsonl(directory / f"s{seed}" / "metrics.jsonl", [{"step": n, PASS_RATE: rate} for n in range(1, 9)])
        config = {"actor": {"seed": seed}, "runner": {"experiment_name": f"s{seed}"}}
        (directory / f"s{seed}" / "config.yaml").write_text(yaml.safe_dump(config))
    return [str(directory / f"s{seed}") for seed in range(len(rates))]


def test_a_corridor_of_earlier_seeds_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three seeds at 0.4, 0.5, 0.6: deviation 0.1, and two of them times sqrt(4 / 3) are 0.231."""
    file = tmp_path / "corridor.json"
    runs = seeds(tmp_path, 0.4, 0.5, 0.6)
    assert make_corridor_file([*runs, "--out", str(file), "--metrics", "pass-rate", "--width", "2"]) == 0
    assert read_corridor(file).metrics[PASS_RATE][1] == pytest.approx((0.5 - 0.2309401, 0.5 + 0.2309401))
    words = [f"runner.corridor={file}", "runner.warn_when=[]"]
    settings = load_settings("rstar2-tiny-cpu", words)
    assert list(condition_problems(settings)) == []
    watch, steps, told = MetricWatch(settings), [], {}
    for n, rate in enumerate([0.5, 0.5, 0.0, 0.0, 0.0, 0.9, 0.9, 0.9, 0.0], 1):
        row = {"step": float(n), PASS_RATE: rate}
        if lines := watch.lines(steps, row):
            told[n] = lines
        steps.append(row)
    means = [0.5, 0.5, 1 / 3, 0.25, 0.2, 0.28, 0.36, 0.54]  # of the last 5 steps; the ninth has no band
    assert [row["rollout/outside_corridor"] for row in steps] == [float(mean < 0.269) for mean in means] + [0]
    said = "is 0.25 at step 4 (mean of 4 steps), outside of 0.2691 to 0.7309 by 3 earlier seeds"
    assert told == {4: [f"{PASS_RATE} {said}"]}, "told when it leaves, not while it stays outside"
    assert make_corridor_file([*runs[:2], "--out", str(file)]) == 2
    assert "2 runs tell no spread of seeds" in capsys.readouterr().err
    assert make_corridor_file([*runs, "--out", str(file), "--metrics", "turns"]) == 2
    assert "not every run has rollout/num_turns" in capsys.readouterr().err
    (tmp_path / "s1" / "config.yaml").write_text("actor: {lr: 1}")
    assert make_corridor_file([*runs, "--out", str(file)]) == 2
    assert "are no seeds of one saved configuration" in capsys.readouterr().err


def test_steps_without_calls_are_in_no_band_of_errors(tmp_path: Path) -> None:
    errors, file = "rollout/tool_error_ratio", tmp_path / "corridor.json"
    others = {name: 0.5 for word in METRICS if (name := panel(word).metric) != errors}

    def band(*calls: int) -> Corridor:
        (directory := tmp_path / str(sum(calls))).mkdir()
        runs = seeds(directory, 0.4, 0.5, 0.6)
        for n, run in enumerate(runs):
            rows = [
                {"step": s, **others, "rollout/num_turns": n, **({errors: 0.3 + n / 10} if c else {}), "rollout/tool_calls": c}
                for s, c in enumerate(calls, 1)
            ]
            write_jsonl(Path(run) / "metrics.jsonl", rows)
        assert make_corridor_file([*runs, "--out", str(file)]) == 0
        return read_corridor(file)

    assert errors not in band(0, 0).metrics  # of runs without tools
    corridor = band(4, 0, 4)
    assert corridor.metrics[errors].keys() == {1, 3}
    assert corridor.metrics[errors][3][0] == pytest.approx(0.4 - 4 * 0.1154701, rel=1e-5)
    later = [{"step": s, **({} if s == 2 else {errors: 0.9})} for s in (1, 2, 3)]
    assert [text for _, text in corridor.outside(later)] == [
        f"{errors} is 0.9 at step 3 (mean of 2 steps), outside of -0.06188 to 0.8619 by 3 earlier seeds"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "runner.corridor: .*c.json: No such file or directory; make it by python -m"),
        ("{}", "runner.corridor: .*c.json: runs Field required"),
        ('{"runs": [], "metrics": {"rollout/pass": {"1": [0, 1]}}}', "runner.corridor: no run has a metric 'rollout/pass'"),
    ],
)
def test_a_corridor_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "c.json").write_text(content)
    (problem,) = condition_problems(load_settings("rstar2-tiny-cpu", [f"runner.corridor={tmp_path / 'c.json'}"]))
    assert re.match(message, problem)
