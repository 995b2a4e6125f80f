"""`python -m benchmarks.rollout --model DIR`: generated tokens/s of the bare engine and of the agent loop over it.

The same prompts, lengths and concurrency go through `EngineClient.generate` and through `run_groups`; tools are not
called, so the ratio is the loop's own cost. CPU microseconds per token are the figure to compare where a machine is
shared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable

import psutil
from transformers import AutoTokenizer

from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine import EngineClient
from rstar2_megatron.rollout.group_runner import run_groups
from rstar2_megatron.rollout.kv_budget import POLICIES, make_budget
from rstar2_megatron.rollout.tool_response import ToolRun
from rstar2_megatron.settings.schema import (
    AgentLoopSettings,
    RolloutModelSettings,
    RolloutSettings,
    SamplingParams,
)
from rstar2_megatron.trajectory import Problem


class NoJudge:
    """A random model's calls are never valid, so none arrives here."""

    async def run(self, code: str, stdin: str = "") -> ToolRun:
        raise RuntimeError("the benchmark calls no tools")


async def measure(name: str, work: Awaitable[int]) -> float:
    """Await `work`, which returns its generated tokens; print and return tokens/s."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before = sum(sum(p.cpu_times()[:2]) for p in family)
    start = time.monotonic()
    tokens = await work
    seconds = time.monotonic() - start
    cpu = sum(sum(p.cpu_times()[:2]) for p in family) - before
    load = os.getloadavg()[0]
    print(
        f"{name:24s} {tokens:7d} tokens  {seconds:6.1f} s  {tokens / seconds:7.0f} tokens/s  "
        f"{cpu / tokens * 1e6:5.0f} CPU us/token  load {load:.1f}",
        flush=True,
    )
    return tokens / seconds


async def run(options: argparse.Namespace) -> None:
    settings = RolloutSettings(
        model=RolloutModelSettings(model_path=options.model, precision="fp32"),
        max_total_tokens=options.kv_tokens,
        max_running_requests=options.max_running,
        cpu_threads=options.threads,
    )
    engine = EngineClient(settings)
    start = time.monotonic()
    await engine.start()
    print(f"engine started in {time.monotonic() - start:.1f} s")
    wording = AgentLoopSettings(system_prompt="{tools}" if options.long_prompt else "", user_prefix="")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    template = ChatTemplate(tokenizer, wording)
    sampling = SamplingParams(max_new_tokens=options.tokens)
    problems = [
        Problem(f"q{i}", [{"role": "user", "content": f"What is {i}+{7 * i}?"}], [str(8 * i)])
        for i in range(options.groups)
    ]
    loop = AgentLoop(
        engine, NoJudge(), template, wording, sampling, max_context_tokens=options.kv_tokens, timeout_s=600
    )

    async def bare() -> int:
        prompts = [template.prompt_ids(p) for p in problems for _ in range(options.group_size)]
        parameters = {
            "temperature": 1.0,
            "max_new_tokens": options.tokens,
            "stop_token_ids": template.stop_token_ids,
        }
        results = await asyncio.gather(*(engine.generate(ids, parameters, timeout_s=600) for ids in prompts))
        return sum(len(result.token_ids) for result in results)

    async def looped(policy: str) -> int:
        iterator = iter(problems)

        async def next_problem() -> Problem | None:
            return next(iterator, None)

        budget = make_budget(policy, engine.kv_capacity_tokens, options.max_running)
        groups = run_groups(next_problem, loop, budget, group_size=options.group_size)
        return sum([t.num_trained_tokens async for g in groups for t in g.trajectories])

    try:
        await bare()  # warm-up
        await engine.flush_cache()
        rate = await measure("bare engine", bare())
        for policy in POLICIES:
            await engine.flush_cache()
            retractions = loop.stats.retractions
            share = await measure(f"agent loop, {policy}", looped(policy)) / rate
            print(
                f"{'':24s} {share:.2f} of the bare engine, {loop.stats.retractions - retractions} evictions"
            )
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face directory with weights and tokenizer")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160, help="response budget of a trajectory")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--long-prompt", action="store_true", help="put the whole tool schema into the prompt"
    )
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
