"""`python -m benchmarks.rollout.scheduler`: the rollout policies side by side in a discrete-event simulator.

The simulator (`simulator`) drives the very objects that run in production (`WorkQueue`, `AdmissionQueue`, the KV
budgets) against a model of SGLang (`engine_model`), one JSON line per scenario and policy. Columns: makespan of the
phase, share of the engines' time without any request, preemptions, evicted tokens, tokens computed again, prefix hit
rate, p50 and p99 seconds of a trajectory from its admission to its end; `over_floor` is the makespan over what no
schedule can go below (`floor_s`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.records import keep_rows
from benchmarks.rollout.peers import PEERS
from benchmarks.rollout.simulator import Cluster, Result, Simulator, make_budgets
from benchmarks.rollout.traces import STAGE_8K, STAGE_12K, Trace, recorded, synthetic
from rstar2_megatron.rollout.scheduling.adaptive_budget import POLICIES
from rstar2_megatron.settings.planning.estimates import EngineSpeed


def gpu_cluster(name: str, max_requests: int) -> Cluster:
    """8 x 80 GB as four engines at TP 2; KV arithmetic: (80e9 * fraction * TP - weights) / KV bytes a token."""
    parameters, kv_bytes = {"7b": (7.62e9, 56 * 1024), "14b": (14.77e9, 160 * 1024)}[name]
    kv_tokens = int((80e9 * 0.5 * 2 - 2 * parameters) / kv_bytes)
    return Cluster(4, EngineSpeed.of_gpu(parameters, kv_bytes, 2), kv_tokens, max_requests)


# The 1.34 M parameter model on one of two cores: the `fit` line of `python -m benchmarks.rollout.live`, measured while the
# machine had other work (load 6); `--speed` takes the fit of another machine.
TINY_ON_CPU = EngineSpeed(4.48e-3, 1.63e-4, 9.48e-8, 1.01e-2, 5.27e-5)

SCENARIOS = {
    "7b-128x32-8k": ("7b", STAGE_8K),
    "14b-128x32-8k": ("14b", STAGE_8K),
    "7b-512x32-12k": ("7b", STAGE_12K),
    "14b-512x32-12k": ("14b", STAGE_12K),
    # calls that take 7.5 s in the mean, where the paper's take 0.3 s
    "14b-128x32-8k-slow-tools": ("14b", replace(STAGE_8K, tool_median_s=5.0)),
}


def floor_s(traces: Sequence[Trace], cluster: Cluster) -> float:
    """Seconds below which no schedule comes in this model, whatever it knows.

    Every token is computed once, the caches are full of response tokens from the first step to the last, and the
    engines end together; or one trajectory, alone on an engine from the start, takes longer than that.
    """
    speed = cluster.speed
    work = longest = 0.0
    for group in {trace.group: trace.prompt_tokens for trace in traces}.values():
        work += group * speed.prefill_per_token_s
    for trace in traces:
        own = decoded = token_steps = tools = 0
        waited = 0.0
        for turn in trace.turns:
            new = turn.generated_tokens
            token_steps += new * own + new * (new - 1) // 2  # tokens of its own in the cache, over the steps
            decoded += new
            own += new + turn.tool_tokens
            tools += turn.tool_tokens
            waited += turn.tool_seconds
        alone = decoded * speed.decode_per_request_s + token_steps * speed.decode_per_token_s
        alone += tools * speed.prefill_per_token_s
        work += alone + token_steps / cluster.kv_tokens * speed.decode_base_s
        longest = max(longest, alone + decoded * speed.decode_base_s + waited)
    return max(work / cluster.engines, longest)


PAPER_BASELINE = "static_lockstep"
ROWS = (PAPER_BASELINE, *POLICIES, *PEERS)
_STEPS_BEFORE = {"kv_adaptive": 1, "prime_rl": 6}  # what it has learnt from


def compare(
    name: str,
    traces: Sequence[Trace],
    cluster: Cluster,
    slice_size: int,
    earlier: Sequence[Trace] = (),
    rows: Sequence[str] = ROWS,
) -> list[dict[str, Any]]:
    """Print and return every row's figures, and each one's against the two static ones.

    `earlier` is the step before, for learning.
    """
    results: dict[str, Result] = {}
    done = []
    floor = floor_s(traces, cluster)
    for row in rows:
        lockstep = row == PAPER_BASELINE
        policy = "static" if lockstep else row
        limited = replace(cluster, max_requests=len(traces)) if lockstep else cluster
        budgets = make_budgets(limited, policy)
        for _ in range(_STEPS_BEFORE.get(policy, 0) if earlier else 0):
            Simulator(earlier, cluster, policy, slice_size, budgets).run()
        simulator = Simulator(traces, cluster, policy, slice_size, budgets, lockstep=lockstep)
        result = results[row] = simulator.run()
        values: dict[str, Any] = {"scenario": name, "policy": row, **vars(result)}
        values["over_floor"] = round(result.makespan_s / floor - 1, 3)
        for other in (PAPER_BASELINE, "static"):
            if (base := results.get(other)) is not None:
                values[f"efficiency_vs_{other}"] = round(base.makespan_s / result.makespan_s - 1, 3)
                if base.idle_share:
                    values[f"idle_vs_{other}"] = round(result.idle_share / base.idle_share - 1, 3)
        print(json.dumps(values), flush=True)
        done.append(values)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], help="all of them by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-step", action="store_true", help="nothing is known of lengths yet")
    parser.add_argument("--slice-size", type=int, default=8)
    parser.add_argument("--max-requests", type=int, default=2048, help="SGLang's default is 2048 or more")
    parser.add_argument("--trace", type=Path, help="rollouts.jsonl of a real run instead of synthetic trajectories")
    parser.add_argument("--max-response-tokens", type=int, default=8192, help="of the recorded run")
    parser.add_argument("--kv-tokens", type=int, help="KV cache of an engine, instead of the scenario's")
    parser.add_argument("--speed", type=json.loads, help="of an engine, instead of the scenario's: a `fit` line")
    parser.add_argument("--policies", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--out", type=Path, help="JSON file that the rows are added to")
    options = parser.parse_args()
    if options.trace:
        traces = recorded(options.trace, options.max_response_tokens)
        speed = EngineSpeed(**options.speed) if options.speed else TINY_ON_CPU
        cluster = Cluster(2, speed, options.kv_tokens or 65536, options.max_requests)
        name = f"recorded: {options.trace.name}"
        rows = compare(name, traces, cluster, options.slice_size, rows=options.policies)
        keep_rows(options.out, rows)
        return
    for name in options.scenarios or SCENARIOS:
        model, shape = SCENARIOS[name]
        cluster = gpu_cluster(model, options.max_requests)
        if options.kv_tokens:
            cluster = replace(cluster, kv_tokens=options.kv_tokens)
        # the step before teaches kv_adaptive how long trajectories are; only a run's first step knows nothing
        earlier = synthetic(replace(shape, problems=min(128, shape.problems)), options.seed + 1)
        traces = synthetic(shape, options.seed)
        before = () if options.first_step else earlier
        if options.seed:
            name = f"{name} seed {options.seed}"
        keep_rows(options.out, compare(name, traces, cluster, options.slice_size, before, options.policies))


if __name__ == "__main__":
    main()
