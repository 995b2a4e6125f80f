"""One engine with its agent loop as an RLinf worker."""

from __future__ import annotations

import time
from pathlib import Path

from rlinf.scheduler import Worker

from rstar2_megatron.cluster.weights import WeightRoute, receive_weights
from rstar2_megatron.judge.client import JudgeClient
from rstar2_megatron.rollout.engine import EngineClient
from rstar2_megatron.settings.schema import Settings


class RolloutWorker(Worker):
    def __init__(self, settings: Settings, device: str) -> None:
        super().__init__()
        self._settings = settings
        self._device = device
        self._version = 0

    async def start_engine(self, model_path: str, judge_url: str) -> dict[str, float]:
        """Start SGLang on `model_path` and connect to the judge. Returns the engine's KV capacity."""
        from transformers import AutoTokenizer

        from rstar2_megatron.rollout.chat import ChatTemplate

        settings = self._settings
        start = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._template = ChatTemplate(tokenizer, settings.agentloop)
        judge = settings.tools.codejudge
        self._judge = JudgeClient(
            judge_url,
            time_limit_s=judge.time_limit_s,
            request_timeout_s=judge.request_timeout_s,
            max_outage_s=judge.max_outage_s,
            max_concurrency=judge.max_concurrency,
        )
        model = settings.rollout.model.model_copy(update={"model_path": model_path})
        log = Path(settings.runner.logger.log_path).resolve() / "logs" / f"engine-{self._rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._engine = EngineClient(
            settings.rollout.model_copy(update={"model": model}),
            seed=settings.actor.seed + self._rank,
            name=f"engine {self._rank}",
            log_path=log,
            context_length=settings.runner.seq_length + 8,
        )
        await self._engine.start()
        return {
            "kv_capacity_tokens": float(self._engine.kv_capacity_tokens),
            "start_seconds": time.perf_counter() - start,
        }

    async def receive_weights(self, route: WeightRoute, version: int) -> None:
        """Take the actor's weights and load them into the engine as `version`."""
        weights = await receive_weights(self, route)
        await self._engine.update_weights(weights.items(), version)

    async def weights_checksum(self) -> dict[str, int]:
        return await self._engine.weights_checksum()
