"""RLinf's metric logger, and its schedule of validation and checkpoints."""

from __future__ import annotations

from rlinf.utils.metric_logger import MetricLogger
from rlinf.utils.runner_utils import check_progress

__all__ = ["MetricLogger", "check_progress"]
