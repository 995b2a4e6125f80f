"""`python -m benchmarks.growth`: what grows into a step's way from 8 to 512 GPUs, in JSON lines.

A step of rollout and training is by the plan's closed forms (H100s that nobody has measured). Beside it stands what this
project's own processes need, each part by a cost measured for one trajectory or call (`costs`). The hand-out of work is
run: the driver's own queue, with the engines' answers as events. What runs beside the rollout counts as its seconds over the
rollout's; what stands between rollout and training is added to the step. `first` is the largest part above 10%.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.records import keep_rows
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.placement import Slots
from rstar2_megatron.settings.planning.batch import TOKEN_BYTES, trained_trajectories
from rstar2_megatron.settings.planning.estimates import LINK_BYTES_PER_S, MEAN_LENGTH, engines_of, handover_s, sync_s, train_s
from rstar2_megatron.settings.planning.plan import make_plan, model_of
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory

RESULTS = Path(__file__).parent / "results"
CASES = {"7b": "rstar2-qwen2.5-7b-megatron", "14b": "rstar2-qwen2.5-14b-megatron", "32b": "rstar2-qwen2.5-32b-megatron-2nodes"}
CALLS = 2.8  # of a trajectory with 3.8 turns, as in benchmarks.paper_step
JUDGE_CORES = 32  # of a node's hundred and more
ACTOR_CALL_S = 1e-3  # of the driver, for each rank and worker; assumed
ACTOR_CALLS = 6  # a step: hand-over twice, training, weights, phase begin and end
SHARE = 0.1


def costs() -> dict[str, float]:
    """Seconds of one trajectory or call, from the results of the benchmarks that are named."""
    rows = json.loads((RESULTS / "paper_step.json").read_text())
    (step,) = [row for row in rows if row["case"] == "512 x 32, mean 5000"]
    calls = json.loads((RESULTS / "judge_cpu.json").read_text())["lines"]
    judge = max(line["cpu_ms_per_call"] for line in calls if line["case"] == "sympy")
    return {
        "driver": step["cpu_s_by_part"]["rollout"]["driver"] / step["trajectories"],
        "channel": step["cpu_s_by_part"]["rollout"]["channel"] / step["trajectories"],
        "resample and batch": (step["wall_s"]["resample"] + step["wall_s"]["batch"]) / step["trajectories"],
        "judge": judge / 1e3,
    }


def hand_out_s(problems: int, group: int, engines: int, running: int) -> float:
    """CPU seconds of the driver's queue in a phase; a trajectory takes a time of its problem's and of its own."""
    rng = random.Random(0)
    phase = RolloutPhase(WorkQueue("kv_adaptive", engines, 8), group)
    phase.add_problems([Problem(str(i), [], []) for i in range(problems)])
    typical = [rng.lognormvariate(4.5, 0.5) for _ in range(problems)]
    held = [0] * engines
    events: list[tuple[float, int, int, int]] = []
    spent = 0.0

    def pull(engine: int, now: float) -> None:
        nonlocal spent
        while held[engine] < running and phase.queue.left:
            begun = time.process_time()
            slices = phase.take(engine, running - held[engine], now)
            spent += time.process_time() - begun
            if not slices:
                return
            for work in slices:
                for index in work.indices:
                    held[engine] += 1
                    ends = now + typical[work.group] * rng.lognormvariate(0, 0.6)
                    heapq.heappush(events, (ends, engine, work.group, index))

    for engine in range(engines):
        pull(engine, 0.0)
    while events:
        now, engine, number, index = heapq.heappop(events)
        held[engine] -= 1
        trajectory = Trajectory(str(number), index, finish_reason=FinishReason.ANSWERED)
        begun = time.process_time()
        phase.ended(engine, number, trajectory, now)
        spent += time.process_time() - begun
        if held[engine] <= running - 8:
            pull(engine, now)
    return spent


def case(name: str, gpus: int, problems: int, unit: dict[str, float]) -> dict[str, Any]:
    nodes = gpus // 8
    settings = load_settings(CASES[name], [f"cluster.num_nodes={nodes}", f"data.rollout_batch_size={problems}"])
    plan = make_plan(settings, slots=Slots(gpus, 80.0, assumed=True), with_remedy=False)
    model, _ = model_of(settings)
    assert model is not None and plan.kv_capacity_tokens is not None
    engines = engines_of(settings, model, plan.num_engines, plan.kv_capacity_tokens)
    rollout, training = engines.phase_s(), train_s(settings, model, gpus)
    trajectories = problems * settings.algorithm.group_size
    kept_tokens = trained_trajectories(settings) * MEAN_LENGTH * settings.runner.seq_length
    beside = {  # the rollout
        "driver": unit["driver"] * trajectories,
        "channel": unit["channel"] * trajectories,
        "hand-out": hand_out_s(
            problems, settings.algorithm.group_size, plan.num_engines, settings.rollout.max_running_requests
        ),
        "judge": unit["judge"] * CALLS * trajectories / (nodes * JUDGE_CORES),
    }
    between = {
        "resample and batch": unit["resample and batch"] * trajectories,
        "batch to all nodes": TOKEN_BYTES
        * kept_tokens
        / LINK_BYTES_PER_S
        * (1 + math.ceil(math.log2(nodes)) if nodes > 1 else 1),
        "weights": sync_s(model),
        "hand-over": handover_s(model, gpus),
        "calls of ranks": ACTOR_CALLS * ACTOR_CALL_S * (gpus + plan.num_engines),
    }
    step = rollout + training + sum(between.values())
    shares = {part: seconds / rollout for part, seconds in beside.items()}
    shares |= {part: seconds / step for part, seconds in between.items()}
    over = [part for part, share in sorted(shares.items(), key=lambda item: -item[1]) if share > SHARE]
    return {
        "case": f"{name}, {gpus} GPUs, {problems} problems",
        "step_s": round(step, 1),
        "rollout_s": round(rollout, 1),
        "training_s": round(training, 1),
        "share": {part: round(share, 4) for part, share in shares.items()},
        "first": over[0] if over else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--problems", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--out", type=Path, help="JSON file that the rows are added to")
    options = parser.parse_args()
    unit = costs()
    for name in options.models:
        for gpus in options.gpus:
            for problems in options.problems:
                row = case(name, gpus, problems, unit)
                print(json.dumps(row), flush=True)
                keep_rows(options.out, [row])


if __name__ == "__main__":
    main()
