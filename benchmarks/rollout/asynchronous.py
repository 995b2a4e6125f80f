"""`python -m benchmarks.rollout.asynchronous`: seconds of a step with `algorithm.max_staleness`, in simulated time.

The simulator of `benchmarks.rollout.scheduler`, whose engines go on from step to step under the production schedule
(`StalenessSchedule`), and a trainer in time: `TRAIN_SHARE` of an H100's FLOP/s over the kept trajectories of a batch. GPUs of
80 GB (`--gpus`) are split between actor and engines; every split that fits is tried, of whole nodes where there are several.
The baseline is the synchronous step with actor and engines on all GPUs in turn, with engines of each TP of `--tp`; the splits
have the TP of the best baseline. No group is rejected. One JSON line a case.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.records import keep_rows
from benchmarks.rollout.simulator import Cluster, Simulator, make_budgets
from benchmarks.rollout.traces import STAGES, Shape, Trace, synthetic
from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.rollout.phase import OpenGroup, RolloutPhase
from rstar2_megatron.rollout.scheduling.staleness import StalenessSchedule
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.planning.estimates import PEAK_FLOPS, TRAIN_SHARE, EngineSpeed, handover_s, sync_s
from rstar2_megatron.settings.planning.memory import training_memory
from rstar2_megatron.trajectory import Problem

NODE, GPU_BYTES = 8, 80e9
KV_BYTES = {"7b": 56 * 1024, "14b": 160 * 1024}
SHARED, ALONE = 0.8, 0.85  # of a GPU's memory for an engine: beside a sleeping actor as in the YAMLs, and alone
_IDLE_LOOK_S = 0.1


@dataclass(frozen=True)
class Actor:
    """Times of the trainer on some GPUs."""

    model: ModelConfig
    gpus: int
    kept_share: float = 0.5  # resample-on-correct keeps 16 of 32

    def train_s(self, traces: Sequence[Trace]) -> float:
        lengths = [t.prompt_tokens + sum(turn.generated_tokens + turn.tool_tokens for turn in t.turns) for t in traces]
        return self.kept_share * self.model.train_flops(lengths) / (self.gpus * PEAK_FLOPS * TRAIN_SHARE)

    @property
    def sync_s(self) -> float:
        """From actor to engines."""
        return sync_s(self.model)

    @property
    def handover_s(self) -> float:
        """The actor's state to the host and back, where engines take its GPUs."""
        return handover_s(self.model, self.gpus)


class AsyncSimulator(Simulator):
    """Engines that go on while a trainer takes batches, for `steps` steps."""

    def __init__(
        self, traces: Sequence[Trace], cluster: Cluster, slice_size: int, actor: Actor, shape: Shape, bound: int, steps: int
    ) -> None:
        super().__init__([], cluster, "kv_adaptive", slice_size)
        self.traces = {(t.group, t.index): t for t in traces}
        self.actor, self.shape, self.steps = actor, shape, steps
        queue = WorkQueue("kv_adaptive", cluster.engines, slice_size, endless=True)
        self.phase = RolloutPhase(queue, shape.group_size)
        self.schedule = StalenessSchedule(shape.problems, bound)
        self.begun: dict[int, int] = {}
        self.training_until: float | None = None
        self.trained_at: list[float] = []
        self.trainer_busy_s = 0.0
        self.ages: list[int] = []
        self.busy_at: list[float] = []  # seconds that engines were busy, at the end of each step
        take = self.phase.take

        def taken(engine: int, room: int, now: float) -> Any:
            slices = take(engine, room, now)
            for one in slices:
                self.schedule.begin(one.group)
                self.begun.setdefault(one.group, self.schedule.engine_version)
            return slices

        self.phase.take = taken  # type: ignore[method-assign]

    @property
    def over(self) -> bool:
        return len(self.trained_at) == self.steps

    def ended(self, engine: int, trace: Trace, now: float) -> None:
        before = self.phase.num_open
        super().ended(engine, trace, now)
        if self.phase.num_open < before:
            self.phase.forget(trace.group)
            self.schedule.complete(trace.group, self.begun[trace.group])

    def simulate(self) -> None:
        order = itertools.count()
        events = [(0.0, next(order), engine) for engine in self.engines]
        while events and not self.over:
            now, _, engine = heapq.heappop(events)
            self._train(now)
            wake = engine.step(now)
            if wake is not None:
                if engine.model.idle:
                    wake = min(wake, now + _IDLE_LOOK_S)
                heapq.heappush(events, (wake, next(order), engine))

    def _train(self, now: float) -> None:
        if self.training_until is not None and now >= self.training_until:
            self.training_until = None
            for engine in self.engines:
                engine.new_weights(now + self.actor.sync_s)
            self.schedule.new_weights(self.schedule.next_version)
            self.trained_at.append(now + self.actor.sync_s)
            self.busy_at.append(sum(e.model.counters.busy_s for e in self.engines))
        if self.training_until is None and not self.over:
            version = self.schedule.next_version
            if (taken := self.schedule.take()) is not None:
                batch = [self.traces[group, i] for group in taken for i in range(self.shape.group_size)]
                seconds = self.actor.train_s(batch)
                self.trainer_busy_s += seconds
                self.training_until = now + seconds
                self.ages += [version - self.begun[group] for group in taken]
        problems = [OpenGroup(Problem("", [], []), self.shape.group_size) for _ in range(self.schedule.room)]
        for number in self.phase.add(problems) if problems else ():
            self.schedule.add(number)


