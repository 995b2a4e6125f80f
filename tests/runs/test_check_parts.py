"""Checks that need no process: how results are judged, shown and reported, and what each one calls a fault."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.extension.user_code import all_user_code
from rstar2_megatron.judge.client.service import JudgeServiceError
from rstar2_megatron.runs.check import command
from rstar2_megatron.runs.check.agent import NodeAgent
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.nodes import Nodes, values
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.programs import one_engine
from rstar2_megatron.runs.check.result import Check, CheckFailed, CheckSkipped, Finding
from rstar2_megatron.runs.check.runner import run_checks
from rstar2_megatron.runs.check.subjects import actor, collectives, engine, judge, machine, network, whole_run
from rstar2_megatron.runs.check.subjects.thin_model import thin_config
from rstar2_megatron.runs.main import main
from rstar2_megatron.settings.load import ConfigError, load
from rstar2_megatron.settings.placement import Slots, first_engine
from tests.e2e.runs import ROOT
from tests.runs.check_faults import FaultyNodes

REQUIREMENTS = ROOT / "requirements"
PROGRAMS = "tests.runs.check_faults"
TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV18\t{02}\tPIX\t0-47
GPU1\tNV18\t X \tNV18\tSYS\t0-47
GPU2\t{02}\tNV18\t X \tSYS\t48-95
NIC0\tPIX\tSYS\tSYS\t X \t
"""


class OneNode:
    """Answers `everywhere` with given facts: what a node would say of itself."""

    def __init__(self, facts: list[dict[str, Any]]) -> None:
        self.facts = facts
        self.patience = 1.0
        self.slots: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.facts)


def context(name: str = "rstar2-tiny-cpu", *words: str, gpu: bool = False, facts: Any = None) -> Any:
    settings = load(name, words).settings
    slots = Slots(8, 80.0, host_gb=1900.0) if gpu else Slots(2, None)
    nodes: Any = OneNode(facts or [])
    nodes.slots = tuple(range(slots.count // settings.cluster.num_nodes))
    found = {"survey": facts} if facts else {}
    return Context(settings, slots, nodes, Path("/nowhere/scratch"), found)


def facts(**changes: Any) -> dict[str, Any]:
    """A healthy node of eight H100s."""
    gpus = [
        {"index": str(n), "name": "NVIDIA H100 80GB HBM3", "driver_version": "580.65.06", "memory.total": "81559"}
        | {"memory.used": "4", "compute_mode": "Default", "pstate": "P0"}
        for n in range(8)
    ]
    return {
        "host": "node-a",
        "python": "3.11.9",
        "host_gb": 2000.0,
        "host_free_gb": 1900.0,
        "shared_memory_gb": 900.0,
        "temporary": {"wanted": None, "problem": "", "room_gb": 500.0, "path": "/tmp"},
        "room_gb": {"/nowhere": 900.0},
        "writable": {"/nowhere": ""},
        "packages": machine.read_pins(REQUIREMENTS, gpu=True),
        "tools": dict.fromkeys(("nvcc", "ninja", "gcc", "g++"), "/usr/bin/tool"),
        "environment": {"CUDA_HOME": "/usr/local/cuda"},
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
        "gpus": gpus,
        "driver_cuda": 13000,
        "topology": TOPOLOGY.replace("{02}", "NV18"),
        **changes,
    }


def with_gpu(**changes: str) -> list[dict[str, str]]:
    gpus: list[dict[str, str]] = facts()["gpus"]
    gpus[3] = gpus[3] | changes
    return gpus


MACHINE = [c for c in machine.CHECKS if c.name not in ("configuration", "nodes", "toolkit")]


@pytest.mark.parametrize("check", MACHINE, ids=lambda check: check.name)
def test_a_healthy_node_passes(check: Check) -> None:
    """One of its drivers is old, with cuda-compat beside it."""
    assert check.run(
        context("rstar2-qwen2.5-7b-megatron", gpu=True, facts=[facts(gpus=with_gpu(driver_version="550.54"))])
    ).words


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("versions", {"packages": facts()["packages"] | {"torch": "2.12.0"}}, "torch is 2.12.0, requirements/ pins 2.13.0"),
        ("versions", {"packages": facts()["packages"] | {"sglang": None}}, "sglang is not installed"),
        ("driver", {"gpus": []}, "names no GPU"),
        ("driver", {"gpus": with_gpu(driver_version="570.12"), "driver_cuda": 12080}, "GPU 3: driver 570.12 is older than 580"),
        ("driver", {"gpus": with_gpu(compute_mode="Exclusive_Process")}, "Exclusive_Process"),
        ("driver", {"gpus": facts()["gpus"][:4]}, "4 GPUs, the YAML's placement needs 8"),
        ("toolkit", {"tools": dict.fromkeys(("nvcc", "gcc", "g++"), "x") | {"ninja": None}}, "ninja is not on PATH"),
        ("toolkit", {"environment": {}}, "CUDA_HOME is not set"),
        ("GPU memory", {"gpus": with_gpu(**{"memory.used": "20000"})}, "GPU 3: 19.5 of 79.6 GiB are in use"),
        ("NVLink", {"topology": TOPOLOGY.replace("{02}", "SYS")}, "no NVLink between GPU0-GPU2 (SYS)"),
        ("disk", {"writable": {"/nowhere": "Read-only file system"}}, "Read-only file system"),
        ("disk", {"room_gb": {"/nowhere": 5.0}}, "5.0 GB free in /nowhere, these checks write 42."),
        ("host memory", {"host_gb": 64.0}, "64 GB of host memory, the plan needs"),
        ("host memory", {"shared_memory_gb": 0.06}, "/dev/shm has 0.06 GB"),
        (
            "temporary files",
            {"temporary": {"wanted": "/gone", "problem": "No such file", "room_gb": 1.0, "path": "/gone"}},
            "TMPDIR=/gone: No such file",
        ),
        (
            "temporary files",
            {"temporary": {"wanted": None, "problem": "", "room_gb": 0.1, "path": "/tmp"}},
            "/tmp has 0.10 GB free",
        ),
    ],
)
def test_a_fault_of_the_second_node_is_found(name: str, change: dict[str, Any], words: str) -> None:
    (check,) = [c for c in machine.CHECKS if c.name == name]
    both = [facts(), facts(**change, host="node-b")]
    here = context("rstar2-qwen2.5-14b-megatron-2nodes", gpu=True, facts=both)
    here.slots, here.nodes.slots = Slots(16, 80.0, host_gb=1900.0), tuple(range(8))
    with pytest.raises(CheckFailed, match="node-b: ") as failure:
        check.run(here)
    assert words in failure.value.words and "node-a" not in failure.value.words and check.remedy


