"""Checks of parallel layouts on four CPU slots, with experts: over as many ranks as the YAML splits the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.runner import run_checks
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.placement import Slots
from tests.actor.tiny import write_model
from tests.runs.check_faults import FaultyNodes, planted_check


@pytest.mark.ci
def test_experts_and_the_whole_layout(tmp_path: Path) -> None:
    words = [
        f"rollout.model.model_path={write_model(tmp_path / 'model', experts={'num_experts': 8})}",
        "actor.model.expert_model_parallel_size=4",
        "actor.model.sequence_parallel=True",
    ]
    nodes = FaultyNodes("cpu", (0, 1, 2, 3))
    here = Context(load("rstar2-tiny-cpu", words).settings, Slots(4, None), nodes, tmp_path)
    try:
        checks = [planted_check(name) for name in ("thin model", "one rank", "expert parallel", "whole layout")]
        checks.append(planted_check("expert parallel", "rank_weights", "experts of another layout"))
        results = run_checks(checks, here)
    finally:
        nodes.close()
    assert [result.state for result in results] == ["passed"] * 4 + ["failed"], results
    assert results[2].figures["ranks"] == results[3].figures["ranks"] == 4
    assert "with tensor 2, expert 4" in results[3].words and "gradient error" in results[4].words