def cluster_of(name: str, model: ModelConfig, gpus: int, tp: int, share: float) -> Cluster:
    kv_tokens = int((GPU_BYTES * share * tp - 2 * model.num_parameters) / KV_BYTES[name])
    speed = EngineSpeed.of_gpu(model.num_parameters, KV_BYTES[name], tp)
    return Cluster(gpus // tp, speed, kv_tokens, 2048)


def fits(name: str, model: ModelConfig, gpus: int) -> bool:
    """Whether the actor fits these GPUs without going to the host, by the plan of the shipped YAML."""
    off = [f"actor.offload_{part}=False" for part in ("weight", "grad", "optimizer")]
    recompute = [
        "actor.model.recompute_granularity=full",
        "actor.model.recompute_method=uniform",
        "actor.model.recompute_num_layers=1",
    ]
    settings = load_settings(f"rstar2-qwen2.5-{name}-megatron", [*off, *recompute])
    tp = settings.actor.model.tensor_model_parallel_size
    return gpus % tp == 0 and training_memory(settings, model, gpus, cpu=False).total * 1e9 <= GPU_BYTES


def collocated(name: str, model: ModelConfig, shape: Shape, slice_size: int, gpus: int, tp: int) -> dict[str, Any]:
    cluster = cluster_of(name, model, gpus, tp, SHARED)
    actor = Actor(model, gpus)
    budgets = make_budgets(cluster, "kv_adaptive")
    Simulator(synthetic(shape, 1), cluster, "kv_adaptive", slice_size, budgets).run()
    traces = synthetic(shape, 0)
    result = Simulator(traces, cluster, "kv_adaptive", slice_size, budgets).run()
    train, other = actor.train_s(traces), actor.handover_s + actor.sync_s
    step = result.makespan_s + train + other
    return {
        "placement": f"collocated on {gpus}",
        "engine_tp": tp,
        "max_staleness": 0,
        "step_s": round(step, 1),
        "rollout_s": round(result.makespan_s, 1),
        "train_s": round(train, 1),
        "handover_and_sync_s": round(other, 1),
        "engines_idle": round(1 - result.makespan_s * (1 - result.idle_share) / step, 3),
    }


def apart(
    name: str,
    model: ModelConfig,
    shape: Shape,
    slice_size: int,
    split: tuple[int, int],
    tp: int,
    bound: int,
    warm: int,
    steps: int,
) -> dict[str, Any]:
    """A row of `split`: the GPUs of the actor and those of the engines."""
    cluster = cluster_of(name, model, split[1], tp, ALONE)
    actor = Actor(model, split[0])
    simulator = AsyncSimulator(enough(shape, warm + steps, bound), cluster, slice_size, actor, shape, bound, warm + steps)
    simulator.simulate()
    return {"placement": placement(split), "engine_tp": tp, "max_staleness": bound, **measured(simulator, warm)}


def enough(shape: Shape, steps: int, bound: int) -> list[Trace]:
    """Of `steps` steps; engines go on to begin groups that the last one does not train on."""
    return synthetic(replace(shape, problems=shape.problems * (steps + bound + 1)), 0)


def measured(simulator: AsyncSimulator, warm: int) -> dict[str, Any]:
    """Of the steps after the first `warm`, whose times are not counted."""
    steps = simulator.steps - warm
    seconds = simulator.trained_at[-1] - simulator.trained_at[warm - 1]
    busy = simulator.busy_at[-1] - simulator.busy_at[warm - 1]
    ages = simulator.ages[warm * simulator.shape.problems :]
    train = simulator.trainer_busy_s / simulator.steps
    return {
        "step_s": round(seconds / steps, 1),
        "train_s": round(train, 1),
        "trainer_idle": round(1 - train * steps / seconds, 3),
        "engines_idle": round(1 - busy / (seconds * len(simulator.engines)), 3),
        "group_staleness_mean": round(sum(ages) / len(ages), 2),
    }


def placement(split: tuple[int, int]) -> str:
    return f"actor {split[0]}, engines {split[1]}"


def splits(name: str, model: ModelConfig, gpus: int, tp: int) -> list[tuple[int, int]]:
    """GPUs of actor and engines, where the actor fits; whole nodes where there are several."""
    unit = tp if gpus <= NODE else NODE
    return [(actor, gpus - actor) for actor in range(unit, gpus, unit) if fits(name, model, actor)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=KV_BYTES, default=list(KV_BYTES))
    parser.add_argument("--gpus", type=int, default=NODE, help="8, or whole nodes of 8")
    parser.add_argument("--tp", nargs="+", type=int, default=[2], help="of an engine, to choose from")
    parser.add_argument("--actors", nargs="+", type=int, help="GPUs of the actor, instead of every split that fits")
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--stage", choices=STAGES, default="8k", help="what trajectories do")
    parser.add_argument("--problems", type=int, default=128, help="of a step")
    parser.add_argument("--tool-median-s", type=float, default=Shape.tool_median_s, help="of a call")
    parser.add_argument("--warm", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--slice-size", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file that the rows are added to")
    options = parser.parse_args()
    if options.gpus > NODE and options.gpus % NODE:
        parser.error(f"--gpus {options.gpus}: give whole nodes of {NODE}")
    shape = replace(STAGES[options.stage], problems=options.problems, tool_median_s=options.tool_median_s)
    for name in options.models:
        keep_rows(options.out, rows_of(name, shape, options))


def scenario_of(name: str, shape: Shape, options: argparse.Namespace) -> str:
    where = "" if options.gpus == NODE else f", {options.gpus} GPUs"
    tools = "" if shape.tool_median_s == Shape.tool_median_s else f", calls of {shape.tool_median_s:g} s"
    return f"{name}, {shape.problems} x {shape.group_size}, {options.stage.replace('k', 'K')}{tools}{where}"


def rows_of(name: str, shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The baselines of one model, then every split with every bound; each is printed when it is there."""
    model = known_model(f"Qwen2.5-{name.upper()}")
    assert model is not None
    scenario = {"scenario": scenario_of(name, shape, options)}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps({**scenario, **row}), flush=True)
        rows.append({**scenario, **row})
        return row

    bases = [keep(collocated(name, model, shape, options.slice_size, options.gpus, tp)) for tp in options.tp]
    base = min(bases, key=lambda row: row["step_s"])
    for split in splits(name, model, options.gpus, base["engine_tp"]):
        if options.actors and split[0] not in options.actors:
            continue
        alone = Actor(model, split[0]).train_s(synthetic(shape, 0))
        if alone > base["step_s"]:
            keep(
                {
                    "placement": placement(split),
                    "train_s": round(alone, 1),
                    "not_simulated": "training alone takes longer than the collocated step",
                }
            )
            continue
        for bound in options.bounds:
            row = apart(name, model, shape, options.slice_size, split, base["engine_tp"], bound, options.warm, options.steps)
            row["step_against_collocated"] = round(row["step_s"] / base["step_s"] - 1, 3)
            keep(row)
    return rows


if __name__ == "__main__":
    main()
