"""The bottleneck of a traced step: shares of its time, and one sentence. Pure: works on the events of `records.trace`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rstar2_megatron.records.step_shares import step_shares
from rstar2_megatron.records.trace import CHECKPOINT, DRIVER, GRADING, SYNC, TOOLS, Event, actor_of, engine_of

GRADING_WAIT = "grading after the last token"
_DRIVER_PIDS = (DRIVER.pid, SYNC.pid, CHECKPOINT.pid)


@dataclass(frozen=True, slots=True)
class Span:
    """One span; `start` and `end` in seconds since the start of the step."""

    pid: int
    lane: int
    name: str
    start: float
    end: float
    complete: bool = True
    """False: its end was not written, because the run was killed."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Timeline:
    """The spans and counters of one step."""

    spans: list[Span]
    """By start."""
    tasks: list[Span] = field(default_factory=list)
    """Trajectories on their engines, by start."""
    rows: dict[int, str] = field(default_factory=dict)
    """Names by pid."""
    counters: dict[tuple[int, str], list[tuple[float, float]]] = field(default_factory=dict)
    """(seconds, value) of each counter, by pid and name, e.g. `KV tokens used`."""

    @property
    def end(self) -> float:
        return max((span.end for span in (*self.spans, *self.tasks)), default=0.0)

    def of(self, pid: int) -> list[Span]:
        return [span for span in self.spans if span.pid == pid]


def timeline(events: Sequence[Event]) -> Timeline:
    """Spans, trajectories and counters of the events. A span without an end lasts to the last event."""
    found = Timeline([])
    found.rows = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    timed = sorted((e for e in events if e["ph"] in "XBEC"), key=lambda event: event["ts"])
    last = max((e["ts"] + e.get("dur", 0) for e in timed), default=0) / 1e6
    open_tasks: dict[tuple[int, int], Event] = {}
    for event in timed:
        pid, lane, at = event["pid"], event.get("tid", 0), event["ts"] / 1e6
        if event["ph"] == "X":
            found.spans.append(Span(pid, lane, event["name"], at, at + event["dur"] / 1e6))
        elif event["ph"] == "B":
            open_tasks[pid, lane] = event
        elif event["ph"] == "E":
            begun = open_tasks.pop((pid, lane), None)
            if begun is not None:
                found.tasks.append(Span(pid, lane, begun["name"], begun["ts"] / 1e6, at))
        else:
            for name, value in event["args"].items():
                found.counters.setdefault((pid, f"{event['name']} {name}"), []).append((at, float(value)))
    for (pid, lane), begun in open_tasks.items():
        found.tasks.append(Span(pid, lane, begun["name"], begun["ts"] / 1e6, last, complete=False))
    found.tasks.sort(key=lambda span: span.start)
    return found


def shares_of(step: Timeline) -> dict[str, float]:
    """Shares of the step as its metrics have them (`share/...`); empty when the driver wrote none of its parts."""
    seconds: dict[str, float] = defaultdict(float)
    for span in step.spans:
        if span.pid in _DRIVER_PIDS:
            name = "step" if span.pid == DRIVER.pid and span.name.startswith("step ") else span.name
            seconds[name] += span.seconds
    if not seconds:
        return {}
    seconds.setdefault("step", step.end)  # killed before its end
    return step_shares(seconds, seconds["tail"], seconds[GRADING_WAIT])


def bound_sentence(step: Timeline) -> str:
    """One sentence that names the largest share of the step and its place."""
    shares = shares_of(step)
    if not shares:
        running = sum(not span.complete for span in step.tasks)
        left = _count(running, "trajectory was", "trajectories were")
        return f"the step did not end: {left} running when the trace stops"
    name = max(shares, key=lambda part: shares[part])
    share = f"{100 * shares[name]:.0f}% of the step"
    slowest = max((span.seconds for span in step.of(GRADING.pid)), default=0.0)
    return {
        "rollout": f"rollout: {share}, {_rollout_text(step)}",
        "tail": f"rollout tail: {share} on {_tail_text(step)}",
        "grading": f"grading: {share} after the last token, the slowest message took {slowest:.1f} s",
        "training": f"training: {share} on {_actors_text(step, 'train_step')}",
        "sync": f"weight sync: {share}, {_actors_text(step, 'send_weights')} sent",
        "checkpoint": f"checkpoint: {share} to copy it and to wait for the files of the one before",
        "other": f"the driver's own work: {share}",
    }[name]


def tail_tasks(step: Timeline) -> list[Span]:
    """The trajectories that the last quarter of the tail waited for."""
    tails = [span for span in step.of(DRIVER.pid) if span.name == "tail"]
    if not tails:
        return []
    waits = [span for span in step.of(DRIVER.pid) if span.name == GRADING_WAIT]
    end = min([tails[-1].end, *(span.start for span in waits)])
    last_quarter = end - (end - tails[-1].start) / 4
    return [task for task in step.tasks if task.end > last_quarter and task.start < end]


def _tail_text(step: Timeline) -> str:
    tasks = tail_tasks(step)
    engines = sorted({task.pid for task in tasks})
    where = f"engine {engine_of(engines[0])}" if len(engines) == 1 else f"{len(engines)} engines"
    return f"{_count(len(tasks), 'trajectory', 'trajectories')} of {where}"


def _rollout_text(step: Timeline) -> str:
    """Time of the trajectories by activity, and the use of the KV caches."""
    total = sum(task.seconds for task in step.tasks)
    if not total:
        return "of saved trajectories"
    generating = sum(s.seconds for s in step.spans if s.name == "generate" and engine_of(s.pid) is not None)
    tools = sum(span.seconds for span in step.of(TOOLS.pid))
    text = f"{_percent(generating / total)} of it generating and {_percent(tools / total)} in tool calls"
    uses = [kv_use(step, pid) for pid in {task.pid for task in step.tasks}]
    known = [use for use in uses if not math.isnan(use)]
    return text + (f", KV cache {_percent(sum(known) / len(known))} full" if known else "")


def kv_use(step: Timeline, pid: int) -> float:
    """Mean share of an engine's KV cache in use while it had trajectories; NaN without reports."""
    used, capacity = (step.counters.get((pid, f"KV tokens {name}"), []) for name in ("used", "capacity"))
    pairs = [(u, c) for (_, u), (_, c) in zip(used, capacity) if c and u]
    return sum(u / c for u, c in pairs) / len(pairs) if pairs else math.nan


def _actors_text(step: Timeline, method: str) -> str:
    by_rank: dict[int, float] = defaultdict(float)
    for span in step.spans:
        rank = actor_of(span.pid)
        if rank is not None and span.name == method:
            by_rank[rank] += span.seconds
    if not by_rank:
        return "the actor"
    text = _count(len(by_rank), "actor rank", "actor ranks")
    slowest, quickest = max(by_rank, key=lambda r: by_rank[r]), min(by_rank.values())
    if by_rank[slowest] > 1.1 * quickest:
        text += f" (rank {slowest} took {by_rank[slowest]:.1f} s, the quickest {quickest:.1f} s)"
    return text


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _percent(share: float) -> str:
    return f"{100 * min(share, 1.0):.0f}%"


def busiest(spans: Sequence[Span], end: float, bins: int) -> list[float]:
    """How many of `spans` run on average in each of `bins` equal parts of [0, end)."""
    width = end / bins
    sums = [0.0] * bins
    for span in spans:
        for i in range(max(0, int(span.start / width)), min(bins, int(span.end / width) + 1)):
            low = i * width
            sums[i] += max(0.0, min(span.end, low + width) - max(span.start, low))
    return [total / width for total in sums]
