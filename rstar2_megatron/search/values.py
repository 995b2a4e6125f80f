"""Values of candidates: the known answer at finished solutions, a scorer at prefixes and solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.search.step import Step
from rstar2_megatron.settings.sections.search import SearchSettings


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a scorer sees: the prompt's token ids and the steps so far."""

    prompt_ids: np.ndarray
    steps: Sequence[Step]


class Scorer(Protocol):
    """Scores prefixes, for example a process preference model."""

    async def score(self, prefixes: Sequence[Prefix]) -> list[float]:
        """A value in [-1, 1] for each. Raises when the infrastructure fails; a failure is never a value."""
        ...


class LikelihoodScorer:
    """The policy's own confidence: from -1 to 1 by the geometric mean of its tokens' probabilities. Needs no model."""

    async def score(self, prefixes: Sequence[Prefix]) -> list[float]:
        return [self._score(prefix.steps) for prefix in prefixes]

    @staticmethod
    def _score(steps: Sequence[Step]) -> float:
        generated = sum(step.generated_tokens for step in steps)
        logprobs = sum(float(step.logprobs.sum(dtype=np.float64)) for step in steps)
        return 2 * float(np.exp(logprobs / generated)) - 1 if generated else 0.0


class Values:
    """Sets the values of new candidates by `search.guide`. Finished solutions are graded before it, for the report."""

    def __init__(self, settings: SearchSettings, rewards: Rewards, scorer: Scorer | None) -> None:
        """scorer: not asked where answers alone give values."""
        self.guide = settings.guide
        self.rewards = rewards
        self.scorer = scorer if self.guide != "answers" else None

    async def assign(self, prompt_ids: np.ndarray, before: Sequence[Step], candidates: Sequence[Step]) -> None:
        """Set `value` of the candidates that follow the steps `before`; dead ends keep None."""
        by_truth = "answers" in str(self.guide)
        unscored = []
        for step in candidates:
            if step.answered and by_truth:
                step.value = 1.0 if step.reward else -1.0
            elif self.scorer is not None and (step.answered or step.ending is None):
                unscored.append(step)
        if self.scorer is None or not unscored:
            return
        scores = await self.scorer.score([Prefix(prompt_ids, [*before, step]) for step in unscored])
        for step, score in zip(unscored, scores, strict=True):
            step.value = float(score)
