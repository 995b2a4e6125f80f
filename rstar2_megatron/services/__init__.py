"""Services that a run starts for itself and stops again: Redis."""
