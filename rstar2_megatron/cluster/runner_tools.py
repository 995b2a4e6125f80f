"""RLinf's own parts of a run's loop: where metrics are logged, and when to validate and save."""

from __future__ import annotations

from rlinf.utils.metric_logger import MetricLogger
from rlinf.utils.runner_utils import check_progress

__all__ = ["MetricLogger", "check_progress"]