def test_pins_are_those_of_the_files(tmp_path: Path) -> None:
    assert machine.read_pins(REQUIREMENTS, gpu=False)["torch"] == "2.13.0"
    (tmp_path / "constraints.txt").write_text("torch==9.9.9+cpu\nray[default]==1.0\nother==3\n")
    assert machine.read_pins(tmp_path, gpu=False) == {"torch": "9.9.9", "ray": "1.0"}


def test_a_configuration_that_does_not_fit_fails() -> None:
    with pytest.raises(CheckFailed, match=r"algorithm\.group_size=4"):
        machine.configuration(context("rstar2-tiny-cpu", "algorithm.group_size=4"))


def test_bandwidth_is_judged_against_the_plan() -> None:
    good = collectives.judge([400e9, 380e9], 360e9, 150e9, gpu=True, what="inside a node")
    assert "380.0 GB/s inside a node; planned 360" in good.words
    with pytest.raises(CheckFailed, match=r"40\.0 GB/s.*traffic takes a slow path"):
        collectives.judge([400e9, 40e9], 360e9, 150e9, gpu=True, what="inside a node")
    assert "no figure for CPUs" in collectives.judge([1e9], 360e9, 150e9, gpu=False, what="here").words


def test_log_probs_of_the_engine_are_judged_as_the_gate_does() -> None:
    rows = [-1.0] * engine.TOKENS
    assert engine.judge_logprobs(rows, rows, "fp32").figures["max"] == 0.0
    off = [*rows[1:], -1.2]
    with pytest.raises(CheckFailed, match=r"max 2\.0e-01; allowed max 0\.001"):
        engine.judge_logprobs(rows, off, "fp32")
    assert engine.judge_logprobs(rows, off, "bf16").words  # one token of 64 is rounding there
    with pytest.raises(CheckFailed, match="allowed mean"):
        engine.judge_logprobs(rows, [value - 0.2 for value in rows], "bf16")
    with pytest.raises(CheckFailed, match="3 tokens of 64"):
        engine.judge_logprobs(rows[:3], rows[:3], "fp32")


