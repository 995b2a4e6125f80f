"""What docs/extend.md shows, pasted into one folder, and every run of it: two steps to their end."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import read_jsonl
from tests.tiers import ROOT

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]
PAGE = (ROOT / "docs" / "extend.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
YAMLS = [name for kind, block in BLOCKS if kind == "yaml" for name in re.findall(r"\A# (\S+)\n", block)]
COMMANDS = [
    *re.findall(
        r"^bash run_rstar2\.sh (.*)$", "\n".join(b for k, b in BLOCKS if k == "bash").replace("\\\n", " "), re.MULTILINE
    ),
    *YAMLS,
]
LIMITS = ["runner.max_steps=2", "evaluation.before_and_after=False", "runner.experiment_name=pasted"]


def test_the_page_has_a_run_for_each_door() -> None:
    assert len(COMMANDS) >= 6 and YAMLS == ["my_data.yaml", "my_algorithm.yaml"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pasted_command_trains(command: str, tmp_path: Path) -> None:
    for kind, block in BLOCKS:
        if named := re.match(r"# (\S+)\n", block):
            (tmp_path / named[1]).write_text(block)
        elif kind == "jsonl":
            (tmp_path / "problems.jsonl").write_text(block)
    run = ["bash", ROOT / "run_rstar2.sh", *shlex.split(command), *LIMITS, f"runner.output_dir={tmp_path}/results"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = read_jsonl(tmp_path / "results/pasted/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert not any(row["rollout/dropped_infrastructure"] for row in rows)
