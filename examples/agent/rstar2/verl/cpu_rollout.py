"""verl's rollout backend `sglang_cpu`: one SGLang engine of this project a replica, in a Ray actor.

verl's agent loop sends token ids and gets token ids with log-probs; the trainer's weights arrive in shared memory.
`cpu_platform` registers both classes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.settings.sections.rollout import RolloutSettings
from rstar2_megatron.weights.bucket import buckets
from rstar2_megatron.weights.shared_memory import OpenedBucket, SharedBucket, WeightBucket

_GENERATE_TIMEOUT_S = 600.0
_KV_TOKENS = 65536


def _actor_name(rank: int) -> str:
    return f"sglang_cpu_{rank}"


class CPUServer:
    """The engine of one replica, with the methods that verl calls on a server."""

    async def start(self, model: str, config: dict[str, Any], log: str) -> None:
        """`config`: prompt and response length [tokens], max_num_seqs and seed of verl's rollout section; threads."""
        settings = RolloutSettings(
            model={"model_path": model, "precision": "fp32"},
            max_running_requests=config["max_num_seqs"],
            max_total_tokens=_KV_TOKENS,
            cpu_threads=config["threads"],
            engine_start_timeout_s=300,
        )
        self._response_length = config["response_length"]
        self._context = config["prompt_length"] + config["response_length"]
        self._step: int | None = None
        self._engine = EngineClient(settings, seed=config["seed"], log_path=Path(log), max_context_tokens=self._context)
        await self._engine.start()

    async def load_weights(self, path: str, step: int | None) -> None:
        """Load the safetensors file at `path`, which the trainer's process keeps open during the call."""

        async def buckets() -> AsyncIterator[tuple[WeightBucket, bool]]:
            yield OpenedBucket(path), True

        self._step = step
        await self._engine.update_weights(buckets(), step or 0)

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **others: Any) -> TokenOutput:
        """Continue `prompt_ids`, without max_tokens up to the response length and the context, as verl's servers do."""
        prompt, sampling = [int(token) for token in prompt_ids], dict(sampling_params)
        sampling.pop("logprobs", None)
        asked = sampling.pop("max_tokens", None) or sampling.pop("max_new_tokens", None)
        sampling["max_new_tokens"] = min(asked or self._response_length, self._context - len(prompt))
        done = await self._engine.generate(prompt, sampling, timeout_s=_GENERATE_TIMEOUT_S)
        return TokenOutput(
            token_ids=done.token_ids.tolist(),
            log_probs=done.logprobs.tolist(),
            stop_reason="aborted" if done.finish_reason == "abort" else "completed",
            num_preempted=done.retractions,
            extra_fields={"global_steps": self._step, "num_cached_tokens": done.cached_tokens},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._engine.abort_all()

    async def clear_kv_cache(self) -> None:
        await self._engine.flush_cache()

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        """A CPU engine holds no device memory to release, and verl's profiles are the GPU's."""

    wake_up = sleep = resume_generation = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = nothing


class CPUReplica(RolloutReplica):
    """verl's handle of a server."""

    async def launch_servers(self) -> None:
        name = _actor_name(self.replica_rank)
        server = ray.remote(CPUServer).options(name=name, max_concurrency=self.max_concurrency, num_cpus=0)
        handle = server.remote()
        config = {key: getattr(self.config, key) for key in ("prompt_length", "response_length", "max_num_seqs", "seed")}
        config["threads"] = int(os.environ.get("OMP_NUM_THREADS", "1"))  # as the trainer's processes
        log = Path(os.environ["VERL_FILE_LOGGER_ROOT"]).resolve() / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        await handle.start.remote(self.model_config.path, config, str(log))
        self.servers, self._server_handle, self._server_address = [handle], handle, name


class CPUServerAdapter(BaseRollout):
    """The trainer's side: sends weights to the replica's server."""

    replica_rank = property(lambda self: int(os.environ.get("RANK", 0)))
    is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release on a CPU."""

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **others: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"weights arrive as {wire_format!r}; sglang_cpu takes named_tensors")
        held = dict(weights)
        [(whole, _)] = buckets(held.items(), sum(tensor.nbytes for tensor in held.values()))
        bucket = SharedBucket(whole)
        try:
            server = ray.get_actor(_actor_name(self.replica_rank))
            await server.load_weights.remote(bucket.path, global_steps)
        finally:
            bucket.close()
