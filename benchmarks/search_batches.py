"""Whether a search keeps the engine's batches full: its generated tokens/s against plain sampling.

    python -m benchmarks.search_batches --model DIR --data FILE [key=value ...]

One engine and one judge serve plain sampling (whole attempts of the agent loop), then a search by `search.*`, then plain
sampling again, each with `search.trees` x `search.candidates` requests under way. The share is the search's tokens/s by the
mean of the two samplings, because a shared machine is not always equally fast. A first round of sampling is not measured. One
JSON line; the exit code is 0 from a share of 0.8 on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.records import write_result
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.evaluation.configure import configure
from rstar2_megatron.evaluation.services import SamplingSettings, Services, running_services
from rstar2_megatron.search.__main__ import guided, parse
from rstar2_megatron.search.expand import Expander
from rstar2_megatron.search.session import loop_sampling
from rstar2_megatron.search.solver import Solver
from rstar2_megatron.search.tree_file import TreeFile
from rstar2_megatron.search.values import LikelihoodScorer, Values
from rstar2_megatron.settings.sections.search import SearchSettings
from rstar2_megatron.trajectory import Problem

BAR = 0.8


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--config", help="configuration when the policy is not in a run")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--result", type=Path, help="also write this JSON file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="search.trees=16 ...")
    own = parser.parse_intermixed_args(argv)
    words = ["--model", own.model, "--data", own.data, *own.overrides]
    words += ["--config", own.config] if own.config else []
    arguments = parse([*words, "search.mode=mcts"])
    settings, sampling = configure(arguments)
    search = guided(settings.search)
    problems = read_problems([own.data], settings.data)[: own.problems]
    result = asyncio.run(_measure(problems, loop_sampling(sampling, search), search))
    write_result(own.result, result)
    print(json.dumps(result))
    return 0 if result["share"] >= BAR else 1


async def _measure(problems: Sequence[Problem], sampling: SamplingSettings, search: SearchSettings) -> dict[str, Any]:
    trees = search.trees or 8
    requests = trees * search.candidates
    with tempfile.TemporaryDirectory() as place:
        wanted = replace(sampling, rollout=sampling.rollout.model_copy(update={"request_seeds": True}))
        async with running_services(wanted, problems, Path(place)) as services:
            await _sample(problems, services, sampling, requests, requests)  # compiles and warms up
            before, tokens = await _sample(problems, services, sampling, requests, 4 * requests)
            values = Values(search, services.rewards, LikelihoodScorer())
            expander = Expander(services.agent_loop(services.engines[0], sampling), values, search)
            file = TreeFile(Path(place) / "mcts.jsonl", {})
            file.open(problems)
            progress = await Solver(problems, search, file, {}).run([expander], trees)
            searched = progress.tokens_per_s
            after, _ = await _sample(problems, services, sampling, requests, 4 * requests)
    return {
        "problems": len(problems),
        "requests": requests,
        "search": {"trees": trees, "candidates": search.candidates, "rollouts": search.rollouts},
        "search_tokens": progress.generated_tokens,
        "sampling_tokens": tokens,
        "search_tokens_per_s": round(searched, 1),
        "sampling_tokens_per_s": [round(before, 1), round(after, 1)],
        "share": round(searched / ((before + after) / 2), 3),
        "bar": BAR,
    }


async def _sample(
    problems: Sequence[Problem], services: Services, sampling: SamplingSettings, requests: int, attempts: int
) -> tuple[float, int]:
    """(generated tokens/s, generated tokens) of whole attempts, `requests` of them under way at a time."""
    loop = services.agent_loop(services.engines[0], sampling)
    gate = asyncio.Semaphore(requests)
    tokens = 0

    async def attempt(number: int) -> None:
        nonlocal tokens
        async with gate:
            done = await loop.run(problems[number % len(problems)], number)
        tokens += int(done.loss_mask.sum())

    started = time.monotonic()
    await asyncio.gather(*(attempt(number) for number in range(attempts)))
    return tokens / (time.monotonic() - started), tokens


if __name__ == "__main__":
    sys.exit(main())
