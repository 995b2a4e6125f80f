"""Seconds of engines: of a decode step and of prefill, of a rollout phase, and of rollouts that never stop. Pure.

`benchmarks/rollout` simulates the same engines event by event. The closed forms here are for `--dry-run`; a test holds them
against the simulated steps of benchmarks/results/asynchronous.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig

# H100 SXM: dense bf16 FLOP/s and memory bandwidth, and the assumed shares of them.
PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 3.35e12
TRAIN_SHARE, PREFILL_SHARE, DECODE_SHARE = 0.4, 0.4, 0.6
# Of a mixture of experts, by an estimate for micro-batches of 20,480 tokens: GEMMs are small, each layer waits for the host.
EXPERTS_TRAIN_SHARE = 0.3
# Mean length of a response as a share of the longest, and mean of its square: the paper's 8K stage as
# benchmarks/rollout/traces.py has it, with one trajectory of ten at the limit.
MEAN_LENGTH, MEAN_SQUARE = 0.45, 0.28
# By the simulator: the share of the KV cache that responses fill while work waits, and how often a step of rollouts that never
# stop computes the cache again, for the new weights and for prefixes that gave way.
CACHE_IN_USE, CACHES_AGAIN = 0.75, 1.5


def train_share(model: ModelConfig) -> float:
    """Share of the peak FLOP/s in training."""
    return EXPERTS_TRAIN_SHARE if model.is_moe else TRAIN_SHARE


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds of a decode step: base + per_request * requests + per_token * tokens in context; and of prefill."""

    decode_base_s: float
    decode_per_request_s: float
    decode_per_token_s: float
    prefill_base_s: float
    prefill_per_token_s: float
    prefill_chunk_tokens: int = 8192

    @classmethod
    def of_gpu(cls, parameters: float, kv_bytes_per_token: float, tp: int, active: float | None = None) -> EngineSpeed:
        """Roofline of a bf16 model on `tp` H100s: weights and context are read once a step.

        active: parameters that a token uses; None for all.
        """
        read = 1 / (PEAK_BYTES_PER_S * DECODE_SHARE * tp)
        compute = 2 * (active or parameters) / (PEAK_FLOPS * PREFILL_SHARE * tp)
        return cls(2 * parameters * read + 1e-3, compute, kv_bytes_per_token * read, 5e-3, compute)


@dataclass(frozen=True)
class Engines:
    """Engines of one kind and the trajectories of a step, which they share evenly. Calls of tools are quick."""

    count: int
    speed: EngineSpeed
    kv_tokens: int
    """Of one engine."""
    max_requests: int
    trajectories: int
    longest: int
    """Tokens of the longest response."""

    def phase_s(self) -> float:
        """A rollout phase: the full caches, and at its end the decode steps of a last trajectory."""
        return self._tokens_s + self.speed.decode_base_s * (self._full_steps + self.longest)

    def batch_s(self, staleness: int) -> float:
        """From batch to batch where engines never wait and `staleness` + 1 batches are under way."""
        steps = max(self._full_steps, self.longest / (staleness + 1))
        running = MEAN_SQUARE / MEAN_LENGTH / 2 * self.longest  # mean tokens of a response under way
        again = CACHES_AGAIN * min(self.kv_tokens, (staleness + 1) * self._each * running)
        return self._tokens_s + self.speed.decode_base_s * steps + again * self.speed.prefill_per_token_s

    @property
    def _each(self) -> float:
        return self.trajectories / self.count

    @property
    def _tokens(self) -> float:
        return self._each * MEAN_LENGTH * self.longest

    @property
    def _token_steps(self) -> float:
        """Tokens in the cache, summed over decode steps."""
        return self._each * MEAN_SQUARE * self.longest**2 / 2

    @property
    def _tokens_s(self) -> float:
        """What requests and their contexts cost in decode steps, whatever the schedule."""
        speed = self.speed
        return self._tokens * speed.decode_per_request_s + self._token_steps * speed.decode_per_token_s

    @property
    def _full_steps(self) -> float:
        """Decode steps with as many requests as the cache and `max_requests` allow."""
        return max(self._token_steps / (CACHE_IN_USE * self.kv_tokens), self._tokens / self.max_requests)
