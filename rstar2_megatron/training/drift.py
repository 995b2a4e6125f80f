"""Whether the log-probs of engine and actor drift apart in the course of a run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

DIFFERENCE = "rollout/logprob_diff_mean"
RECENT = 5  # steps


def logprob_drift(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean difference of the last `RECENT` steps over the median of all steps before; None in the first 2 x `RECENT` steps.

    rows: metrics of every step so far, with DIFFERENCE; steps without it are passed over.
    """
    values = [float(row[DIFFERENCE]) for row in rows if row.get(DIFFERENCE) is not None]
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2 * RECENT:
        return None
    before = statistics.median(values[:-RECENT])
    return statistics.fmean(values[-RECENT:]) / before if before > 0 else None
