"""`python -m benchmarks.whole_run NAME [key=value ...]`: a whole run by its command, its time and its memory.

Starts `bash run_rstar2.sh NAME key=value ...` and looks at all its processes every few seconds: proportional set size, with
shared pages counted once, by role. One JSON line: wall and CPU seconds, the largest memory of all processes together and what
each role had then, the largest of each role, and the last lines that the run printed (its table). `--out` keeps it beside the
rows of other words. `--empty-cache` builds model and SFT, and keeps the run, in a temporary directory, so that nothing made
before is used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import Descendants
from benchmarks.records import keep_rows
from benchmarks.soak import role_of

_END_S = 90.0  # for a run that is told to end


def measure(words: list[str], output: Path, limit_s: float, every_s: float) -> dict[str, Any]:
    """Run to its end, or to `limit_s` seconds; `output` gets what it prints."""
    started = time.monotonic()
    with output.open("wb") as file:
        run = subprocess.Popen(
            ["bash", "run_rstar2.sh", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).resolve().parents[1],
            start_new_session=True,
        )
    seen = Descendants(role_of)
    try:
        while run.poll() is None and time.monotonic() - started < limit_s:
            seen.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(every_s)
        in_time = run.poll() is not None
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
            run.wait(_END_S)
    seconds = time.monotonic() - started
    return {
        "ended_by_itself": in_time,
        "exit_code": run.returncode,
        "minutes": round(seconds / 60, 1),
        "cpu_minutes_seen": round(sum(seen.cpu_s().values()) / 60, 1),
        "peak_gb": round(sum(seen.peak_gb.values()), 2),
        "peak_gb_by_role": _rounded(seen.peak_gb),
        "largest_gb_of_role": _rounded(seen.largest_gb),
        "output": output.read_text(errors="replace").splitlines()[-30:],
    }


def _rounded(sizes: dict[str, float]) -> dict[str, float]:
    return {role: round(size, 2) for role, size in sorted(sizes.items(), key=lambda item: -item[1]) if size >= 0.005}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="WORD", help="NAME and key=value, as for run_rstar2.sh")
    parser.add_argument("--empty-cache", action="store_true")
    parser.add_argument("--limit-s", type=float, default=7200.0)
    parser.add_argument("--every-s", type=float, default=5.0, help="between two looks at the memory")
    parser.add_argument("--log", type=Path, help="file for what the run prints")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="whole-run-") as place:
        words = list(options.words)
        if options.empty_cache:
            words += [f"cold_start.cache_dir={place}/cache", f"runner.output_dir={place}/results"]
        log = options.log or Path(place) / "output"
        result = {"case": " ".join(options.words), **measure(words, log, options.limit_s, options.every_s)}
    print(json.dumps(result), flush=True)
    keep_rows(options.out, [result])


if __name__ == "__main__":
    main()
