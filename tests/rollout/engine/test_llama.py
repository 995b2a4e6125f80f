"""SGLang's own Llama class under Llama 3's rotary scaling, and the weights in it, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.weights.checksum import weights_checksum
from tests.actor.tiny import LLAMA3_ROPE, write_model
from tests.rollout.engine.small import hf_logprobs, settings_for, update_weights


@pytest.mark.ci
@pytest.mark.timeout(400)
async def test_a_llama_before_and_after_a_weight_update(tmp_path: Path) -> None:
    model, other = (write_model(tmp_path / str(seed), llama=LLAMA3_ROPE, seed=seed) for seed in (0, 1))
    engine = EngineClient(settings_for(model), name="llama engine")
    await engine.start()
    try:
        for directory in (model, other):
            weights = load_file(directory / "model.safetensors")
            if directory is other:
                await update_weights(engine, weights.items(), version=1)
            hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            prompt = [(11 * i) % 320 for i in range(90)]  # thrice the original length
            turn = await engine.generate(prompt, {"temperature": 1.0, "max_new_tokens": 40}, timeout_s=120)
            expected = hf_logprobs(hf, prompt, turn.token_ids.tolist())
            assert torch.allclose(expected, torch.tensor(turn.logprobs), atol=1e-3)
            assert await engine.weights_checksum() == weights_checksum(weights.items())
    finally:
        await engine.close()