def told(**changes: Any) -> dict[str, Any]:
    gb = 10**9
    return {
        "used_bytes": 50 * gb,
        "freed_bytes": 48 * gb,
        "taken_again_bytes": 48 * gb,
        "sleep_seconds": 0.5,
        "wake_seconds": 0.5,
        "refused_asleep": True,
        "awake_difference": 0.01,
        "decode_tokens_per_s": 9000.0,
        "requests": 128,
        **changes,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"freed_bytes": 20 * 10**9}, r"30\.0 GB stay on each GPU, planned 3\.5; .*at most 7\.0 may stay"),
        ({"refused_asleep": False}, "generated without its memory"),
        ({"awake_difference": 0.4}, r"other log-probs: difference 4\.0e-01, allowed 0\.05"),
    ],
)
def test_an_engine_that_keeps_its_memory_fails(change: dict[str, Any], words: str) -> None:
    here = context("rstar2-qwen2.5-7b-megatron", gpu=True)
    here.found["engine"] = told()
    assert "48.0 GB freed, 2.0 GB stay on each GPU" in engine.sleep(here).words
    here.found["engine"] = told(used_bytes=12 * 10**9, freed_bytes=8 * 10**9)
    assert "4.0 GB stay" in engine.sleep(here).words, "a small share of the GPU leaves as much behind as a large one"
    here.found["engine"] = told(**change)
    with pytest.raises(CheckFailed, match=words):
        engine.sleep(here)


def test_greedy_answers_may_part_where_two_tokens_are_as_probable() -> None:
    """The first token of a random model flips by rounding in up to 2.3% of models (simulated)."""
    assert one_engine.difference([5, 6], [-1.0, -2.0], [7, 9], [-1.01, -4.0]) == pytest.approx(0.01)
    assert one_engine.difference([5, 6, 8], [-1.0, -2.0, -1.0], [5, 7, 9], [-1.0, -2.2, -7.0]) == pytest.approx(0.1)
    assert one_engine.difference([5], [-1.0], [7], [-3.0]) == pytest.approx(2.0), "other weights"
    assert one_engine.difference([], [], [], []) == math.inf


class Answers(OneNode):
    """Answers programs of ranks one after the other with given values: what GPUs would say."""

    def __init__(self, *values: Any) -> None:
        super().__init__([])
        self.values = list(values)

    def one(self, program: str, deadline_s: float, **arguments: Any) -> Any:
        return self.values.pop(0)

    def ranks(self, program: str, count: int, deadline_s: float, **arguments: Any) -> list[Any]:
        return [self.values.pop(0)]


def on_gpu(tmp_path: Path, *values: Any) -> Any:
    here = context("rstar2-qwen2.5-7b-megatron", gpu=True)
    here.scratch, here.nodes = tmp_path, Answers(*values)
    here.thin.mkdir(exist_ok=True)
    (here.thin / "config.json").write_text(json.dumps(thin_config("/models/Qwen2.5-7B", 2)))
    here.found["logprobs"] = [[-1.0]] * 12
    return here


def test_layers_of_transformer_engine_that_compute_something_else_fail(tmp_path: Path) -> None:
    def told(error: float) -> dict[str, Any]:
        return {"logprobs": [[-1.0]] * 12, "error": error, "worst": "model.norm.weight"}

    assert network.engine_layers(on_gpu(tmp_path, "transformer_engine", told(0.01))).words
    with pytest.raises(CheckFailed, match=r"gradient error 5\.0e-01 \(most in norm\.weight\).*allowed 6e-02"):
        network.engine_layers(on_gpu(tmp_path, "transformer_engine", told(0.5)))
    with pytest.raises(CheckSkipped, match="is not installed"):
        network.engine_layers(on_gpu(tmp_path, "local"))


