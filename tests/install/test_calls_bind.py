"""What the project calls on a GPU exists with the signature that it expects, in the installed versions."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.install.calls import calls_of, problem

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]  # all engines are imported, on a busy machine

# megatron-core 0.16.1 looks for these and does without: TransformerEngine 2.11 has no longer a workspace to hand to its GEMM
# (the router's product is torch's in fp32 then) nor the old name of its split.
ABSENT = {"transformer_engine.pytorch.attention._SplitAlongDim", "transformer_engine.pytorch.module.base.get_workspace"}


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bound") / "bound.json"
    command = [sys.executable, "-m", "tests.install.bind_calls", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_every_call_of_the_project_fits(bound: dict[str, Any]) -> None:
    assert bound["project"]["problems"] == []
    calls = bound["project"]["calls"]
    # enough of each to know that the search still finds them
    assert calls["megatron"] >= 40 and calls["sglang"] >= 10 and calls["torch"] >= 150 and calls["rlinf"] >= 8


def test_the_engine_takes_the_arguments_of_every_yaml(bound: dict[str, Any]) -> None:
    assert bound["engine_arguments"]["problems"] == []
    assert bound["engine_arguments"]["arguments"] >= 10 * bound["engine_arguments"]["configs"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="TransformerEngine is not installed; scripts/try_gpu_install.sh runs this where it is",
)
def test_megatron_core_calls_transformer_engine_as_it_is(bound: dict[str, Any]) -> None:
    into = bound["megatron_core_into_transformer_engine"]
    assert into["problems"] == [] and into["calls"]["transformer_engine"] >= 50
    assert set(into["optional_and_absent"]) == ABSENT


PLANTED = """
import torch
import torch.nn.functional as F
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule, NoSuchModule

class Mine(MegatronModule):
    def __init__(self, config):
        super().__init__(config, colour="red")

def run(rest):
    OptimizerConfig(lr=1.0, learning_rate=2.0)
    get_megatron_optimizer()
    get_megatron_optimizer(*rest)
    torch.cuda.memory_allocated(0, urgency=1)
    torch.cuda.no_such_function()
    F.silu(rest, inplace=True)
    torch.mm(rest, rest, out_dtype=torch.float32)
    torch.mm(rest, rest, dtype_out=torch.float32)
    torch.addmm(rest, rest, rest, out_dtype=torch.float32, out=rest)
    torch.addmm(rest, out_dtype=torch.float32)
    torch.zeros(2, 3, device="cuda", requires_grad=True)
    torch.empty(3, colour="red")
"""


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    source = tmp_path / "planted.py"
    source.write_text(PLANTED)
    found = [text for c in calls_of(source, ["torch", "megatron"]) if (text := problem(c))]
    lines = {int(text.partition("planted.py:")[2].partition(":")[0]) for text in found}
    wrong = ("NoSuchModule", "colour", "learning_rate=2", "optimizer()", "urgency", "no_such", "dtype_out", "addmm(rest, out")
    expected = {number for number, line in enumerate(PLANTED.splitlines(), 1) if any(word in line for word in wrong)}
    assert lines == expected, found


def test_branches_of_other_versions_are_not_looked_at(tmp_path: Path) -> None:
    source = tmp_path / "versions.py"
    source.write_text(
        "if HAVE and is_version('2.0'):\n"
        "    from torch.nn import Linear as chosen\n"
        "else:\n"
        "    from torch.nn import Gone as chosen\n"
        "try:\n"
        "    from torch.nn import Lost\n"
        "    Lost.apply(1)\n"
        "except ImportError:\n"
        "    pass\n"
        "chosen(1, 2)\n"
        "chosen(1, 2, height=3)\n"
    )
    absent: set[str] = set()

    def problems(version: str) -> list[str]:
        calls = calls_of(source, ["torch"], {"is_version": version, "HAVE": ""}, absent)
        return [text.partition(": ")[0][-2:] for call in calls if (text := problem(call))]

    assert problems("2.11.0") == ["11"] and absent == {"torch.nn.Lost"}
    assert problems("1.9") == [":4", "10", "11"]
