"""Two nodes on one machine: a Ray cluster of two raylets, the actor on one, engine and judge worker on the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rstar2_megatron.services.loopback import environment
from rstar2_megatron.services.process import free_port
from rstar2_megatron.services.redis_server import RedisServer
from tests.e2e.runs import ROOT, SCRIPT, ProgramRun, read_jsonl, short_directory
from tests.rollout.memorised import SETTINGS

LIMIT_S = 600


@pytest.fixture
def ray_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster of two nodes, ranked as RLinf wants it: RLINF_NODE_RANK is set before each `ray start`."""
    from ray.cluster_utils import Cluster

    settings = {**environment(), "RAY_worker_niceness": "0", "PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    directory = str(short_directory("rstar2-2n-"))
    cluster = Cluster()
    try:
        # Here Cluster writes its address, not where temp_dir says; what it takes by default may not exist.
        monkeypatch.setenv("RAY_TMPDIR", directory)
        os.mkdir(f"{directory}/ray")
        for rank in range(2):
            monkeypatch.setenv("RLINF_NODE_RANK", str(rank))
            cluster.add_node(
                num_cpus=16,
                node_ip_address="127.0.0.1",
                include_dashboard=False,
                temp_dir=f"{directory}/ray",
                **({"gcs_server_port": free_port()} if not rank else {}),
            )
        for name in ("RLINF_NODE_RANK", "RAY_TMPDIR"):
            monkeypatch.delenv(name)
        yield cluster.address
    finally:
        monkeypatch.setenv("RAY_TMPDIR", directory)  # it removes the address that it wrote
        cluster.shutdown()


def raylet_of(process: psutil.Process) -> int:
    """The raylet that a worker process belongs to."""
    return next(p.pid for p in process.parents() if "raylet" in p.name())


def workers_by_raylet() -> dict[str, int]:
    """Raylet of the actor, the engine's worker and the judge, by the names Ray gives their processes."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            for name in ("ActorWorker", "RolloutWorker", "rstar2_megatron.judge worker"):
                if name in title and "multiprocessing" not in title:
                    found[name] = raylet_of(process)
        except (psutil.NoSuchProcess, StopIteration):
            continue
    return found


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_actor_and_engine_on_different_nodes(ray_address: str, memorised_model: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": "right?", "solutions": ["42"], "query_id": f"right-{i}"} for i in range(2)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    redis, port_file = RedisServer(), tmp_path / "judge.json"
    redis.start()
    front = subprocess.Popen(
        [
            *(sys.executable, "-m", "rstar2_megatron.judge", "serve", "--redis-uri", redis.uri),
            *("--port-file", str(port_file), "--exit-with-parent"),
        ],
        cwd=ROOT,
    )
    run: ProgramRun | None = None
    try:
        started = subprocess.run(
            [sys.executable, "-m", "tests.e2e.judge_on_second_node", ray_address, redis.uri],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert started.stdout == "judge worker on node 1\n", started.stderr[-3000:]
        words = [
            "rstar2-tiny-cpu",
            "cold_start.enabled=False",
            "cold_start.builder=null",
            "cluster.num_nodes=2",
            "cluster.node_groups=[{label: cpu, node_ranks: 0-1, hardware: {type: CPUSlots, configs: "
            "[{node_rank: 0, num_slots: 1}, {node_rank: 1, num_slots: 1}]}}]",
            "cluster.component_placement={actor: 0, rollout: 1, reward: 0}",
            "actor.model.tensor_model_parallel_size=1",
            f"rollout.model.model_path={memorised_model}",
            "rollout.max_total_tokens=8192",
            f"data.train_data_paths=[{problems}]",
            "data.val_data_paths=[]",
            "data.rollout_batch_size=1",
            f"agentloop.system_prompt='{SETTINGS.system_prompt}'",
            "agentloop.max_assistant_turns=2",
            "algorithm.group_size=4",
            "algorithm.sampling_params.temperature=0.2",  # what the model has learnt, nearly always
            "algorithm.down_sampling.do_down_sampling=False",
            "algorithm.recompute_logprobs=True",
            "algorithm.importance_sampling_fix=True",
            "tools.codejudge.host_addr=127.0.0.1",
            f"tools.codejudge.host_port={json.loads(port_file.read_text())['url'].rpartition(':')[2]}",
            "runner.max_steps=2",
            f"runner.output_dir={tmp_path}",
            "runner.experiment_name=two",
        ]
        command = ["env", f"RAY_ADDRESS={ray_address}", "bash", str(SCRIPT), *words]
        run = ProgramRun(command, tmp_path / "two.log").start()
        run.wait_for(lambda: "ready:" in run.text(), LIMIT_S, "readiness")
        where = workers_by_raylet()
        assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    finally:
        if run is not None:
            run.kill_all()
        front.terminate()
        front.wait(30)
        redis.stop()
    assert set(where) == {"ActorWorker", "RolloutWorker", "rstar2_megatron.judge worker"}
    assert where["RolloutWorker"] == where["rstar2_megatron.judge worker"] != where["ActorWorker"]
    steps = read_jsonl(tmp_path / "two" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/tool_outcome/ok"] >= 2 and row["rollout/dropped_infrastructure"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-3
        assert row["train/actor/ratio"] == pytest.approx(1.0, abs=1e-6)  # to the actor's own log-probs
        assert row["train/actor/tis_ratio"] == pytest.approx(1.0, abs=1e-3)
        assert row["train/actor/tis_clip_fraction"] == 0
    versions = {v for row in read_jsonl(tmp_path / "two" / "trajectories.jsonl") for *_, v in row["versions"]}
    assert versions == {0, 1}
