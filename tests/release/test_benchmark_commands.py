"""The commands of benchmarks/README.md, as small as they go: each ends well and writes its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.release.benchmark_runs import output_of

LIMIT_S = 900
SECONDS = [
    "actor.conversion --directory {place} --shape tiny --layers 2 --tensor-parallel 2",
    "algorithm --groups 4 --group-size 4 --keep 2 --chars 400 --repeats 1",
    "grading --responses 32",
    "growth --models 7b --gpus 8 --problems 512",
    "judge.calls --seconds 0.5 --cases print --clients 1 --workers 2",
    "paper_step.hot_path --parts --problems 2 --group 4 --mean-tokens 50 --max-tokens 100 --engines 2",
    "rollout.asynchronous --models 7b --actors 4 --bounds 1 --problems 4 --warm 1 --steps 2",
    "rollout.lending --models 7b --actors 4 --bounds 1 --problems 4 --warm 1 --steps 2",
]
LONGER = [
    "actor.head --hidden-size 64 --tokens 256 --entropy",
    "actor.throughput --turns 1",
    "judge.burst --calls 200 --workers 2",
    "paper_step --problems 2 --group 4 --mean-tokens 50 --max-tokens 100 --engines 2 --ranks 2",
    "rollout.live --model {model} --groups 1 --group-size 4 --tokens 20 --repeat 1 --rounds 1 --cases overhead",
    "rollout.scheduler 7b-128x32-8k --policies kv_adaptive",
    "rollout.trace_overhead --model {model} --pairs 1 --groups 1",
]
PRINTED = [  # without a file for the result
    "actor.throughput --dry --sweep",
    "judge.bare print --seconds 0.5",
    "model_directory {place}/model Qwen2.5-1.5B",
    "own_rewards --trajectories 200",
]


def has_a_result(words: str, file: Path) -> None:
    output_of(*words.split(), "--out", str(file), timeout_s=LIMIT_S)
    written = json.loads(file.read_text())
    for row in written if isinstance(written, list) else [written]:
        assert row["command"].startswith(f"python -m benchmarks.{words.split()[0]} ") and row["time"], row


@pytest.mark.ci
@pytest.mark.parametrize("words", SECONDS)
def test_a_short_one_writes_its_result(words: str, tmp_path: Path) -> None:
    has_a_result(words.format(place=tmp_path), tmp_path / "result.json")


@pytest.mark.release
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("words", LONGER)
def test_a_longer_one_writes_its_result(words: str, memorised_model: Path, tmp_path: Path) -> None:
    has_a_result(words.format(place=tmp_path, model=memorised_model), tmp_path / "result.json")


@pytest.mark.release
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("words", PRINTED)
def test_one_that_prints_alone_ends_well(words: str, tmp_path: Path) -> None:
    assert output_of(*words.format(place=tmp_path).split(), timeout_s=LIMIT_S)
