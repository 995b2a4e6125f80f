"""`python -m rstar2_megatron.report.timeline RUN`: draws a traced step, and says in one sentence what bounds it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.trace import CHECKPOINT, DRIVER, GRADING, SYNC, TOOLS, actor_of, engine_of, read_trace, trace_path
from rstar2_megatron.records.whole_file import replacement
from rstar2_megatron.report.step_bound import GRADING_WAIT, Span, Timeline, bound_sentence, busiest, shares_of, timeline

_COLOURS = {
    "rollout": "#4c78a8",
    "tail": "#e45756",
    GRADING_WAIT: "#b279a2",
    "training": "#54a24b",
    "train_step": "#54a24b",
    "compute_logprobs": "#88d27a",
    "generate": "#4c78a8",
    "sync_weights": "#f58518",
    "send_weights": "#f58518",
    "receive_weights": "#f58518",
    "save": "#9d755d",
    "checkpoint": "#9d755d",
    "save_checkpoint": "#9d755d",
    "grade": "#b279a2",
}
_OTHER, _TASK, _TOOL = "#bab0ac", "#dce6f0", "#eeca3b"
_BINS = 400
_LETTER = 0.006  # width of a letter over that of the picture


def newest_trace(run: Path) -> Path:
    """The trace of the last traced step. Raises ValueError when the run has none."""
    traces = sorted((run / "traces").glob("step_*.json"), key=lambda path: int(path.stem.split("_")[1]))
    if not traces:
        raise ValueError(f"{run / 'traces'} holds no trace; train with runner.trace=N")
    return traces[-1]


def draw(step: Timeline, title: str, target: Path) -> None:
    """Write the picture as PNG or SVG, by the name of `target`. One panel a row, below it the curves of an engine."""
    # Here: matplotlib takes a second, which the sentence alone does not need.
    from matplotlib.figure import Figure

    pids = [pid for pid in _order(step) if step.of(pid) or any(task.pid == pid for task in step.tasks)]
    heights = [4.0 if engine_of(pid) is not None else 1.2 if pid == TOOLS.pid else 0.7 for pid in pids]
    figure = Figure(figsize=(13, 1.0 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(pids), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, pid in zip(panels, pids):
        _draw_row(axes, step, pid)
        axes.set_ylabel(step.rows.get(pid, str(pid)), rotation=0, ha="right", va="center", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlim(0, step.end)
    panels[-1].set_xlabel("seconds since the start of the step", fontsize=8)
    figure.suptitle(title, fontsize=10)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacement(target) as partial:
        figure.savefig(partial, dpi=110, format=target.suffix.lstrip("."))


def _order(step: Timeline) -> list[int]:
    """Driver first, then what works during the rollout, then the actor, sync and checkpoint."""
    pids = {span.pid for span in (*step.spans, *step.tasks)}
    engines = sorted(pid for pid in pids if engine_of(pid) is not None)
    actors = sorted(pid for pid in pids if actor_of(pid) is not None)
    fixed = [DRIVER.pid, *engines, TOOLS.pid, GRADING.pid, *actors, SYNC.pid, CHECKPOINT.pid]
    return [pid for pid in fixed if pid in pids]


def _draw_row(axes: Any, step: Timeline, pid: int) -> None:
    spans = step.of(pid)
    if pid in (TOOLS.pid, GRADING.pid):
        counts, starts = busiest(spans, step.end, _BINS), [i * step.end / _BINS for i in range(_BINS)]
        axes.fill_between(starts, counts, step="post", color=_TOOL if pid == TOOLS.pid else _COLOURS["grade"])
        axes.set_ylim(bottom=0)
    elif engine_of(pid) is not None:
        _draw_engine(axes, step, pid)
    else:
        shown = [span for span in spans if not span.name.startswith("step ")]
        longest_first = sorted(shown, key=lambda span: -span.seconds)  # a part is drawn over the whole
        _bars(axes, [(span, 0.0, _COLOURS.get(span.name, _OTHER)) for span in longest_first], 1.0)
        for span in shown:
            if span.seconds > _LETTER * len(span.name) * step.end:
                axes.text(span.start + _LETTER * step.end, 0.5, span.name, fontsize=7, va="center")
        axes.set_yticks([])
        axes.set_ylim(0, 1)


def _draw_engine(axes: Any, step: Timeline, pid: int) -> None:
    """A line a lane: trajectories pale, what they generate dark; the KV cache in use as a curve over it."""
    tasks = [task for task in step.tasks if task.pid == pid]
    spans = step.of(pid)
    _bars(axes, [(task, task.lane, _TASK) for task in tasks], 0.9)
    _bars(axes, [(span, span.lane, _COLOURS.get(span.name, _OTHER)) for span in spans], 0.9)
    axes.set_ylim(max((span.lane for span in (*tasks, *spans)), default=0) + 1, 0)
    used = step.counters.get((pid, "KV tokens used"), [])
    capacity = max((value for _, value in step.counters.get((pid, "KV tokens capacity"), [])), default=0.0)
    if used and capacity:
        right = axes.twinx()
        right.plot([at for at, _ in used], [100 * value / capacity for _, value in used], "k", linewidth=1)
        right.set_ylim(0, 100)
        right.set_ylabel("KV %", fontsize=7)
        right.tick_params(labelsize=7)


def _bars(axes: Any, bars: Sequence[tuple[Span, float, str]], height: float) -> None:
    from matplotlib.collections import PolyCollection  # here, as in `draw`

    if bars:
        boxes = [[(s.start, low), (s.end, low), (s.end, low + height), (s.start, low + height)] for s, low, _ in bars]
        colours = [colour for _, _, colour in bars]
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rstar2_megatron.report.timeline", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run with traces/, or a trace file")
    parser.add_argument("--step", type=int, help="the traced step (default: the last one)")
    parser.add_argument("--out", type=Path, help="PNG or SVG to write (default: beside the trace, .png)")
    arguments = parser.parse_args(argv)
    run: Path = arguments.run
    try:
        if not run.exists():
            raise ValueError(f"{run} is not there; give the directory of a run that was trained with runner.trace=N")
        path = run
        if run.is_dir():
            path = newest_trace(run) if arguments.step is None else trace_path(run, arguments.step)
        target: Path = arguments.out or path.with_suffix(".png")
        if target.suffix not in (".png", ".svg"):
            raise ValueError(f"--out {target} must end in .png or .svg")
        step = timeline(read_trace(path))
        draw(step, f"{path.stem.replace('_', ' ')}: {bound_sentence(step)}", target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError | PermissionError) else 1
    print(bound_sentence(step))
    print("  ".join(f"{name} {100 * share:.0f}%" for name, share in shares_of(step).items()))
    print(f"picture: {target}   in the browser: open {path} in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
