"""The torch profile of an actor rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from rstar2_megatron.actor.profile import TorchProfile
from rstar2_megatron.settings.schema import ProfilerSettings


def test_a_profile_holds_the_operations_of_its_time(tmp_path: Path) -> None:
    settings = ProfilerSettings(steps=3, record_shapes=True)  # also "cuda", which is left out here
    assert settings.steps == [3]
    recording = TorchProfile(settings)
    _ = torch.ones(3, 5) @ torch.ones(5, 7)
    recording.write(tmp_path / "step_3" / "actor_rank_0.json.gz")
    _ = torch.ones(3).cumsum(0)
    events = json.loads(gzip.decompress((tmp_path / "step_3" / "actor_rank_0.json.gz").read_bytes()))[
        "traceEvents"
    ]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert products and products[0]["args"]["Input Dims"] == [[3, 5], [5, 7]]
    assert not [event for event in events if event.get("name") == "aten::cumsum"]
