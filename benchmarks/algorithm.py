"""Resample-on-correct and advantages of a whole step: CPU seconds on one core.

    python -m benchmarks.algorithm [--groups 512] [--group-size 32] [--keep 16] [--chars 12000] [--repeats 3]

One JSON line per mode. A trajectory has `chars` characters of assistant text over its turns (12,000 is about 4,000 tokens,
what 14B models reach in stage 2) and 0 to 4 tool calls; every text is a string of its own, as in a run.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch

from rstar2_megatron.algorithm.advantage import group_advantages
from rstar2_megatron.algorithm.roc import resample_on_correct
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import FinishReason, ToolCall, ToolOutcome, Trajectory

_WORDS = (
    "so",
    "we",
    "find",
    "that",
    "the",
    "sum",
    "equals",
    "12",
    ",",
    "let",
    "us",
    "check",
    "it",
    "with",
    "code",
)


def make_groups(groups: int, group_size: int, chars: int, seed: int = 0) -> list[list[Trajectory]]:
    """Graded trajectories; each group has its own success rate, a fifth of the groups is all right or all wrong."""
    rng = random.Random(seed)
    outcomes = [ToolOutcome.OK] * 6 + [ToolOutcome.ERROR, ToolOutcome.TIMEOUT, ToolOutcome.MALFORMED]
    filler = " ".join(rng.choices(_WORDS, k=chars // 3))
    made = []
    for number in range(groups):
        rate = rng.choice([0.0, 1.0]) if rng.random() < 0.2 else rng.random()
        group = []
        for index in range(group_size):
            outcomes_of = rng.choices(outcomes, k=rng.randrange(5))
            turns = len(outcomes_of) + 1
            texts = [f"{number} {index} {i} " + filler[: chars // turns] for i in range(turns)]
            texts[-1] += "</reason>" + "<answer>\\boxed{12}</answer>" * rng.choice([0, 1, 1, 1, 2])
            calls = [ToolCall("python", {}, o, "x" * 256, 0.1) for o in outcomes_of]
            trajectory = Trajectory(f"q{number}", index, [1], assistant_texts=texts, tool_calls=calls)
            trajectory.finish_reason = FinishReason.ANSWERED
            trajectory.reward = float(rng.random() < rate)
            group.append(trajectory)
        made.append(group)
    return made


def seconds_of_a_step(groups: list[list[Trajectory]], config: DownSamplingConfig) -> tuple[float, float, int]:
    """(CPU seconds of resampling, of advantages, trajectories kept)."""
    rng = random.Random(0)
    start = time.process_time()
    results = [resample_on_correct(group, config, rng) for group in groups]
    middle = time.process_time()
    kept = 0
    for result in results:
        kept += len(group_advantages([t.reward or 0.0 for t in result.kept]))
    return middle - start, time.process_time() - middle, kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--keep", type=int, default=16)
    parser.add_argument("--chars", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = make_groups(arguments.groups, arguments.group_size, arguments.chars)
    for mode in ("paper", "released"):
        config = DownSamplingConfig(down_sample_to_n=arguments.keep, mode=mode)
        best = min(seconds_of_a_step(groups, config) for _ in range(arguments.repeats))
        figures = {
            "mode": mode,
            "trajectories": arguments.groups * arguments.group_size,
            "kept": best[2],
            "resample_cpu_s": round(best[0], 3),
            "advantages_cpu_s": round(best[1], 3),
            "total_cpu_s": round(best[0] + best[1], 3),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
