"""`python -m benchmarks.rollout.live --model DIR`: rollout policies live on two engines, and the agent loop's own cost.

1. `overhead`: generated tokens/s of the bare engine and of the agent loop over it, same requests, no tools. CPU
   microseconds per token of this process are the loop's cost where a machine is shared.
2. `live` and `simulated`, one line of each per policy and round: traces, synthetic or of a recorded step (`--trace`),
   replayed on two real engines with real tool calls (`live_replay`); what the trajectories did there, in the simulator
   with an engine model fitted to these engines. A synthetic step comes after another one, which is not measured: in
   training the budgets know the lengths of the step before (`--first-step`: of none).
   `prediction`: how far the means of the makespans are apart, and whether the simulator puts the policies in the order
   that was seen.

Each line is a JSON object; `load` is the machine's load average.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from benchmarks.judge.running import running_judge
from benchmarks.records import keep_rows
from benchmarks.rollout.engine_fit import fit_speed
from benchmarks.rollout.group_runner import run_groups
from benchmarks.rollout.live_replay import CONTEXT_TOKENS, replay
from benchmarks.rollout.simulator import Cluster, Simulator, make_budgets
from benchmarks.rollout.traces import Shape, Trace, recorded, synthetic
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.scheduling.adaptive_budget import POLICIES, make_budget
from rstar2_megatron.settings.schema import AgentLoopSettings, RolloutModelSettings, RolloutSettings, SamplingParams
from rstar2_megatron.tools import STANDARD_IO
from rstar2_megatron.trajectory import Problem

# 12 x 16 trajectories, a response budget of 640 tokens, calls of 50 ms: a CPU's version of the paper's stage
SHAPE = Shape(
    12, 16, 640, 180, 0.7, mean_calls=1.5, max_turns=5, prompt_tokens=(60, 120), tool_tokens=(10, 40), tool_median_s=0.05
)


_rows: list[dict[str, Any]] = []  # that were printed


def line(case: str, **values: Any) -> None:
    row = {"case": case, **values, "load": round(os.getloadavg()[0], 1)}
    _rows.append(row)
    print(json.dumps(row), flush=True)


async def overhead(engine: EngineClient, template: ChatTemplate, options: argparse.Namespace) -> None:
    """The same prompts, lengths and concurrency through the engine and through the loop."""
    problems = [
        Problem(f"q{i}", [{"role": "user", "content": f"What is {i}+{7 * i}?"}], [str(8 * i)]) for i in range(options.groups)
    ]
    count = options.groups * options.group_size

    async def bare() -> int:
        prompts = [template.prompt_ids(p) for p in problems for _ in range(options.group_size)]
        parameters = {"temperature": 1.0, "max_new_tokens": options.tokens, "stop_token_ids": template.stop_token_ids}
        results = await asyncio.gather(*(engine.generate(ids, parameters, timeout_s=600) for ids in prompts))
        return sum(len(result.token_ids) for result in results)

    async def looped() -> int:
        iterator = iter(problems)

        async def next_problem() -> Problem | None:
            return next(iterator, None)

        settings = template.settings.model_copy(update={"max_assistant_turns": 1})
        loop = AgentLoop(
            engine,
            NoJudge(),
            template,
            settings,
            SamplingParams(max_new_tokens=options.tokens),
            max_context_tokens=CONTEXT_TOKENS,
            timeout_s=600,
        )
        budget = make_budget("least_requests", engine.kv_capacity_tokens, count)
        groups = run_groups(next_problem, loop, budget, group_size=options.group_size)
        return sum([t.num_trained_tokens async for g in groups for t in g.trajectories])

    await bare()  # warm-up
    rates: dict[str, list[float]] = {"bare": [], "loop": []}
    for repeat in range(options.repeat):  # in pairs, so that a change of load meets both
        for name, work in (("bare", bare), ("loop", looped)):
            await engine.flush_cache()
            cpu, start = sum(psutil.Process().cpu_times()[:2]), time.monotonic()
            tokens = await work()
            seconds = time.monotonic() - start
            cpu = sum(psutil.Process().cpu_times()[:2]) - cpu
            rates[name].append(tokens / seconds)
            line(
                f"overhead {name} {repeat}",
                tokens=tokens,
                tokens_per_second=round(tokens / seconds),
                loop_cpu_us_per_token=round(cpu / tokens * 1e6, 1),
            )
    pairs = sorted(loop / bare for loop, bare in zip(rates["loop"], rates["bare"], strict=True))
    line("overhead", loop_to_bare=round(statistics.median(pairs), 3), pairs=[round(ratio, 3) for ratio in pairs])


class NoJudge:
    """With one turn no tool is ever called."""

    async def run(self, code: str, stdin: str = "", *, session: str | None = None) -> Any:
        raise RuntimeError("the benchmark of the overhead calls no tools")

    def expect_session(self, session: str) -> None: ...

    async def close_session(self, session: str) -> None: ...


async def policies(
    engines: list[EngineClient],
    judge: JudgeClient,
    template: ChatTemplate,
    traces: list[Trace],
    earlier: list[Trace],
    options: argparse.Namespace,
) -> None:
    """Every policy live, and what the simulator makes of the same trajectories. `earlier` is the step before, if any.

    The order of the policies turns from round to round, because a machine's speed may fall under a long load.
    """
    speed = await fit_speed(engines)
    line("fit", **{name: float(f"{value:.3g}") for name, value in vars(speed).items()})
    cluster = Cluster(len(engines), speed, options.kv_tokens, options.max_running)
    seen: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    predicted: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(options.rounds):
        for policy in list(POLICIES)[:: -1 if number % 2 else 1]:
            budgets = [make_budget(policy, engine.kv_capacity_tokens, options.max_running) for engine in engines]
            simulated_budgets = make_budgets(cluster, policy)
            for step in (earlier, traces):
                if not step:
                    continue
                for engine in engines:
                    await engine.flush_cache()
                spent = _cpu_s()
                live, done = await replay(
                    step,
                    engines,
                    judge,
                    template,
                    template.settings,
                    policy=policy,
                    budgets=budgets,
                    slice_size=options.slice_size,
                )
                cpu_s = {f"{kind}_cpu_s": round(seconds - spent[kind], 2) for kind, seconds in _cpu_s().items()}
                simulated = Simulator(done, cluster, policy, options.slice_size, simulated_budgets).run()
            line("live", policy=policy, **live, **cpu_s)
            line("simulated", policy=policy, **vars(simulated))
            seen[policy].append(live["makespan_s"])
            predicted[policy].append(simulated.makespan_s)
    means = [{policy: statistics.fmean(seconds[policy]) for policy in POLICIES} for seconds in (seen, predicted)]
    ratios = {policy: round(means[1][policy] / means[0][policy], 3) for policy in POLICIES}
    line(
        "prediction",
        seen_makespan_s=seen,
        predicted_to_seen=ratios,
        fastest_first_seen=sorted(POLICIES, key=means[0].__getitem__),
        fastest_first_predicted=sorted(POLICIES, key=means[1].__getitem__),
    )


def _cpu_s() -> dict[str, float]:
    """CPU seconds up to now of this process, which schedules, of the engines, and of the judge with its programs."""
    spent = {"driver": sum(psutil.Process().cpu_times()[:2]), "engine": 0.0, "judge": 0.0}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            kind = "judge" if any("judge" in word or "redis" in word for word in process.cmdline()) else "engine"
            spent[kind] += sum(process.cpu_times()[:4])  # of a child that has ended, too
    return spent


async def run(options: argparse.Namespace, judge_url: str) -> None:
    settings = RolloutSettings(
        model=RolloutModelSettings(model_path=options.model, precision="fp32"),
        max_total_tokens=options.kv_tokens,
        max_running_requests=options.max_running,
        cpu_threads=options.threads,
    )
    if options.trace:
        traces = recorded(options.trace, options.max_response_tokens)
        earlier = []
    else:
        traces = synthetic(SHAPE, options.seed)
        earlier = [] if options.first_step else synthetic(SHAPE, options.seed + 1)
    engines = [EngineClient(settings, seed=i, name=f"engine {i}", max_context_tokens=CONTEXT_TOKENS) for i in range(2)]
    wording = AgentLoopSettings(
        system_prompt=STANDARD_IO, user_prefix="", max_assistant_turns=1 + max(len(trace.turns) for trace in traces)
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    template = ChatTemplate(tokenizer, wording)
    judge = JudgeClient(judge_url, time_limit_s=4.0, request_timeout_s=60, max_outage_s=60)
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        if "overhead" in options.cases:
            await overhead(engines[0], template, options)
        if "policies" in options.cases:
            await policies(engines, judge, template, traces, earlier, options)
    finally:
        for engine in engines:
            await engine.close()
        await judge.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory with weights and tokenizer")
    parser.add_argument("--cases", nargs="*", default=["overhead", "policies"], choices=["overhead", "policies"])
    parser.add_argument("--groups", type=int, default=16, help="of the overhead's requests")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160, help="response budget of the overhead's requests")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="of all policies, in turns")
    parser.add_argument("--kv-tokens", type=int, default=8192, help="KV cache of each engine")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--slice-size", type=int, default=4)
    parser.add_argument("--judge-workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic traces")
    parser.add_argument("--first-step", action="store_true", help="nothing is known of their lengths yet")
    parser.add_argument("--trace", type=Path, help="rollouts.jsonl of a real run, instead of synthetic traces")
    parser.add_argument("--max-response-tokens", type=int, default=256, help="of the recorded run")
    parser.add_argument("--out", type=Path, help="JSON file that the lines are added to")
    options = parser.parse_args()
    with running_judge(num_workers=options.judge_workers) as service:
        asyncio.run(run(options, service.url))
    keep_rows(options.out, _rows)


if __name__ == "__main__":
    main()
