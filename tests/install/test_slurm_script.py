"""scripts/slurm.sbatch without a Slurm, whose commands are stood in for; tests/release/test_slurm.py has a real one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from rstar2_megatron.services.process import free_port
from rstar2_megatron.services.redis_server import find_redis_server
from tests.e2e.runs import ROOT

SCRIPTS = ("scripts/slurm.sbatch", "scripts/install/slurm_node.sh", "scripts/install/gpu_environment.sh")
STANDS_IN = {
    # the command on this node, with what scripts/slurm.sbatch hands it
    "srun": """while [ "${1#-}" != "$1" ]; do shift; done
case $* in *slurm_node*) ;; *) exec "$@" ;; esac
echo "node $head $port"
echo $$ > "$0.pid"
exec python3 -c "import socket, sys, time
listeners = [socket.create_server(('$head', $port + i)) for i in range(3)]
time.sleep(60)" """,
    "scancel": 'kill "$(cat "${0%scancel}srun.pid")"',
    "scontrol": 'echo "scontrol $*"',
    "hostname": 'echo "127.1.2.3 192.168.0.7 fd00::1 "',
    "ip": """echo "4: $6    inet 127.9.8.7/24 brd 127.9.8.255 scope global $6\\       valid_lft forever"
echo "4: $6    inet 127.9.8.8/24 scope global secondary $6" """,
}
JOB = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "gpu-7", "JUDGE_TOKEN": "token"}
TINY = ("rstar2-tiny-cpu", "runner.max_steps=3")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The scripts, and a run that tells its words and ends as one that SIGUSR2 has ended."""
    for name in SCRIPTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "run_rstar2.sh").write_text('echo "run $*, Ray at ${RAY_ADDRESS:-none}"; exit ${ENDS_WITH:-0}')
    (tmp_path / "bin").mkdir()
    for name, text in STANDS_IN.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def job(project: Path, *words: str, **variables: str) -> tuple[int, list[str], str]:
    """Exit code, lines of output, errors."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY_", "NCCL_", "GLOO_"))
    }
    environment |= {"PATH": f"{project}/bin:{os.environ['PATH']}", "RSTAR2_VENV": str(Path(sys.executable).parents[1])}
    environment |= {"PYTHONPATH": str(ROOT), "SLURM_SUBMIT_DIR": str(project), **variables}
    command = ["bash", str(ROOT / "scripts" / "slurm.sbatch"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=project)
    return ended.returncode, ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_the_scripts(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


@pytest.mark.parametrize(
    ("words", "variables", "sentence"),
    [
        ((), {}, "this runs in a Slurm job: sbatch --nodes=1"),
        ((), {**JOB, "SLURM_SUBMIT_DIR": "/"}, "submit from the project's root, not from /"),
        ((), {**JOB, "RSTAR2_VENV": "/nowhere"}, "no environment in /nowhere; make it"),
        (("rstar2-tiny-cpu", "runner.steps=3"), JOB, "unknown key runner.steps"),
        pytest.param(
            ("rstar2-qwen2.5-7b-megatron",),
            JOB,
            "this job has no GPU on gpu-7, and",
            marks=pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has GPUs"),
        ),
    ],
)
def test_what_cannot_run_ends_with_one_sentence(
    project: Path, words: tuple[str, ...], variables: dict[str, str], sentence: str
) -> None:
    code, _, errors = job(project, *words, **variables)
    (error,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert code == 2 and error.startswith(f"error: {sentence}"), errors


@pytest.mark.parametrize(("interface", "head"), [({}, "127.1.2.3"), ({"NCCL_SOCKET_IFNAME": "ib0"}, "127.9.8.7")])
def test_two_nodes_share_a_ray_whose_head_has_the_interfaces_address(
    project: Path, interface: dict[str, str], head: str
) -> None:
    code, lines, errors = job(project, *TINY, **JOB, **interface)
    told = {f"node {head} 21035", f"run cluster.num_nodes=2 {' '.join(TINY)}, Ray at {head}:21035"}
    assert (code, set(lines)) == (0, told), errors


def test_one_node_needs_no_ray_and_a_run_that_was_ended_is_queued_again(project: Path) -> None:
    code, lines, errors = job(project, *TINY, **JOB | {"SLURM_JOB_NUM_NODES": "1", "ENDS_WITH": "140"})
    run = f"run cluster.num_nodes=1 {' '.join(TINY)}, Ray at none"
    assert (code, lines) == (140, [run, "scontrol requeue 12345"]), errors
    code, lines, _ = job(project, *TINY, **JOB | {"SLURM_JOB_NUM_NODES": "1", "ENDS_WITH": "1"})
    assert (code, lines) == (1, [run])


def test_a_judge_on_all_nodes_is_the_runs(project: Path) -> None:
    _, lines, errors = job(project, *TINY, **JOB | {"SLURM_JOB_NUM_NODES": "1", "RSTAR2_JUDGE": "all"})
    judge = "tools.codejudge.host_addr=127.1.2.3 tools.codejudge.host_port=21037"
    assert f"run cluster.num_nodes=1 {' '.join(TINY)} {judge}, Ray at none" in lines, errors


def test_a_nodes_judge_has_a_redis_with_the_jobs_token_that_ps_never_shows(project: Path) -> None:
    """With the real judge and Redis; Ray's command is stood in for."""
    arguments = project / "arguments"
    for name, text in {
        "python": f'exec {sys.executable} "$@"',
        "ray": "exec sleep 60",
        "redis-server": f'echo "$*" > {arguments}; exec {find_redis_server()} "$@"',
    }.items():
        program = project / "venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    port = next(port for port in iter(free_port, 0) if _free(port + 1)) - 1  # Ray's; the next two are Redis' and the judge's
    environment = os.environ | {
        "PATH": f"{project}/venv/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": f"test-{os.getpid()}",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "gpu-7",
        "RSTAR2_JUDGE": "all",
        "JUDGE_TOKEN": "token-of-the-job",
        "head": "127.0.0.1",
        "port": str(port),
        "logs": str(project),
        "venv": str(project / "venv"),
    }
    script = subprocess.Popen(["bash", "scripts/install/slurm_node.sh"], cwd=ROOT, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not _is_ready(f"http://127.0.0.1:{port + 2}/ready"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port + 1).ping()
        assert redis.Redis(port=port + 1, password="token-of-the-job").ping()
        assert "token-of-the-job" not in arguments.read_text()
    finally:
        family = [psutil.Process(script.pid), *psutil.Process(script.pid).children(recursive=True)]
        os.killpg(script.pid, signal.SIGTERM)  # as scancel does
        _, left = psutil.wait_procs(family, timeout=30)
        for process in left:
            process.kill()
    assert not left


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
