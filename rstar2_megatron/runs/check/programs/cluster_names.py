"""Names of the parts of `cluster_program`, for those who start it without importing Ray."""

from __future__ import annotations

START, STEP, CHECKPOINT = "start", "step", "checkpoint"
ROUTES = ("cuda_ipc", "shared_memory", "broadcast", "disk")
