"""How fast an engine is, in the simulator: a roofline of a GPU, or measured (`engine_fit`)."""

from __future__ import annotations

from dataclasses import dataclass


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
    def of_gpu(
        cls,
        parameters: float,
        kv_bytes_per_token: float,
        tp: int,
        *,
        flops: float = 989e12,
        bandwidth: float = 3.35e12,
        mfu: float = 0.4,
        mbu: float = 0.6,
    ) -> EngineSpeed:
        """Roofline of a bf16 model on `tp` GPUs of an H100's figures: weights and context are read once a step."""
        read = 1 / (bandwidth * mbu * tp)
        compute = 2 * parameters / (flops * mfu * tp)
        return cls(2 * parameters * read + 1e-3, compute, kv_bytes_per_token * read, 5e-3, compute)
