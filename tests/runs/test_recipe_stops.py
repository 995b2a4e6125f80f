"""A recipe that is stopped ends its stage by the same signal, and knows where to continue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

STAGE = """#!{python}
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: (print("stage got", number, flush=True), sys.exit(128 + number)))
print("stage runs", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_stage_ends_as_its_recipe_is_told(tmp_path: Path, number: int) -> None:
    (tmp_path / "stage").write_text(STAGE.format(python=sys.executable))
    (tmp_path / "stage").chmod(0o755)
    stages = [{"name": name, "overrides": {"cold_start.enabled": False}} for name in ("first", "second")]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"config": "rstar2-tiny-cpu", "stages": stages}))
    program = "import sys; from rstar2_megatron.runs.main import main; words = sys.argv[2:]; sys.executable = sys.argv[1]; "
    program += "sys.exit(main(words))"
    words = [str(tmp_path / "stage"), f"recipe={tmp_path}/two.yaml", f"runner.output_dir={tmp_path}"]
    log = tmp_path / "recipe.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", program, *words], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while "stage runs" not in log.read_text():
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.1)
        (stage,) = psutil.Process(process.pid).children()
        os.kill(process.pid, number)
        assert process.wait(30) == 128 + number
        stage.wait(10)
    finally:
        process.kill()
    assert f"stage got {int(number)}" in log.read_text()
    states = json.loads((tmp_path / "two" / "recipe.json").read_text())["stages"]
    assert {name: state["status"] for name, state in states.items()} == {"first": "running"}
