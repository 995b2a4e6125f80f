"""scripts/slurm.sbatch under a real Slurm: two nodes, each a slurmd in a network namespace of its own with its own address.

Needs root, `apt-get install slurm-wlm`, and namespaces.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rstar2_megatron.services import loopback
from tests.e2e.runs import ROOT, arguments, read_jsonl
from tests.rollout.memorised import SETTINGS

START_S, LIMIT_S = 60, 900
NODES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
CONFIGURATION = """
ClusterName=test
FirstJobId={job}
SlurmctldHost={host}(10.77.0.1)
SlurmctldPort=17900
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={directory}/controller
SlurmdSpoolDir={directory}/%n
SlurmdPidFile={directory}/%n.pid
SlurmctldPidFile={directory}/controller.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=10.77.0.1 Port=17001 CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=10.77.0.2 Port=17002 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP
"""
pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("slurmctld"), reason="needs root and slurm-wlm"),
]


class Slurm:
    """Commands in the first node's network namespace."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        own = {*loopback.environment(), "RAY_ADDRESS"}  # what other tests of this process have set
        self.environment = {name: value for name, value in os.environ.items() if name not in own}
        self.environment |= {
            "SLURM_CONF": str(directory / "slurm.conf"),
            "NCCL_SOCKET_IFNAME": "rstar2",
            "GLOO_SOCKET_IFNAME": "rstar2",
        }
        self.log = directory / "job.log"

    def __call__(self, *words: str, **variables: str) -> str:
        command = ["nsenter", "--net=/run/netns/rstar2-n1", *words]
        environment = self.environment | variables
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def submit(self, *words: str, **variables: str) -> str:
        """Returns the job's id."""
        return self("sbatch", "--parsable", f"--output={self.log}", *words, **variables).strip()

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self("scontrol", "show", "job", job))
        assert found
        return found[1]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}; the job's log:\n{self.text()[-6000:]}"
            time.sleep(0.5)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for name in NODES:
            subprocess.run(["ip", "netns", "add", f"rstar2-{name}"], check=True)
        pair = ["link", "add", "rstar2", "netns", "rstar2-n1", "type", "veth", "peer", "name", "rstar2", "netns", "rstar2-n2"]
        subprocess.run(["ip", *pair], check=True)
        for name, address in NODES.items():
            for words in ("link set lo up", f"addr add {address}/24 dev rstar2", "link set rstar2 up"):
                subprocess.run(["ip", "-n", f"rstar2-{name}", *words.split()], check=True)
            (directory / name).mkdir()
        (directory / "controller").mkdir()
        (directory / "slurm.conf").write_text(
            CONFIGURATION.format(host=socket.gethostname(), directory=directory, job=os.getpid())
        )
        there = Slurm(directory)
        for name, daemon in (("n1", "slurmctld"), *((name, f"slurmd -N {name}") for name in NODES)):
            command = ["nsenter", f"--net=/run/netns/rstar2-{name}", *daemon.split(), "-D"]
            with (directory / f"{daemon}.log").open("wb") as output:
                daemons.append(subprocess.Popen(command, env=there.environment, stdout=output, stderr=output))
        there.until(lambda: there("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 2, "idle nodes")
        yield there
    finally:
        with contextlib.suppress(AssertionError, UnboundLocalError):
            there("scancel", "--user=root")
            time.sleep(5)
        for process in reversed(daemons):
            process.terminate()
            process.wait(30)
        for name in NODES:
            subprocess.run(["ip", "netns", "del", f"rstar2-{name}"], check=False)
        shutil.rmtree(directory, ignore_errors=True)


def left_of(job: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job:
                found.append(" ".join(process.cmdline())[:200])
    return found


def test_a_job_without_gpus_ends_with_one_sentence(slurm: Slurm) -> None:
    job = slurm.submit("--nodes=2", "scripts/slurm.sbatch", "rstar2-qwen2.5-7b-megatron", "rollout.model.model_path=/models/x")
    slurm.until(lambda: slurm.state(job) == "FAILED", "end")
    (error,) = [line for line in slurm.text().splitlines() if line.startswith("error:")]
    assert error.startswith("error: this job has no GPU on n1 n2, and") and "sbatch --gpus-per-node=8" in error


def test_a_run_survives_a_requeue_and_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Requeued by an administrator, then by itself before the time limit, which also saves the step between two checkpoints."""
    words = arguments(tmp_path / "cache", tmp_path, "walk", "runner.max_steps=40", "runner.save_interval=4")
    words += ["evaluation.before_and_after=False"]
    directory = tmp_path / "walk"
    options = ["--nodes=1", "--nodelist=n1", "--time=60", "--signal=B:USR1@60"]
    job = slurm.submit(*options, "scripts/slurm.sbatch", *words)
    slurm.until((directory / "checkpoints" / "global_step_4").is_dir, "first checkpoint")
    slurm("scontrol", "requeue", job)
    requeued = time.monotonic()
    slurm.until(lambda: "resuming from" in slurm.text(), "resume after the requeue")
    before = len(read_jsonl(directory / "metrics.jsonl"))
    slurm.until(lambda: len(read_jsonl(directory / "metrics.jsonl")) > before, "a step after the requeue")
    # Counted from the start of this attempt; the signal comes a minute earlier, so within the next one.
    limit = math.ceil((time.monotonic() - requeued) / 60) + 1
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    slurm.until(lambda: "SIGUSR2 asks for it" in slurm.text(), "end before the time limit")
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    slurm.until(lambda: slurm.text().count("resuming from") == 2, "resume after the time limit")
    told = re.findall(r"ending after step (\d+): SIGUSR2|resuming from \S+global_step_(\d+)", slurm.text())
    (_, first), (ended, _), (_, second) = told
    assert int(first) >= 4 and int(ended) > before and second == ended
    slurm.until(lambda: len(read_jsonl(directory / "metrics.jsonl")) > int(ended), "a step after it")
    steps = [row["step"] for row in read_jsonl(directory / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    slurm("scancel", job)
    slurm.until(lambda: not left_of(job), "end of all processes")
    assert slurm.state(job) == "CANCELLED"
    assert {path.name for path in (ROOT / "results" / "slurm").glob(f"{job}.*")} == {f"{job}.{n}" for n in range(3)}


def test_two_nodes_train_with_a_judge_on_both(slurm: Slurm, memorised_model: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": "right?", "solutions": ["42"], "query_id": f"right-{i}"} for i in range(2)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "rstar2-tiny-cpu",
        "cold_start.enabled=False",
        "cold_start.builder=null",
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
        "algorithm.sampling_params.temperature=0.2",
        "algorithm.down_sampling.do_down_sampling=False",
        "runner.max_steps=2",
        f"runner.output_dir={tmp_path}",
        "runner.experiment_name=two",
    ]
    job = slurm.submit("--nodes=2", "scripts/slurm.sbatch", *words, RSTAR2_JUDGE="all")
    slurm.until(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), "end")
    assert slurm.state(job) == "COMPLETED", slurm.text()[-6000:]
    steps = read_jsonl(tmp_path / "two" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/tool_outcome/ok"] >= 2 and row["rollout/dropped_infrastructure"] == 0 for row in steps)
    logs = ROOT / "results" / "slurm" / f"{job}.0"
    told = "".join(path.read_text() for path in logs.glob("*.log"))  # the nodes of this machine have one host name
    assert told.count("slots, isolation") == 2
    assert list(logs.glob("n?.ray/raylet.out"))  # the two nodes have one /tmp here
    slurm.until(lambda: not left_of(job), "end of all processes")