def test_training_and_decoding_far_below_the_plan_fail(tmp_path: Path) -> None:
    figures = {"tokens_per_s": 2e4, "tflops": 400.0, "mfu": 0.4, "peak_bytes": 5e10}
    assert "MFU 40.0%" in actor.speed(on_gpu(tmp_path, figures)).words
    with pytest.raises(CheckFailed, match=r"MFU 5\.0%, planned"):
        actor.speed(on_gpu(tmp_path, figures | {"mfu": 0.05}))
    here = on_gpu(tmp_path)
    here.found["engine"] = told()
    assert "9000 tokens/s with 128 requests" in engine.decode(here).words
    here.found["engine"] = told(decode_tokens_per_s=100.0)
    with pytest.raises(CheckFailed, match=r"100 tokens/s .* means a fault"):
        engine.decode(here)


@pytest.mark.parametrize("name", ["rstar2-qwen2.5-7b-megatron", "rstar2-qwen3-30b-a3b-megatron"])
def test_layouts_are_compared_over_as_many_ranks_as_the_yaml_splits(name: str, tmp_path: Path) -> None:
    here = context(name, gpu=True)
    here.scratch = tmp_path
    here.thin.mkdir()
    raw = thin_config(here.settings.rollout.model.model_path, 2)
    (here.thin / "config.json").write_text(json.dumps(raw))
    model = here.settings.actor.model
    for key in network._LAYOUT[: 4 if here.thin_config.is_moe else 3]:
        assert network.sizes_of(here, key) == {key: max(getattr(model, key), 2)}
    here.nodes.slots = (0, 1)
    assert set(network.sizes_of(here, *network._LAYOUT[:3]).values()) == {2}


def test_a_node_that_says_nothing_of_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = FaultyNodes("cpu", (0, 1))
    nodes.fault = "no_survey"
    monkeypatch.setattr(nodes, "start_ray", lambda *wanted: ["127.0.0.1"])
    here = context()
    here.nodes = nodes
    try:
        with pytest.raises(CheckFailed, match=r"node 0 rank 0: .*TypeError"):
            machine.nodes(here)
    finally:
        nodes.close()


def test_a_yaml_whose_tools_run_no_programs_needs_no_judge() -> None:
    assert judge.judge(context("rstar2-tiny-cpu", "agentloop.tools=[]")).words == "no tool of this YAML runs programs"


def test_a_loopback_judge_of_two_nodes_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    words = ["tools.codejudge.host_addr=127.0.0.1"]
    with pytest.raises(CheckFailed, match=r"host_addr=127\.0\.0\.1 is loopback"):
        judge.judge(context("rstar2-qwen2.5-14b-megatron-2nodes", *words, gpu=True))


def test_a_judge_that_refuses_its_isolation_says_so_with_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge as nobody's user, without namespaces: its log begins with a line for every layer that is missing."""

    def refuse(self: Any) -> str:
        log = "warning: own_uid: not root\n" * 40 + "isolation 'partial' is required, this machine gives 'minimal'"
        raise JudgeServiceError(f"the Code Judge ended with code 1\n{log}")

    monkeypatch.setattr(judge.JudgeService, "begin", lambda self: None)
    monkeypatch.setattr(judge.JudgeService, "wait_ready", refuse)
    with pytest.raises(CheckFailed) as failed:
        judge.judge(context())
    assert failed.value.words == "isolation 'partial' is required, this machine gives 'minimal'"
    assert "JUDGE_REQUIRE_ISOLATION=minimal" in failed.value.remedy and "own_uid" in failed.value.details


def test_checks_use_the_slots_of_the_placement() -> None:
    part = load("rstar2-qwen2.5-7b-megatron", ["cluster.component_placement={actor: 4-5, rollout: 6-7, reward: 0}"])
    assert command.placed_slots(part.settings, Slots(8, 80.0)) == (4, 5, 6, 7)
    with pytest.raises(ConfigError, match="names slot 5"):
        command.placed_slots(part.settings, Slots(4, 80.0))
    nodes = Nodes("cuda", (4, 5, 6, 7))
    try:
        assert nodes.ranks(f"{PROGRAMS}:visible_devices", 2, 60.0) == ["4", "5"]
        assert nodes.engine(f"{PROGRAMS}:visible_devices", (4, 6), 60.0) == "4,6"
        here = context(gpu=True)
        here.nodes = nodes
        assert here.slots_per_node == 4
    finally:
        nodes.close()
    busy = context("rstar2-qwen2.5-7b-megatron", gpu=True, facts=[facts(gpus=with_gpu(**{"memory.used": "20000"}))])
    busy.nodes.slots = (4, 5, 6, 7)
    assert machine.gpu_memory(busy).words  # GPU 3 is somebody else's


