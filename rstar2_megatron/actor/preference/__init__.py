"""The reward model under training: the Megatron actor with a score head and the loss of preferences."""
