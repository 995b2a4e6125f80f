"""Names of the parts of `cluster_program`, for those who start it without importing Ray."""

from __future__ import annotations

from typing import get_args

from rstar2_megatron.weights.route import RouteKind

START, STEP, CHECKPOINT = "start", "step", "checkpoint"
ROUTES: tuple[str, ...] = get_args(RouteKind)
