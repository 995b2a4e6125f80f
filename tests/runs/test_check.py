"""`--check` with its real parts on two CPU slots: a whole run passes, and every check is seen failing by a planted fault."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.runs.check.command import CHECKS, check
from rstar2_megatron.runs.check.result import Check
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.tiny.build import TinyPaths
from tests.e2e.runs import RunProcess
from tests.runs.check_faults import FaultyNodes, plant, planted_check

_LIMIT_S = 900
_ON_GPUS = {"driver", "toolkit", "GPU memory", "NVLink", "TransformerEngine"}
_NOT_HERE = _ON_GPUS | {"all-reduce over nodes", "expert parallel", "weights by cuda_ipc"}


def words(built: TinyPaths, output: Path) -> list[str]:
    """The CPU YAML on a model that is there already."""
    return [
        "cold_start.enabled=False",
        "cold_start.builder=null",
        f"rollout.model.model_path={built.model}",
        f"data.train_data_paths=[{built.train}]",
        "data.val_data_paths=[]",
        f"runner.output_dir={output}",
    ]


def read_report(output: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((output / "rstar2-tiny-cpu.check.json").read_text())
    return report


@pytest.mark.ci
@pytest.mark.timeout(_LIMIT_S + 60)
def test_a_whole_check_passes(built: TinyPaths, tmp_path: Path) -> None:
    run = RunProcess(["rstar2-tiny-cpu", "--check", *words(built, tmp_path)], tmp_path / "check.log").start()
    code = run.wait(_LIMIT_S)
    text = run.text()
    assert code == 0, text[-6000:]
    run.assert_nothing_left()
    report = read_report(tmp_path)
    states = {result["name"]: result["state"] for result in report["checks"]}
    assert set(states) == {check.name for check in CHECKS}
    assert {name for name, state in states.items() if state == "skipped"} == _NOT_HERE, text
    assert set(states.values()) == {"passed", "skipped"}
    lines = text.splitlines()
    for result in report["checks"]:  # what is printed is what is reported
        (line,) = [line for line in lines if line.startswith(f"{result['state']:8}{result['name']:21}  ")]
        assert " ".join(result["words"].split())[:60] in line
    assert lines[-1].startswith(f"{len(states) - len(_NOT_HERE)} passed, 0 failed, {len(_NOT_HERE)} skipped")
    figures = {result["name"]: result["figures"] for result in report["checks"]}
    assert figures["offload and reload"]["bytes_away"] == 0 < figures["offload and reload"]["bytes_before"]
    assert figures["checkpoint"]["host_peak_bytes"] > 0
    for route in ("shared_memory", "broadcast", "disk"):
        sent = figures[f"weights by {route}"]
        assert sent["bytes"] > 0 and sent["changed"] > 0 and sent["bytes_per_second"] > 0
    step = figures["training step"]
    assert step["step"] == 1 and step["rollout/logprob_diff_max"] < 1e-3
    assert report["nodes"][0]["packages"]["torch"] and report["config"] and report["plan"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.log", "rstar2-tiny-cpu.check.json"]


# check, fault, words of the failure
ON_RANKS = [
    ("head in chunks", "head_chunk", "relative error"),
    ("packed attention", "wrong_attention", "gradient error"),
    ("whole layout", "rank_weights", "gradient error"),
    ("optimizer step", "half_step", "a step is 5.0e-01 from AdamW's formula"),
    ("offload and reload", "keeps_gradients", "at least 95% must go"),
]
THE_OTHERS = [
    ("all-reduce in a node", "wrong_sum", "3 of 4194304 sums are wrong"),
    ("data parallel", "rank_weights", "gradient error"),
    ("tensor parallel", "rank_weights", "gradient error"),
    ("pipeline parallel", "rank_weights", "gradient error"),
    ("context parallel", "rank_weights", "gradient error"),
    ("optimizer on the host", "half_step", "a step is 5.0e-01 from AdamW's formula"),
    ("checkpoint", "flipped_byte", "rank 0: "),
]
OF_THE_ENGINE = [
    ("greedy tokens", "other_model", "allowed max 0.001 in fp32"),
    ("judge", "nobody_listens", "got no right answer from"),
]

Planted = list[tuple[str, str, str]]


def results_of(checks: list[Check], built: TinyPaths, output: Path) -> dict[str, Any]:
    """Results by name; some of these checks fail."""
    assert check(settings(built, output), checks=checks, say=lambda line: None, make_nodes=FaultyNodes) == 1
    return {result["name"]: result for result in read_report(output)["checks"]}


def assert_states(results: dict[str, Any], planted: Planted, passed: set[str]) -> None:
    """Each planted fault is seen, with a remedy, and the checks without one pass."""
    for name, _, expected in planted:
        result = results.pop(name)
        assert result["state"] == "failed" and expected in f"{result['words']} {result['details']}", (name, result)
        assert result["remedy"] and result["details"]
    assert {name: result["state"] for name, result in results.items()} == dict.fromkeys(passed, "passed")


def test_checks_of_ranks_are_seen_failing(built: TinyPaths, tmp_path: Path) -> None:
    """In two processes of one node, without Ray."""
    checks = [
        planted_check("thin model", "no_room", "thin model without room"),
        planted_check("thin model"),
        planted_check("one rank", "not_a_number", "one rank without numbers"),
        planted_check("one rank"),
        *(planted_check(name, fault) for name, fault, _ in ON_RANKS),
    ]
    first = [("thin model without room", "", "/proc/nowhere"), ("one rank without numbers", "", "the gradient's norm is nan")]
    assert_states(results_of(checks, built, tmp_path), [*first, *ON_RANKS], {"thin model", "one rank"})


@pytest.mark.ci
@pytest.mark.timeout(_LIMIT_S)
def test_checks_of_nodes_engine_and_judge_are_seen_failing(built: TinyPaths, tmp_path: Path) -> None:
    checks = [
        *(planted_check(name) for name in ("nodes", "thin model", "one rank")),
        *(planted_check(name, fault) for name, fault, _ in THE_OTHERS),
        planted_check("engine", "no_engine", "engine that SGLang refuses"),
        planted_check("engine"),
        *(planted_check(name, fault) for name, fault, _ in OF_THE_ENGINE),
    ]
    planted = [*THE_OTHERS, ("engine that SGLang refuses", "", "EngineLost"), *OF_THE_ENGINE]
    assert_states(results_of(checks, built, tmp_path), planted, {"nodes", "thin model", "one rank", "engine"})


def settings(built: TinyPaths, output: Path) -> Settings:
    return load("rstar2-tiny-cpu", words(built, output)).settings


WHOLE_RUN = [
    *(
        "nodes",
        "thin model",
        "run starts",
        "weights by cuda_ipc",
        "weights by shared_memory",
        "weights by broadcast",
        "weights by disk",
    ),
    *("training step", "checkpoint of the run"),
]


@pytest.fixture
def planted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plants a fault in every process that is started from now on."""
    directory = tmp_path_factory.mktemp("faults")
    monkeypatch.setenv("PYTHONPATH", f"{directory}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"))
    return lambda **faults: plant(directory, **faults)


