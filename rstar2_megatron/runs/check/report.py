"""The report file: everything that a check found, as JSON that can be attached to an issue."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rstar2_megatron import __version__
from rstar2_megatron.runs.check.result import CheckResult
from rstar2_megatron.settings.load import print_config
from rstar2_megatron.settings.schema import Settings


def write_report(
    path: Path, settings: Settings, results: Sequence[CheckResult], plan: str, machine: Any, seconds: float
) -> None:
    """Write the report. `machine`: what each node said of itself; `plan`: as `--dry-run` prints it."""
    states = Counter(result.state for result in results)
    report = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "seconds": round(seconds, 1),
        "summary": {state: states[state] for state in ("passed", "failed", "skipped")},
        "checks": [asdict(result) for result in results],
        "nodes": machine,
        "plan": plan.splitlines(),
        "config": print_config(settings).splitlines(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
