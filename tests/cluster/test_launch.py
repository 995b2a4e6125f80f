"""What a launch refuses, and what it hands on, without starting RLinf."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rstar2_megatron.cluster import cpu_slots
from rstar2_megatron.cluster.existing_ray import ClusterError
from rstar2_megatron.cluster.launch import PlacementError, TrainingCluster, _not_forwarded
from rstar2_megatron.cluster.ray_head import RayHead, RayHeadError
from rstar2_megatron.settings.load import load_settings, to_dict_config

WAITS = """
from rstar2_megatron.cluster.launch import await_cluster
from rstar2_megatron.settings.load import load_settings
await_cluster(load_settings("rstar2-tiny-cpu", ["cluster.num_nodes=2", "cluster.node_wait_timeout_s=2"]).cluster)
"""


@pytest.mark.ci
def test_a_head_that_never_gets_its_nodes_is_an_error_in_time(cluster: TrainingCluster) -> None:
    """In a process of its own, because this one is connected to the head already."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=200)
    error = done.stderr.splitlines()[-1]
    assert "ClusterError" in error and re.search(
        r"has 1 of cluster.num_nodes=2 nodes after 2 s .* start the others with", error
    )


@pytest.fixture
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RAY_ADDRESS, as long as the test lasts."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.ci
def test_a_head_whose_processes_were_too_slow_is_started_again(
    no_address: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray ends itself after 30 s on a machine that is too busy, which this Python says of its first start."""
    slow_once = tmp_path / "python"
    slow_once.write_text(
        f"#!/bin/sh\nif mkdir {tmp_path}/first 2>/dev/null; then\n"
        '  echo "Exception: The current node timed out during startup."; exit 1\nfi\n'
        f'exec {sys.executable} "$@"\n'
    )
    slow_once.chmod(0o755)
    monkeypatch.setattr("rstar2_megatron.cluster.ray_head.sys.executable", str(slow_once))
    head = RayHead(num_cpus=1)
    try:
        assert head.start() == os.environ["RAY_ADDRESS"]
        assert "they are started again" in caplog.text
    finally:
        head.stop()
    assert "RAY_ADDRESS" not in os.environ


def test_a_head_that_fails_otherwise_is_not_started_again(
    no_address: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = tmp_path / "python"
    fails.write_text(f"#!/bin/sh\necho start >> {tmp_path}/starts; echo no port; exit 3\n")
    fails.chmod(0o755)
    monkeypatch.setattr("rstar2_megatron.cluster.ray_head.sys.executable", str(fails))
    with pytest.raises(RayHeadError, match="ended with code 3; its output:\nno port"):
        RayHead(num_cpus=1).start()
    assert (tmp_path / "starts").read_text() == "start\n"


@pytest.mark.parametrize("listener", ["nobody", "silent", "another server"])
def test_a_head_that_does_not_answer_is_an_error_in_seconds(monkeypatch: pytest.MonkeyPatch, listener: str) -> None:
    """On one node too."""
    monkeypatch.setattr("rstar2_megatron.cluster.existing_ray._ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = 1 if listener == "nobody" else server.getsockname()[1]
        if listener == "another server":
            threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request"), daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        settings = load_settings("rstar2-tiny-cpu", [])
        started = time.monotonic()
        with pytest.raises(ClusterError, match=rf"RAY_ADDRESS=127\.0\.0\.1:{port} does not answer"):
            TrainingCluster(settings, to_dict_config(settings)).start()
        assert time.monotonic() - started < 60, "Ray itself waits for minutes"


def test_a_directory_of_this_machine_is_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tempfile.gettempdir()
    monkeypatch.setenv("TMPDIR", directory)
    with _not_forwarded("TMPDIR"):
        assert "TMPDIR" not in os.environ
    assert os.environ["TMPDIR"] == directory


class Counted:
    """What RLinf counts: the type of accelerators of each node."""

    def __init__(self, *types: str) -> None:
        self.types, self.num_nodes, self.num_accelerators = types, len(types), 8 * len(types)

    def get_node_info(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(accelerator_type=self.types[rank])


def test_gpus_that_cuda_cannot_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no CUDA; a broken fabric manager or an old driver looks the same to torch, while NVML counts eight."""
    settings = load_settings("rstar2-tiny-cpu", [])
    cluster = TrainingCluster(settings, to_dict_config(settings))
    cluster._cluster = Counted("NV_GPU")  # type: ignore[assignment]
    with pytest.raises(PlacementError, match=r"8 accelerators \(NV_GPU\).*nvidia-fabricmanager.*CUDA_VISIBLE_DEVICES"):
        cluster._device()
    cluster._cluster = Counted("NO_ACCEL", "NO_ACCEL")  # type: ignore[assignment]
    assert cluster._device() == "cpu"
    cluster._cluster = Counted("NO_ACCEL", "NV_GPU")  # type: ignore[assignment]  # the driver's node has none
    assert cluster._device() == "cuda"


def test_cpu_slots_come_before_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RLinf's node reads them: the first resource of a type counts."""
    from rlinf.scheduler.hardware import Hardware
    from rlinf.scheduler.hardware.accelerators.nvidia_gpu import NvidiaGPUManager

    monkeypatch.setattr(NvidiaGPUManager, "get_num_devices", staticmethod(lambda: 8))
    monkeypatch.setattr(NvidiaGPUManager, "get_accelerator_model", staticmethod(lambda: "NVIDIA H100"))

    def first(configs: list[Any]) -> tuple[int, str]:
        resources = [policy.enumerate(0, configs) for policy in Hardware.policy_registry]
        found = next(r for r in resources if r is not None and r.type == cpu_slots.Accelerator.HW_TYPE)
        return found.count, found.infos[0].model

    assert first([cpu_slots.CPUSlotsConfig(node_rank=0, num_slots=2)]) == (2, "NO_ACCEL:cpu-slot")
    assert first([])[0] == 8


@pytest.mark.parametrize(("address", "mode"), [("", "token 64"), ("10.0.0.1:6379", "None 0")])
def test_the_private_head_asks_for_a_token_of_its_own(address: str, mode: str) -> None:
    program = "import os, rstar2_megatron.cluster; e = os.environ.get; print(e('RAY_AUTH_MODE'), len(e('RAY_AUTH_TOKEN', '')))"
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")}
    environment |= {"RAY_ADDRESS": address} if address else {}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == mode, done.stderr