@pytest.mark.ci
@pytest.mark.timeout(_LIMIT_S)
def test_corrupted_routes_and_a_damaged_checkpoint_are_seen(
    built: TinyPaths, tmp_path: Path, planted: Callable[..., None]
) -> None:
    """Every route, also cuda_ipc with its buffers in host memory: the sync succeeds and brings another tensor."""
    planted(
        rstar2_megatron__cluster__weight_transfer="_corrupt_first_syncs",
        rstar2_megatron__weights__route="_device_route_on_cpu",
        rstar2_megatron__actor__megatron_actor="_flip_before_load",
    )
    results = results_of([planted_check(name) for name in WHOLE_RUN], built, tmp_path)
    failed = {name for name, result in results.items() if result["state"] == "failed"}
    routes = [f"weights by {route}" for route in ("cuda_ipc", "shared_memory", "broadcast", "disk")]
    assert failed == {*routes, "checkpoint of the run"}, results
    for route in routes:
        assert "tensors of engine 0 differ from the actor's" in results[route]["words"]
    assert "load_checkpoint" in results["checkpoint of the run"]["details"]


@pytest.mark.release
@pytest.mark.timeout(_LIMIT_S)
def test_a_run_that_does_not_start_is_seen(built: TinyPaths, tmp_path: Path, planted: Callable[..., None]) -> None:
    planted(rstar2_megatron__actor__megatron_actor="_no_actor")
    results = results_of([planted_check(name) for name in WHOLE_RUN], built, tmp_path)
    assert results["run starts"]["state"] == "failed", results
    assert "planted: no weights" in results["run starts"]["details"]
    assert {results[name]["state"] for name in WHOLE_RUN[3:]} == {"skipped"}


@pytest.mark.release
@pytest.mark.timeout(_LIMIT_S)
def test_a_step_that_fails_its_gates_is_seen(built: TinyPaths, tmp_path: Path, planted: Callable[..., None]) -> None:
    planted(rstar2_megatron__actor__megatron_actor="_shift_log_probs")
    checks = [planted_check(name) for name in WHOLE_RUN if not name.startswith("weights by")]
    results = results_of(checks, built, tmp_path)
    assert results["training step"]["state"] == "failed", results
    assert "actor and engine disagree on the first batch" in results["training step"]["words"]
    assert results["checkpoint of the run"]["state"] == "skipped"
