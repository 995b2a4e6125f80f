"""`RewardEngine`: asyncio interface to one SGLang engine that scores token ids with a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rstar2_megatron.rollout.engine.arguments import engine_arguments
from rstar2_megatron.rollout.engine.protocol import EngineError
from rstar2_megatron.rollout.engine.supervisor import SupervisedEngine
from rstar2_megatron.settings.schema import RolloutSettings

SERVED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""Policies of which `reward_models/` has the classifier."""


class RewardEngine(SupervisedEngine):
    """Scores on one engine, whose cache holds the prefixes that token ids share. All methods belong to one event loop.

    `settings.model.model_path` is a directory that transformers loads as a sequence classifier with one label.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        name: str = "reward engine",
        log_path: Path | None = None,
        max_context_tokens: int | None = None,
    ) -> None:
        arguments = engine_arguments(settings, max_context_tokens=max_context_tokens, scores=True)
        super().__init__(settings, arguments, name=name, log_path=log_path)

    async def score(self, sequences: Sequence[np.ndarray], *, timeout_s: float) -> list[float]:
        """The model's raw score of each sequence of token ids, at its last token.

        Raises EngineLost, or its subclass GenerationTimeout after `timeout_s`; EngineError when SGLang refuses a sequence,
        for example because it is too long, and for a score that is not finite.
        """
        if not sequences:
            return []
        params = {"input_ids": list(sequences), "rid": self._new_request_id()}
        scores: list[float] = await self._ask("score", params, timeout_s)
        wrong = [score for score in scores if not np.isfinite(score)]
        if wrong or len(scores) != len(sequences):
            raise EngineError(
                f"{self.name} gave {len(scores)} scores for {len(sequences)} sequences, {len(wrong)} of them not finite"
            )
        return scores
