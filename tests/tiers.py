"""The tiers (`--tier`, tests/README.md), how tests are shared out between processes, and what a release run remembers."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rstar2_megatron.services.run_temporary import RunTemporary

ROOT = Path(__file__).resolve().parents[1]
RELEASE_REPORT = ROOT / "benchmarks" / "results" / "release_tests.json"

# The tests of a tier: those that have none of these marks, or one of them.
_LEFT_OUT = {"default": ("ci", "release"), "ci": ("release",)}
_EXAMPLES = {"default": 20, "ci": 100, "release": 1000}

# Whole runs take turns: each needs both cores and a model that the first one makes. These rooms share a cluster or an engine.
_ONE_PROCESS = ("tests/e2e/", "tests/cluster/", "tests/rollout/engine/")
# What takes longest begins first, so that no process ends long after the other.
_FIRST = ("tests/e2e/", "tests/runs/", "tests/cluster/", "tests/actor/", "tests/judge/", "tests/rollout/engine/")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "default: neither `ci` nor `release` tests; ci: all but `release` ones; release: those that have not passed yet"
    parser.addoption("--tier", choices=("default", "ci", "release"), default="ci", help=words)


def pytest_configure(config: pytest.Config) -> None:
    tier = config.getoption("--tier")
    # No deadline of an example: a shared machine's pauses are no fault of the code. New examples in the release tier
    # alone: a change is refused for what it did.
    hypothesis.settings.register_profile(tier, deadline=None, max_examples=_EXAMPLES[tier], derandomize=tier != "release")
    hypothesis.settings.load_profile(tier)
    if hasattr(config, "workerinput"):
        return
    if tier == "release":
        config.pluginmanager.register(_ReleaseReport(), "release-report")
    # Libraries leave thousands of temporary files. pytest's own directories, which show what failed, stay where they were.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    config.add_cleanup(RunTemporary().remove)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "release":
        passed = _ReleaseReport().passed()
        keep = [i for i in items if i.get_closest_marker("release") and i.nodeid not in passed]
    else:
        keep = [i for i in items if not any(i.get_closest_marker(mark) for mark in _LEFT_OUT[tier])]
    chosen = set(keep)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(keep, key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    return next((number for number, room in enumerate(_FIRST) if nodeid.startswith(room)), len(_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """A file's tests run in one process, a room's where they share what is slow to start."""

        def _split_scope(self, nodeid: str) -> str:
            room = next((room for room in _ONE_PROCESS if nodeid.startswith(room)), None)
            return room or nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # by number of tests; theirs is by time
    return ByFile(config, log)


class _ReleaseReport:
    """Outcome and seconds of every release test, by commit. What has passed with this package is not run again."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        if RELEASE_REPORT.exists():
            self._rows = json.loads(RELEASE_REPORT.read_text())["tests"]
        self._package = _git("rev-parse", "HEAD:rstar2_megatron")
        self._commit = _git("rev-parse", "HEAD")
        self._seconds: dict[str, float] = {}

    def passed(self) -> set[str]:
        return {name for name, row in self._rows.items() if (row["outcome"], row["package"]) == ("passed", self._package)}

    def pytest_sessionstart(self) -> None:
        if changed := _git("status", "--porcelain", "--", "rstar2_megatron"):
            raise pytest.UsageError(f"commit the package first, because the report names its commit; changed:\n{changed}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "setup" and report.outcome == "passed":
            return
        before = self._rows.get(report.nodeid, {}) if report.when == "teardown" else {}
        self._rows[report.nodeid] = {
            "outcome": before.get("outcome", report.outcome) if report.outcome == "passed" else report.outcome,
            "seconds": round(self._seconds[report.nodeid], 1),
            "commit": self._commit,
            "package": self._package,
            "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }
        report_file = {"command": "bash run_tests.sh --release", "tests": dict(sorted(self._rows.items()))}
        RELEASE_REPORT.write_text(json.dumps(report_file, indent=1) + "\n")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