@pytest.mark.parametrize(
    ("name", "words", "slots"),
    [
        ("rstar2-qwen2.5-14b-megatron", [], (0, 2)),  # TP 4 and 2
        ("rstar2-qwen2.5-7b-megatron", [], (0,)),
        ("rstar2-qwen2.5-14b-megatron-2nodes", [], (0, 2)),
        ("rstar2-qwen2.5-14b-megatron", ["cluster.component_placement={actor: 0-3, rollout: 4-7, reward: 0}"], (4, 5)),
    ],
)
def test_the_engine_is_checked_where_the_run_places_it(name: str, words: list[str], slots: tuple[int, ...]) -> None:
    settings = load(name, words).settings
    assert first_engine(settings, Slots(8 * settings.cluster.num_nodes, 80.0)) == slots


def test_the_checks_step_needs_none_of_the_users_problems(tmp_path: Path) -> None:
    """Its own have no other columns, and a random model fills its token budget."""
    code = tmp_path / "own.py"
    code.write_text(
        "def row(row): return {'prompt': row['story'], 'solutions': row['worked']}\n"
        "def score(problem, trajectory): return problem.extra['level']\n"
        "def rule(group, count, rng): return [group.problem.extra['first']]\n"
        "class Game:\n    def reset(self, problem): ...\n    def step(self, text): ...\n"
    )
    words = [f"data.rows={code}:row", f"reward.function={code}:score", f"agentloop.environment={code}:Game"]
    words += ["algorithm.trajectory_filters=[truncated]", f"algorithm.down_sampling.down_sampling_config.mode={code}:rule"]
    own = context("rstar2-tiny-cpu", *words)
    own.scratch = tmp_path
    assert len(list(all_user_code(own.settings))) == 4
    settings = whole_run.run_settings(own)
    assert list(all_user_code(settings)) == [] and settings.algorithm.trajectory_filters == []
    assert len(read_problems(settings.data.train_data_paths, settings.data)) == 64


def test_a_run_on_the_wrong_device_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = on_gpu(tmp_path)
    (here.thin / "tokenizer.json").write_text("{}")
    figures = {"device": "cpu", "actor_ranks": 8, "engines": 8, "routes": ["disk"]}
    monkeypatch.setattr(whole_run, "part", lambda *_: figures)
    with pytest.raises(CheckFailed, match="are on cpu, the YAML is for cuda"):
        whole_run.start(here)


def test_two_nodes_without_ray_address_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(CheckFailed, match="RAY_ADDRESS is not set"):
        Nodes("cpu", (0,)).start_ray(2)
    assert Nodes("cpu", (0,)).start_ray(1) == ["127.0.0.1"]


def test_a_head_that_does_not_answer_is_said_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(CheckFailed, match=r"RAY_ADDRESS=127\.0\.0\.1:1 does not answer"):
        Nodes("cpu", (0,)).start_ray(1)
    assert time.monotonic() - started < 60


def test_a_known_model_needs_no_directory() -> None:
    raw = thin_config("/models/Qwen3-30B-A3B", 2)
    assert (raw["num_hidden_layers"], raw["num_experts"], raw["hidden_size"]) == (2, 128, 2048)
    with pytest.raises(CheckFailed, match="its name is not a known model's"):
        thin_config("/models/unheard-of", 2)


# --------------------------------------------------------------------------------------------- the runner


def finding(words: str) -> Any:
    return lambda context: Finding(words)


def failing(error: Exception) -> Any:
    def run(context: Context) -> Finding:
        raise error

    return run


