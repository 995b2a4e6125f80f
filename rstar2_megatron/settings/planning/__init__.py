"""The plan, one module per subject: memory, KV cache, batch, training, rollout, times. Pure arithmetic."""
