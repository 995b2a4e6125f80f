"""Grading: CPU time of a pair of the tests' tables; throughput of the pool against one process per response.

    python -m benchmarks.grading [--responses N] [--workers N] [--out FILE]

The mix is drawn from the grading table and from plain integers in the share that DAPO-like data has, with the repeats
that 32 rollouts of a problem bring.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import time
from pathlib import Path

from benchmarks.records import write_result
from rstar2_megatron.reward.math_grader import grade_answer
from rstar2_megatron.reward.pool import GraderPool
from tests.reward.held_out_pairs import HELD_OUT_PAIRS
from tests.reward.input_pairs import INPUT_PAIRS
from tests.reward.pairs import flat

INTEGER_SHARE = 0.9  # DAPO-Math's answers are integers; the rest represents other sources
ROLLOUTS = 32


def responses(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """(answer, solution) pairs, ROLLOUTS of a problem in a row."""
    rng = random.Random(seed)
    table = [(answer, solution) for solution, answer, _ in flat() if answer.count("{") == answer.count("}")]
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        if rng.random() < INTEGER_SHARE:
            solution = str(rng.randrange(1000))
            answers = [solution if rng.random() < 0.5 else str(rng.randrange(1000)) for _ in range(ROLLOUTS)]
        else:
            answer, solution = rng.choice(table)
            answers = [answer if rng.random() < 0.7 else str(rng.randrange(20)) for _ in range(ROLLOUTS)]
        pairs += [(answer, solution) for answer in answers]
    return pairs[:count]


async def with_pool(pairs: list[tuple[str, str]], workers: int) -> float:
    """Seconds for all, the pool's start included."""
    start = time.perf_counter()
    with GraderPool(workers, 2.0) as pool:
        await asyncio.gather(*(pool.grade(f"<answer>\\boxed{{{answer}}}</answer>", [solution]) for answer, solution in pairs))
    return time.perf_counter() - start


def process_per_response(pairs: list[tuple[str, str]]) -> float:
    """Seconds for all, a forked process each (the libraries are loaded before the fork, which favours it)."""
    grade_answer("x+\\sqrt{2}", ["\\sqrt{2}+x"])
    context = multiprocessing.get_context("fork")
    start = time.perf_counter()
    for answer, solution in pairs:
        process = context.Process(target=grade_answer, args=(answer, [solution]))
        process.start()
        process.join(2.0)
        if process.is_alive():
            process.kill()
            process.join()
    return time.perf_counter() - start


def cpu_of_pairs() -> list[float]:
    """CPU milliseconds of each pair of the tables, in this process, without the import of sympy."""
    grade_answer("x+\\sqrt{2}", ["\\sqrt{2}+x"])
    spent = []
    for solution, answer, _ in itertools.chain(flat(), *map(flat, INPUT_PAIRS.values()), flat(HELD_OUT_PAIRS)):
        begun = time.process_time()
        grade_answer(answer, [solution])
        spent.append(1000 * (time.process_time() - begun))
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs = responses(arguments.responses)
    cpu = cpu_of_pairs()
    sample = pairs[: max(arguments.responses // 16, 1)]
    forked = process_per_response(sample) / len(sample)
    pooled = asyncio.run(with_pool(pairs, arguments.workers)) / len(pairs)
    result = {
        "pairs": len(cpu),
        "cpu_ms_per_pair": round(statistics.fmean(cpu), 2),
        "cpu_ms_p95": round(statistics.quantiles(cpu, n=20)[-1], 2),
        "responses": len(pairs),
        "workers": arguments.workers,
        "pool_responses_per_s": round(1 / pooled, 1),
        "process_per_response_per_s": round(1 / forked, 1),
        "ratio": round(forked / pooled, 1),
    }
    print(json.dumps(result))
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
