"""A whole run whose tools are the user's: the code goes to the rollout workers as text, and the model calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import ONE_SLOT, RunProcess, arguments, read_jsonl

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
# Under the name that the tiny model has learnt to call.
OWN = """
from itertools import count

from rstar2_megatron.extension import ToolError

calls = count(1)


def python_code_with_standard_io(code: str, input: str) -> str:
    '''Run a program here, without a judge.

    Args:
        code: The program.
        input: Its standard input.
    '''
    if next(calls) == 2:
        raise ValueError("the second call, on which this tool fails")
    said = []
    try:
        exec(code, {"print": lambda *values: said.append(" ".join(map(str, values)))})
    except Exception as error:
        raise ToolError(f"{type(error).__name__}: {error}")
    return "Tool call success\\nstdout: " + "\\n".join(said) + "\\nexecution time: 0.00s"
"""


def test_own_tools_are_called_by_the_model(cache: Path, first_run: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    name = "python_code_with_standard_io"
    config = tmp_path / "own.yaml"
    agentloop = {"tools": [{"use": f"{own}:{name}", "timeout_s": 5}]}
    config.write_text(yaml.safe_dump({"defaults": ["rstar2-tiny-cpu", "_self_"], "agentloop": agentloop}))
    # a low temperature, and the words it was taught with: a model of so few steps calls little under others
    words = ("cold_start.phases=[]", f"rollout.model.model_path={first_run}/model", "evaluation.before_and_after=False")
    more = ("algorithm.sampling_params.temperature=0.5", "rollout.max_dropped_share=1", "runner.max_steps=1")
    command = arguments(cache, tmp_path, "own", *ONE_SLOT, *words, *more)[1:]
    run = RunProcess([str(config), *command], tmp_path / "run.log").start()
    assert run.wait(600) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    (row,) = read_jsonl(tmp_path / "own/metrics.jsonl")
    calls = [call for t in read_jsonl(tmp_path / "own/trajectories.jsonl") for call in t["tool_calls"]]
    done = [call for call in calls if call["name"] == name and call["outcome"] == "ok"]
    assert len(calls) > 10 and done, calls
    assert all(call["response"].startswith("Tool call success\nstdout: ") for call in done)
    assert row[f"rollout/engine/tool/{name}/calls"] >= len(done) and row[f"rollout/engine/tool/{name}/seconds"] > 0
    assert row.get("rollout/engine/judge/calls", 0) == 0
    assert row["rollout/user_code_errors/ValueError"] == row["rollout/dropped_infrastructure"] == 1
    assert f"tool own.py:{name} failed: {own}:17, in {name}: ValueError: the second call" in run.text()
