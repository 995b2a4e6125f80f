"""Resample-on-correct and advantages of a whole step: CPU seconds on one core.

    python -m benchmarks.algorithm [--groups 512] [--group-size 32] [--keep 16] [--chars 12000] [--repeats 3] [--out FILE]

One JSON line per mode, and all of them with the command in FILE. `features` is the time in which penalties are read from
the trajectories' text, `choice` what choosing takes. A trajectory has `chars` characters of assistant text over its turns
(12,000 is about 4,000 tokens, what 14B models reach in stage 2) and 0 to 4 tool calls; every text is a string of its own, as
in a run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.records import write_result
from rstar2_megatron.algorithm.advantage import group_advantages
from rstar2_megatron.algorithm.penalty import paper_penalty, released_penalty
from rstar2_megatron.algorithm.roc import resample_on_correct
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import FinishReason, ToolCall, ToolOutcome, Trajectory

_WORDS = ("so", "we", "find", "that", "the", "sum", "equals", "12", ",", "let", "us", "check", "it", "with", "code")


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
            trajectory = Trajectory(f"q{number}", index, np.array([1], np.int32), assistant_texts=texts, tool_calls=calls)
            trajectory.calls_per_turn = [1] * len(calls)
            trajectory.finish_reason = FinishReason.ANSWERED
            trajectory.reward = float(rng.random() < rate)
            group.append(trajectory)
        made.append(group)
    return made


def measure_step(groups: list[list[Trajectory]], config: DownSamplingConfig) -> dict[str, float]:
    """CPU seconds of each part of a step's resampling and advantages."""
    start = time.process_time()
    measure = paper_penalty if config.mode == "paper" else released_penalty
    for group in groups:
        for trajectory in group:
            measure(trajectory)
    features = time.process_time() - start

    start = time.process_time()
    results = resample_on_correct(groups, config, [f"1-{number}" for number in range(len(groups))])
    resample = time.process_time() - start
    start = time.process_time()
    rows = group_advantages([[t.reward or 0.0 for t in result.kept] for result in results])
    advantages = time.process_time() - start
    return {
        "kept": sum(map(len, rows)),
        "features_cpu_s": features,
        "choice_cpu_s": max(resample - features, 0.0),
        "resample_cpu_s": resample,
        "advantages_cpu_s": advantages,
        "total_cpu_s": resample + advantages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--keep", type=int, default=16)
    parser.add_argument("--chars", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = make_groups(arguments.groups, arguments.group_size, arguments.chars)
    rows = []
    for mode in ("paper", "released"):
        config = DownSamplingConfig(down_sample_to_n=arguments.keep, mode=mode)
        runs = [measure_step(groups, config) for _ in range(arguments.repeats)]
        best = min(runs, key=lambda run: run["total_cpu_s"])
        trajectories = arguments.groups * arguments.group_size
        row = {"mode": mode, "trajectories": trajectories, **{name: round(n, 4) for name, n in best.items()}}
        print(json.dumps(row), flush=True)
        rows.append(row)
    write_result(arguments.out, {"threads": 1, "modes": rows})


if __name__ == "__main__":
    main()