def test_a_failure_stops_only_what_depends_on_it() -> None:
    checks = [
        Check("a", finding("fine"), "nothing"),
        Check("b", failing(CheckFailed("broken", {"figure": 3})), "turn the screw"),
        Check("c", failing(ZeroDivisionError("by zero")), "mend it"),
        Check("d", finding("fine"), "", after=("b",)),
        Check("e", finding("fine"), "", after=("d",)),
        Check("f", failing(CheckSkipped("no experts")), ""),
        Check("g", finding("fine"), "", gpu=True),
        Check("h", finding("fine"), "", ranks=4),
        Check("i", finding("fine"), "", nodes=2),
        Check("j", finding("fine"), "", after=("a",)),
    ]
    lines: list[str] = []
    results = {result.name: result for result in run_checks(checks, context(), lines.append)}
    assert "".join(results[name].state[0] for name in "abcdefghij") == "pffsssssSp".lower()
    assert results["b"].figures == {"figure": 3} and "ZeroDivisionError" in results["c"].details
    assert "depends on `b`, which failed" in results["d"].words and "was skipped" in results["e"].words
    assert lines[1].startswith("FAILED  b  broken") and lines[1].endswith("-> turn the screw")
    assert "needs 4 slots" in results["h"].words and "needs 2 nodes" in results["i"].words


def test_a_check_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2_megatron.runs.check.runner._GRACE_S", 0.1)
    ended = threading.Event()
    checks = [
        Check("hangs", lambda context: ended.wait(), "", deadline_s=0.2),  # type: ignore[arg-type, return-value]
        Check("next", finding("fine"), "", deadline_s=60.0),
    ]
    hung, after = run_checks(checks, context(), lambda line: None)
    ended.set()
    assert (hung.state, after.state) == ("failed", "passed") and "was left behind" in hung.words


# ------------------------------------------------------------------------------------- programs of a node


def test_programs_that_hang_die_or_raise_are_answers_and_the_next_one_runs() -> None:
    agent = NodeAgent()
    jobs = [Job(rank, 2, devices=(rank,)) for rank in range(2)]
    try:
        assert all(answer.value for answer in agent.run(f"{PROGRAMS}:process_id", jobs, {}, 60.0))  # both have started
        hung = agent.run(f"{PROGRAMS}:one_hangs", jobs, {}, 3.0)
        assert hung[0].value == 0 and "did not answer within its deadline" in hung[1].error
        died = agent.run(f"{PROGRAMS}:one_dies", jobs, {}, 60.0)
        assert died[0].value == 0 and "exit code 7" in died[1].error and "last words" in died[1].log
        raised = agent.run(f"{PROGRAMS}:one_raises", jobs, {}, 60.0)
        assert "ValueError: rank 1" in raised[1].error
        with pytest.raises(CheckFailed, match="node 0 rank 1: ValueError: rank 1"):
            values(raised)
        same = [answer.value for answer in agent.run(f"{PROGRAMS}:process_id", jobs, {}, 60.0)]
        assert same == [answer.value for answer in agent.run(f"{PROGRAMS}:process_id", jobs, {}, 60.0)]
    finally:
        agent.close()


def test_a_machine_without_gpus_fails_a_gpu_yaml_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi, whatever machine this is
    settings = load("rstar2-qwen2.5-7b-megatron", [f"runner.output_dir={tmp_path}"]).settings
    lines: list[str] = []
    some = [check for check in command.CHECKS if check.name not in ("nodes", "judge")]  # which start services
    assert command.check(settings, checks=some, say=lines.append) == 1
    states = {line[8:29].strip(): line[:8].strip() for line in lines[1:-1] if not line.startswith(" ")}
    assert states["driver"] == "FAILED" and "names no GPU" in "".join(lines)
    later = [check.name for check in command.CHECKS if check.name in states and "driver" in check.after]
    assert later and {states[name] for name in [*later, "one rank", "engine", "run starts"]} == {"skipped"}
    assert [path.name for path in tmp_path.iterdir()] == ["rstar2-7b.check.json"]


def test_the_command_line_knows_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("rstar2_megatron.runs.main.check", lambda settings: seen.append(settings) or 1)
    assert main(["rstar2-tiny-cpu", "--check", "actor.seed=3"]) == 1
    assert seen[0].actor.seed == 3
    assert main(["recipe=rstar2-tiny", "--check"]) == 2
    assert "proves a machine for one configuration" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "--check" in capsys.readouterr().out
