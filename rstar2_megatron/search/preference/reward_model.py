"""Scores prefixes with a process preference model, served by an engine beside the policy's (`--reward-model DIR`).

The engines read the token ids of the search, so policy and reward model must have the same vocabulary. One reward engine
serves the searches of one policy engine; both share the policy's GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from rstar2_megatron.evaluation.services import SamplingSettings, weights_of
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.weight_files import weight_problems
from rstar2_megatron.rollout.engine.protocol import EngineLost
from rstar2_megatron.rollout.engine.reward_engine import SERVED, RewardEngine
from rstar2_megatron.search.values import Prefix
from rstar2_megatron.settings.schema import RolloutSettings

log = logging.getLogger(__name__)

SCALE = 5.0
"""A value is tanh(score / SCALE), as in the released code; training has no tanh."""


class RewardModelScorer:
    """The values of a reward model, in (-1, 1)."""

    def __init__(self, engine: RewardEngine, timeout_s: float) -> None:
        self.engine, self.timeout_s = engine, timeout_s

    async def score(self, prefixes: Sequence[Prefix]) -> list[float]:
        """A lost engine is restarted, and the prefixes are scored again.

        Raises EngineLost after `rollout.max_engine_restarts` restarts; EngineError when the engine refuses a prefix.
        """
        sequences = [
            np.concatenate([prefix.prompt_ids, *(step.ids for step in prefix.steps)]).astype(np.int32) for prefix in prefixes
        ]
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self.engine.wait_until_ready()
                scores = await self.engine.score(sequences, timeout_s=self.timeout_s)
                return [math.tanh(score / SCALE) for score in scores]
            except (EngineLost, TimeoutError) as error:
                if not self.engine.lost:
                    raise EngineLost(f"{self.engine.name}: {error}") from None
                log.warning("%s", error)
                await self.engine.recover()


def check_reward_model(reward: Path, policy: Path, context_tokens: int) -> None:
    """Raises ValueError, in one sentence, for a directory that cannot score the policy's token ids."""
    model = ModelConfig.from_directory(reward, scores=True)
    if not model.score_head:
        raise ValueError(
            f"--reward-model {reward} holds a {model.architecture}, which gives no scores; train a reward model from it by "
            "runner.task_type=preference (docs/search.md)"
        )
    if model.architecture not in SERVED:
        kind = model.exported_keys["architectures"][0]
        raise ValueError(f"--reward-model {reward} holds a {kind}, which SGLang does not serve; train one from a dense model")
    if model.max_position_embeddings < context_tokens:
        raise ValueError(
            f"--reward-model {reward} reads {model.max_position_embeddings} tokens, solutions may have {context_tokens}; "
            f"lower --max-tokens"
        )
    ours, theirs = _vocabulary(policy), _vocabulary(reward)
    if ours != theirs:
        word = next(iter(sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))))[0]
        raise ValueError(
            f"--reward-model {reward} has another vocabulary than the policy {policy} ({len(theirs)} and {len(ours)} tokens; "
            f"{word!r} is {theirs.get(word)} there, {ours.get(word)} here): its scores of the policy's token ids would mean "
            "nothing; train one from a model with the policy's tokenizer"
        )
    for problem in weight_problems(reward, model):
        raise ValueError(f"--reward-model {problem}")


def _vocabulary(directory: Path) -> dict[str, int]:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory} has no tokenizer that transformers reads ({' '.join(str(error).split())[:120]}); copy that of the "
            "model it was trained from"
        ) from None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def identity_of(reward: str | Path) -> dict[str, Any]:
    """What all trees of a file share about their reward model."""
    directory = Path(reward)
    return {"reward_model": str(directory.resolve()), "reward_weights": weights_of(directory)}


@contextlib.asynccontextmanager
async def running_scorers(
    sampling: SamplingSettings, reward: str | None, share: float, logs: Path
) -> AsyncIterator[list[RewardModelScorer]]:
    """One reward engine for each policy engine, which must be running; stopped at the end. Nothing without `reward`.

    Raises EngineLost when one does not start.
    """
    if reward is None:
        yield []
        return
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for number in range(sampling.num_engines):
            engine = RewardEngine(
                reward_rollout(sampling.rollout, reward, share, number, on_gpu=torch.cuda.is_available()),
                name=f"reward engine {number}",
                log_path=logs / f"reward-engine-{number}.log",
                max_context_tokens=sampling.max_context_tokens,
            )
            stack.push_async_callback(engine.close)
            engines.append(engine)
        await asyncio.gather(*(engine.start() for engine in engines))
        yield [RewardModelScorer(engine, sampling.rollout.trajectory_timeout_s) for engine in engines]


def policy_rollout(rollout: RolloutSettings, share: float, *, on_gpu: bool) -> RolloutSettings:
    """The policy engines' settings beside reward engines: they leave `share` of the GPU memory to these."""
    if not on_gpu:
        return rollout
    used = rollout.gpu_memory_utilization * (1 - share)
    return rollout.model_copy(update={"gpu_memory_utilization": used})


def reward_rollout(rollout: RolloutSettings, reward: str, share: float, number: int, *, on_gpu: bool) -> RolloutSettings:
    """The settings of reward engine `number`. SGLang takes a share of the memory that is free when an engine starts."""
    model = rollout.model.model_copy(update={"model_path": reward})
    update: dict[str, Any] = {"model": model}
    if on_gpu:
        whole = rollout.gpu_memory_utilization
        update["gpu_memory_utilization"] = whole * share / (1 - whole * (1 - share))
        arguments = {"base_gpu_id": number * rollout.tensor_parallel_size, **rollout.sglang.server_args}
        update["sglang"] = rollout.sglang.model_copy(update={"server_args": arguments})
    return rollout.model_copy(update=update)
