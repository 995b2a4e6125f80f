"""The plan's subjects, one module each: memory, KV cache, batch, training, rollout, times. Pure arithmetic."""
