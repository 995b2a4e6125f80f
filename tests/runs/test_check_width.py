"""What `--check` does with weights as wide as the users': room on disk, time, and errors computed on the device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rstar2_megatron.runs.check.nodes import Nodes
from rstar2_megatron.runs.check.programs.gradients import largest_error
from rstar2_megatron.runs.check.result import CheckFailed
from rstar2_megatron.runs.check.subjects import thin_model, whole_run
from rstar2_megatron.settings.load import load
from tests.runs.test_check_parts import PROGRAMS, context, on_gpu


def test_a_wide_model_has_more_time() -> None:
    nodes = Nodes("cpu", (0,))
    try:
        with pytest.raises(CheckFailed, match="within its deadline of 1 s"):
            nodes.ranks(f"{PROGRAMS}:naps", 1, 1.0, seconds=2.0)
        nodes.patience = 60.0
        assert nodes.ranks(f"{PROGRAMS}:naps", 1, 1.0, seconds=2.0) == ["rested"]
    finally:
        nodes.close()


def test_the_thin_model_says_how_much_time_its_weights_take(tmp_path: Path) -> None:
    here = on_gpu(tmp_path, {"parameters": 2e9})
    thin_model.make(here)
    assert here.nodes.patience == 3.0
    seven = thin_model.thin_parameters(load("rstar2-qwen2.5-7b-megatron").settings)
    assert seven == pytest.approx(1.56e9, rel=0.01)
    unknown = load("rstar2-qwen2.5-7b-megatron", ["rollout.model.model_path=/models/nobody"]).settings
    assert thin_model.thin_parameters(unknown) == 0


def test_the_largest_error_is_that_of_the_definition() -> None:
    draw = torch.Generator().manual_seed(0)
    theirs = {f"layer.{n}": torch.randn(40, 10 + n, generator=draw) for n in range(4)}
    theirs["nearly nothing"] = torch.full((5,), 1e-6)
    ours = {name: tensor + 0.01 * torch.randn(tensor.shape, generator=draw) for name, tensor in theirs.items()}
    ours["layer.2"] = theirs["layer.2"] * 1.5
    whole = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
    floor = 0.05 * whole * math.sqrt(theirs["layer.2"].numel() / sum(t.numel() for t in theirs.values()))
    size = float(theirs["layer.2"].double().norm())
    assert largest_error(ours, theirs) == ("layer.2", pytest.approx(0.5 * size / (size + floor), rel=1e-5))
    ours["layer.0"] = torch.full_like(ours["layer.0"], math.nan)
    name, error = largest_error(ours, theirs)
    assert name == "layer.0" and math.isnan(error)
    assert largest_error({}, theirs)[1] == math.inf


def test_a_sync_is_shown_beside_the_plan() -> None:
    assert whole_run.planned_sync(context(gpu=True), 15e9) == ", planned 0.60 s at 25 GB/s"
    assert whole_run.planned_sync(context(), 15e9) == ""
