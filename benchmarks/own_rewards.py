"""Rewards a second of an own plain function, through the processes that run it, in one JSON line.

    python -m benchmarks.own_rewards [--trajectories 20000] [--workers 2] [--batch 64]

Trajectories have three turns of a thousand characters and two tool calls, as a math problem's have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.settings.schema import RewardSettings
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory

FUNCTION = "def score(problem, trajectory):\n    return float(problem.solutions[0] in trajectory.assistant_texts[-1])\n"


def attempt(index: int) -> tuple[Problem, Trajectory]:
    text = "The next step follows from the last one. " * 25
    calls = [ToolCall("python_code_with_standard_io", {"code": text, "input": ""}, ToolOutcome.OK, text[:256])] * 2
    answer = "<answer>\\boxed{42}</answer>"
    texts = [text, text, answer]
    trajectory = Trajectory(f"q{index}", 0, assistant_texts=texts, tool_calls=calls, calls_per_turn=[1, 1])
    trajectory.finish_reason = FinishReason.ANSWERED
    return Problem(f"q{index}", [{"role": "user", "content": text}], ["42"]), trajectory


async def measure(rewards: Rewards, items: list[tuple[Problem, Trajectory]], batch: int) -> float:
    """Seconds for all items, in batches as rollout workers send them, two under way at a time."""
    await rewards.grade([attempt(0)] * 8)  # starts the processes
    free = asyncio.Semaphore(2)

    async def one(start: int) -> None:
        async with free:
            await rewards.grade(items[start : start + batch])

    begun = time.perf_counter()
    await asyncio.gather(*(one(start) for start in range(0, len(items), batch)))
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=20000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    items = [attempt(number) for number in range(arguments.trajectories)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(FUNCTION)
        settings = RewardSettings(function=UserCode.model_validate(f"{path}:score"), num_workers=arguments.workers)
        with Rewards(settings) as rewards:
            seconds = asyncio.run(measure(rewards, items, arguments.batch))
    assert all(t.reward == 1.0 for _, t in items)
    print(
        json.dumps(
            {
                "rewards_per_s": round(len(items) / seconds),
                **vars(arguments),
                "seconds": round(seconds, 2),
                "cpus": os.cpu_count(),
                "load": round(os.getloadavg()[0], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
