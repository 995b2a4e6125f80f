"""Runs the commands of benchmarks/ to their end."""

from __future__ import annotations

import subprocess
import sys

from tests.tiers import ROOT


def output_of(*words: str, timeout_s: float) -> str:
    """What `python -m benchmarks.WORDS` prints; it must end with 0."""
    name, *arguments = words
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
