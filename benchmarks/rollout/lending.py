"""`python -m benchmarks.rollout.lending`: an asynchronous run whose idle actor GPUs are lent to generation, in simulated time.

The rule is verl's (verl#7373): when the actor waits for a batch and the wait that engines on its GPUs would save is longer than
the switch there and back, its GPUs become engines until the batch is complete. There: the actor's state goes to the host, the
weights to the lent engines (closed forms of `settings/planning/estimates.py`), they resume in `--resume-s`, and take their part
of the trajectories under way. Back: their trajectories go on from their tokens, which are computed again, on the other engines;
then the state comes back.
One JSON line for each split and bound; the synchronous step and the splits without lending are those of
`benchmarks.rollout.asynchronous` with the same words.

In favour of lending: a lent engine has all memory of its GPUs, a running tool call costs no wait when its trajectory moves, and
no time passes for the release of memory.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.records import keep_rows
from benchmarks.rollout.asynchronous import (
    ALONE,
    KV_BYTES,
    NODE,
    Actor,
    AsyncSimulator,
    cluster_of,
    enough,
    measured,
    placement,
    scenario_of,
    splits,
)
from benchmarks.rollout.simulator import Cluster, Engine
from benchmarks.rollout.traces import STAGES, Shape, Trace
from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.model.model_config import ModelConfig


class LendingSimulator(AsyncSimulator):
    """`cluster` has all engines; the first `standing` have GPUs of their own."""

    def __init__(
        self,
        traces: list[Trace],
        cluster: Cluster,
        slice_size: int,
        actor: Actor,
        shape: Shape,
        bound: int,
        steps: int,
        *,
        standing: int,
        resume_s: float,
    ) -> None:
        super().__init__(traces, cluster, slice_size, actor, shape, bound, steps)
        self.standing, self.lent = self.engines[:standing], self.engines[standing:]
        self.there_s = actor.handover_s / 2 + actor.sync_s + resume_s
        self.back_s = actor.handover_s / 2
        self.lending = self._shared = False
        self.switches = self.moved = 0
        self._ready_at = 0.0  # of the lent engines
        self._groups_done = 0
        self._order = itertools.count()
        self._events = [(0.0, next(self._order), engine) for engine in self.standing]

    def ended(self, engine: int, trace: Trace, now: float) -> None:
        before = self.phase.num_open
        super().ended(engine, trace, now)
        self._groups_done += before - self.phase.num_open

    def simulate(self) -> None:
        while self._events and not self.over:
            now, _, engine = heapq.heappop(self._events)
            self._train(now)
            if engine in self.lent and not self.lending:
                continue
            wake = engine.step(now)
            if wake is not None:
                if engine.model.idle:
                    wake = min(wake, now + 0.1)
                heapq.heappush(self._events, (wake, next(self._order), engine))

    def _train(self, now: float) -> None:
        super()._train(now)
        if self.training_until is not None and self.lending:
            self._reclaim(now)
        elif self.lending and not self._shared and now >= self._ready_at:
            self._share()
        elif self.training_until is None and not self.lending and self._pays(now):
            self.lending, self._shared = True, False
            self.switches += 1
            self._ready_at = now + self.there_s
            for engine in self.lent:
                engine.next_report = self._ready_at + 1.0
                heapq.heappush(self._events, (self._ready_at, next(self._order), engine))

    def _pays(self, now: float) -> bool:
        missing = self.shape.problems - self.schedule.num_complete
        wait = missing * now / max(1, self._groups_done)
        return wait * len(self.lent) / len(self.engines) > self.there_s + self.back_s

    def _share(self) -> None:
        """The lent engines get their part of the trajectories under way, the shortest ones."""
        self._shared = True
        for engine in self.standing:
            acting = {key for _, key in engine.tools}
            movable = sorted(engine.lives.keys() - acting, key=lambda key: engine.lives[key].length)
            for key in movable[: len(engine.lives) * len(self.lent) // len(self.engines)]:
                self._move(key, engine, self.lent)

    def _reclaim(self, now: float) -> None:
        """The batch is there: training begins when the actor is back."""
        assert self.training_until is not None
        self.training_until += max(0.0, self._ready_at - now) + self.back_s
        self.lending = False
        for engine in self.lent:
            for key in list(engine.lives):
                self._move(key, engine, self.standing)
            engine.model.interrupt()  # its cache is gone
            engine.tools.clear()
            engine.answer_at = None

    def _move(self, key: int, source: Engine, targets: list[Engine]) -> None:
        self.moved += 1
        min(targets, key=lambda target: len(target.lives)).take_over(key, source.hand_over(key))


def lending(
    name: str, model: ModelConfig, shape: Shape, split: tuple[int, int], bound: int, options: argparse.Namespace
) -> dict[str, Any]:
    cluster = cluster_of(name, model, sum(split), options.tp, ALONE)
    steps = options.warm + options.steps
    simulator = LendingSimulator(
        enough(shape, steps, bound),
        cluster,
        options.slice_size,
        Actor(model, split[0]),
        shape,
        bound,
        steps,
        standing=split[1] // options.tp,
        resume_s=options.resume_s,
    )
    simulator.simulate()
    return {
        "engine_tp": options.tp,
        **measured(simulator, options.warm),
        "switch_s": round(simulator.there_s + simulator.back_s, 1),
        "switches": simulator.switches,
        "moved": simulator.moved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=KV_BYTES, default=list(KV_BYTES))
    parser.add_argument("--gpus", type=int, default=NODE, help="8, or whole nodes of 8")
    parser.add_argument("--tp", type=int, default=2, help="of an engine")
    parser.add_argument("--actors", nargs="+", type=int, help="GPUs of the actor, instead of every split that fits")
    parser.add_argument("--bounds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stage", choices=STAGES, default="8k", help="what trajectories do")
    parser.add_argument("--problems", type=int, default=128, help="of a step")
    parser.add_argument("--tool-median-s", type=float, default=Shape.tool_median_s, help="of a call")
    parser.add_argument("--resume-s", type=float, default=2.0, help="of a lent engine: memory and captured graphs")
    parser.add_argument("--warm", type=int, default=1, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--slice-size", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file that the rows are added to")
    options = parser.parse_args()
    shape = replace(STAGES[options.stage], problems=options.problems, tool_median_s=options.tool_median_s)
    for name in options.models:
        model = known_model(f"Qwen2.5-{name.upper()}")
        assert model is not None
        rows = []
        for split in splits(name, model, options.gpus, options.tp):
            if options.actors and split[0] not in options.actors:
                continue
            for bound in options.bounds:
                scenario = f"{scenario_of(name, shape, options)}, {placement(split)}, S = {bound}"
                rows.append({"scenario": scenario, **lending(name, model, shape, split, bound, options)})
                print(json.dumps(rows[-1]), flush=True)
        keep_rows(options.out, rows)


if __name__ == "__main__":
    main()
