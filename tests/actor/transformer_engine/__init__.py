"""TransformerEngine's own Python on a CPU: `stand_in.install` loads it with `kernels` in place of its compiled extension."""
