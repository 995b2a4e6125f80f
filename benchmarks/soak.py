"""`python -m benchmarks.soak [--steps 300]`: a long run of tiny steps, and whether anything grows.

Starts the tiny run on a CPU with small steps and looks at it after each one: private memory, descriptors and threads of every
process by its role, files in /dev/shm that its processes have open or mapped, and files below its TMPDIR. One JSON line: for
each quantity its means over the second, third and last fifth of the steps, and the growth a step between the latter two;
what was left at the end. `--out` also keeps the memory after every step. `--trace` records a trace of every second step and
compares the CPU time of steps with and without one, between checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.records import write_result
from benchmarks.step_cpu import ratio_of
from benchmarks.tiny_run import TinyRun

_ROLES = (  # (part of the command line, role); the first match counts
    ("ActorWorker", "actor"),
    ("RolloutWorker", "rollout worker"),
    ("RewardWorker", "reward worker"),
    ("Channel", "channel"),
    ("rollout.engine.process", "engine"),
    ("sglang::scheduler", "engine scheduler"),
    ("rstar2_megatron.judge", "judge"),
    ("redis", "redis"),
    ("gcs_server", "gcs"),
    ("raylet", "raylet"),
    ("ray/dashboard", "ray agents"),
    ("ray/_private", "ray helpers"),
    ("ray::", "other ray workers"),
    ("rstar2_megatron.runs.main", "driver"),
)


class Watch:
    """Samples of one run and all its processes."""

    def __init__(self, run: TinyRun, temporary: Path) -> None:
        self._run, self._temporary = run, temporary
        self.shared: set[str] = set()  # every file of /dev/shm that a process of the run had
        self.samples: list[dict[str, float]] = []
        self.cpu: dict[int, float] = {}  # seconds of all processes at the end of each step

    def look(self, step: int) -> None:
        self.cpu[step] = self._run.cpu_s()
        sums: dict[str, float] = defaultdict(float)
        files: set[str] = set()
        for process in self._run.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                role = role_of(process)
                sums[f"{role}: MB"] += process.memory_full_info().uss / 1e6
                sums[f"{role}: descriptors"] += process.num_fds()
                sums[f"{role}: threads"] += process.num_threads()
                sums["processes"] += 1
                files |= shared_files(process.pid)
        self.shared |= files
        sums["/dev/shm: files"] = len(files)
        sums["/dev/shm: MB"] = sum(size_of(Path(name)) for name in files) / 1e6
        inside = [Path(folder) / name for folder, _, names in os.walk(self._temporary) for name in names]
        sums["TMPDIR: files"] = len(inside)
        sums["TMPDIR: MB"] = sum(map(size_of, inside)) / 1e6
        self.samples.append(dict(sums))

    def growth(self) -> dict[str, list[float]]:
        """Of every quantity: means over the second, third and last fifth, growth a step from the third to the last."""
        fifth = len(self.samples) // 5
        if not fifth:
            return {}
        parts = [self.samples[i * fifth : (i + 1) * fifth] for i in (1, 2, 4)]
        found = {}
        for name in sorted({name for sample in self.samples for name in sample}):
            means = [statistics.fmean(sample.get(name, 0.0) for sample in part) for part in parts]
            found[name] = [*(round(mean, 1) for mean in means), round((means[2] - means[1]) / (2 * fifth), 4)]
        return found

    def traced(self) -> dict[str, Any]:
        """CPU seconds of untraced (odd) and traced steps; steps with a checkpoint and the next ones are left out."""
        each = {n: self.cpu[n] - self.cpu[n - 1] for n in self.cpu if n > 12 and n % 10 > 1 and n - 1 in self.cpu}
        sides = [[cpu for n, cpu in each.items() if n % 2 == odd] for odd in (1, 0)]
        return ratio_of(*sides) if all(sides) else {}

    def series(self) -> dict[str, list[float]]:
        """Memory after every step."""
        names = sorted({name for sample in self.samples for name in sample if name.endswith(": MB")})
        return {name: [round(sample.get(name, 0.0), 1) for sample in self.samples] for name in names}


def role_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()) or process.name()
    return next((role for part, role in _ROLES if part in words), "others")


def shared_files(pid: int) -> set[str]:
    """Files of /dev/shm that a process has open or mapped, also removed ones."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return {name.removesuffix(" (deleted)") for name in found if name.startswith("/dev/shm/")}


def size_of(path: Path) -> float:
    try:
        return path.lstat().st_size
    except OSError:
        return 0.0


def soak(steps: int, limit_s: float, trace: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as place:
        temporary = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        started, seen = time.monotonic(), 0
        overrides = [f"runner.max_steps={steps}", "runner.max_file_mb=1"]
        if trace:
            overrides.append(f"runner.trace={list(range(2, steps + 1, 2))}")
        run = TinyRun(Path.cwd(), Path(place), temporary, overrides)
        watch = Watch(run, temporary)
        try:
            for seen in run.finished_steps(limit_s):
                watch.look(seen)
        finally:
            run.close()
        left = sorted(name for name in watch.shared if Path(name).exists())
        files = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file())
        shutil.rmtree(temporary)
        sizes = {p.name: round(tree_mb(p), 2) for p in sorted(run.directory.iterdir())} if seen else {}
        tail = run.output()
    return {
        "case": "soak",
        "steps": seen,
        "exit_code": run.exit_code,
        "seconds": round(time.monotonic() - started),
        **({"trace": watch.traced()} if trace else {}),
        "growth": watch.growth(),
        "series": watch.series(),
        "left_in_dev_shm": left,
        "left_in_tmpdir": files[:20],
        "run_mb": sizes,
        **({} if seen else {"output": tail}),
    }


def tree_mb(path: Path) -> float:
    return sum(size_of(p) for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit-s", type=float, default=7200, help="the run is stopped after this many seconds")
    parser.add_argument("--trace", action="store_true", help="trace every second step")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    result = soak(options.steps, options.limit_s, options.trace)
    print(json.dumps({name: value for name, value in result.items() if name != "series"}), flush=True)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
