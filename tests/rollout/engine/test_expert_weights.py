"""Experts of an engine under their Hugging Face names. SGLang's own experts need a GPU: its layout is laid out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rstar2_megatron.rollout.engine.weight_hooks import hf_tensors


def test_stacked_experts_are_named_one_by_one() -> None:
    experts, width, hidden = 3, 4, 8
    gate, up = torch.randn(experts, width, hidden), torch.randn(experts, width, hidden)
    down, router = torch.randn(experts, hidden, width), torch.randn(experts, hidden)
    layer = "model.layers.0.mlp"
    parameters = {
        f"{layer}.gate.weight": router,
        f"{layer}.experts.w13_weight": torch.cat([gate, up], 1),
        f"{layer}.experts.w2_weight": down,
    }
    config = SimpleNamespace(
        hidden_size=hidden, num_attention_heads=2, num_key_value_heads=2, vocab_size=16, tie_word_embeddings=False
    )
    model = SimpleNamespace(config=config, named_parameters=lambda: parameters.items())
    found = dict(hf_tensors(model, 1, None))
    assert len(found) == 1 + 3 * experts
    assert torch.equal(found[f"{layer}.gate.weight"], router)
    for expert in range(experts):
        names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        for name, stacked in names.items():
            assert torch.equal(found[f"{layer}.experts.{expert}.{name}.weight"], stacked[expert])
