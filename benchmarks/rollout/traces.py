"""What trajectories do, for the simulator: recorded from real runs, or synthetic ones shaped like the paper's stages."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn and the tool call after it (none after the last)."""

    generated_tokens: int
    tool_tokens: int
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory of a group."""

    group: int
    index: int
    prompt_tokens: int
    max_response_tokens: int
    turns: tuple[Turn, ...]


def recorded(path: Path, max_response_tokens: int) -> list[Trace]:
    """Traces of a `rollouts.jsonl` (runner.save_rollouts) of a real run. Raises ValueError for another file."""
    groups: dict[tuple[int, str], int] = {}
    sizes: Counter[int] = Counter()
    traces = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            key = (row["step"], row["query_id"])
            turns = tuple(Turn(*turn) for turn in row["trace"])
            if not turns or sum(t.generated_tokens + t.tool_tokens for t in turns) > max_response_tokens:
                raise ValueError(f"{len(turns)} turns; does --max-response-tokens={max_response_tokens} fit this run?")
            group = groups.setdefault(key, len(groups))
            index = sizes[group]  # some rollouts of a group may be missing
            sizes[group] += 1
            traces.append(Trace(group, index, row["prompt_tokens"], max_response_tokens, turns))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no recorded rollout ({error}); set runner.save_rollouts") from error
    return traces


@dataclass(frozen=True)
class Shape:
    """A stage's trajectories.

    Response lengths are log-normal with `median_tokens`; of the variance of the logarithm `between` belongs to the
    problem, the rest to the trajectory. Tool calls are Poisson with mean `mean_calls`, at most `max_turns` - 1.
    """

    problems: int
    group_size: int
    max_response_tokens: int
    median_tokens: float
    sigma: float
    between: float = 0.5
    mean_calls: float = 2.5  # 45K calls a step of 512 x 32 in the paper, at most
    max_turns: int = 10
    prompt_tokens: tuple[int, int] = (450, 850)
    tool_tokens: tuple[int, int] = (30, 110)  # 256 characters and the turn's header
    tool_median_s: float = 0.2  # log-normal, mean about 0.3 s as in the paper


# 8K: a mean of 3.7K tokens and 10% at the limit; 12K: 5.9K and 8% (paper, section 3: lengths 4K to 8K, clip ratio 10%)
STAGE_8K = Shape(128, 32, 8192, 3000, 0.78)
STAGE_12K = Shape(512, 32, 12288, 5000, 0.65)
# the first steps of stage 1: a mean of 1K tokens, as after the cold start (paper, section 3), and 1 of 1,000 at the limit
START_8K = Shape(128, 32, 8192, 726, 0.8)
STAGES = {"8k": STAGE_8K, "12k": STAGE_12K, "8k-start": START_8K}


def synthetic(shape: Shape, seed: int) -> list[Trace]:
    """One step's trajectories of `shape`, the same for the same seed."""
    rng = random.Random(seed)
    traces = []
    for group in range(shape.problems):
        prompt = rng.randint(*shape.prompt_tokens)
        level = math.log(shape.median_tokens) + rng.gauss(0, shape.sigma * math.sqrt(shape.between))
        for index in range(shape.group_size):
            wanted = math.exp(level + rng.gauss(0, shape.sigma * math.sqrt(1 - shape.between)))
            traces.append(Trace(group, index, prompt, shape.max_response_tokens, _turns(shape, wanted, rng)))
    return traces


def _turns(shape: Shape, wanted: float, rng: random.Random) -> tuple[Turn, ...]:
    calls, threshold, product = 0, math.exp(-shape.mean_calls), rng.random()
    while product > threshold and calls < shape.max_turns - 1:  # Knuth's Poisson
        calls, product = calls + 1, product * rng.random()
    shares = [rng.expovariate(1) for _ in range(calls + 1)]
    left = shape.max_response_tokens
    turns = []
    for number, share in enumerate(shares):
        generated = max(1, round(wanted * share / sum(shares)))
        tool = rng.randint(*shape.tool_tokens) if number < calls else 0
        if generated + tool >= left:  # the response budget ends it here
            turns.append(Turn(left, 0, 0.0))
            break
        left -= generated + tool
        turns.append(Turn(generated, tool, rng.lognormvariate(math.log(shape.tool_median_s), 0.9) if tool else 0.0))
    return tuple(turns)
