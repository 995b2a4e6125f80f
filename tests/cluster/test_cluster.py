"""Real Ray, RLinf cluster and placement on CPU slots; one cluster serves all tests of this file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rstar2_megatron.cluster.calls import ChannelReader, DeadlineExceeded, WorkerFailed, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.weights import STEP_TIMEOUT_S
from rstar2_megatron.settings.load import load_settings, to_dict_config
from rstar2_megatron.settings.schema import Settings, WeightSyncSettings
from rstar2_megatron.training.gates import GateError
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.training.weight_sync import WeightSync
from rstar2_megatron.weights.route import RouteKind, make_route
from tests.cluster.workers import Fault, KillableEngine, Receiver, Sender
from tests.rollout.tiny import make_model


@pytest.fixture
def settings() -> Settings:
    return load_settings("rstar2-tiny-cpu", [])


@pytest.fixture(scope="module")
def cluster() -> Iterator[TrainingCluster]:
    settings = load_settings("rstar2-tiny-cpu", [])
    cluster = TrainingCluster(settings, to_dict_config(settings))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.close()


def processes_of(cluster: TrainingCluster) -> list[psutil.Process]:
    """Everything the cluster runs; other tests' processes hang on pytest too, these hang on the Ray head."""
    assert cluster._head is not None and cluster._head._process is not None
    head = psutil.Process(cluster._head._process.pid)
    return [head, *head.children(recursive=True)]


@pytest.fixture(scope="module")
def senders(cluster: TrainingCluster) -> WorkerGroup:
    group = cluster._launch(Sender, "Senders", "actor")
    group.call("rank", timeout_s=240)
    return group


@pytest.fixture(scope="module")
def receivers(cluster: TrainingCluster) -> WorkerGroup:
    group = cluster._launch(Receiver, "Receivers", "rollout", max_concurrency=16)
    group.call("place", timeout_s=240)
    return group


def test_placement_gives_each_component_its_slots(cluster, senders: WorkerGroup, receivers: WorkerGroup) -> None:
    assert cluster.device == "cpu"
    assert cluster._cluster.num_accelerators == 2
    assert senders.call("rank", timeout_s=240) == [0, 1]
    assert len(receivers) == 2  # rollout TP 1 on two slots: two engines


def test_a_failure_on_one_rank_is_raised_while_the_others_hang(senders: WorkerGroup) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="no luck on rank 1"):
        senders.call("fail_on", 1, timeout_s=60)
    assert time.monotonic() - start < 20


def test_deadline(senders: WorkerGroup) -> None:
    with pytest.raises(DeadlineExceeded, match=r"Senders.sleep did not finish within 1 s"):
        senders.call("sleep", 20.0, timeout_s=1.0)


@pytest.mark.parametrize("kind", ["cuda_ipc", "shared_memory", "broadcast", "disk"])
def test_weights_arrive_bit_by_bit_on_every_route(
    senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path, kind: RouteKind
) -> None:
    """Also by CUDA IPC, whose buffers lie in host memory here."""
    places = senders.call("place", timeout_s=60), receivers.call("place", timeout_s=60)
    route = make_route(kind, "Senders", *places, bucket_bytes=9000, directory=str(tmp_path / "weights"))
    receivers.call("set_engine_workers", receivers.workers, timeout_s=60)
    receiving = receivers.start("receive", route)
    sent = senders.call("send", route, receivers.workers, timeout_s=60)
    figures, sums = sent[0]
    received = receiving.result(20)
    assert [arrived for arrived, _ in received] == [sums, sums]
    assert all(count == figures.num_buckets >= 5 for _, count in received)
    assert figures.num_bytes == 4 * sum(100 * (10 + i) for i in range(7)) + 66 + 60_000 + 96
    assert sent[1][0].num_bytes == (figures.num_bytes if kind == "cuda_ipc" else 0)
    senders.call("forget", timeout_s=60)
    assert not list(tmp_path.glob("weights/*"))


def with_route(settings: Settings, directory: Path, route: str = "auto") -> Settings:
    settings.runner.step_timeout_s = 60.0
    settings.actor.weight_sync = WeightSyncSettings.model_validate(
        {"route": route, "bucket_mb": 1, "directory": str(directory)}
    )
    settings.actor.group_name, settings.rollout.group_name = "Senders", "Receivers"
    return settings


def sync_of(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, directory: Path, route: str = "auto"
) -> WeightSync:
    return WeightSync(with_route(settings, directory, route), senders, receivers, "cpu")


def assert_synced(senders: WorkerGroup, receivers: WorkerGroup, version: int) -> None:
    sums = senders.call("weights_checksum", timeout_s=60)[0]
    assert receivers.call("held", timeout_s=60) == [(version, sums)] * 2


def test_routes_that_fail_give_way_down_to_the_disk(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """First all goes by shared memory; then the engines no longer see the actor's /proc, so only files are left."""
    sync = sync_of(settings, senders, receivers, tmp_path / "weights")
    receivers.call("hide", None, timeout_s=60)
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert sync.route == "shared_memory"
    assert_synced(senders, receivers, 1)
    receivers.call("hide", "/proc/", timeout_s=60)
    metrics = sync.run(2)
    assert metrics["actor/sync_fallbacks"] == 2.0 and sync.route == "disk"  # broadcast ends in shared memory too
    assert metrics["actor/sync_bytes"] > 80_000
    assert_synced(senders, receivers, 2)
    assert not list(tmp_path.glob("weights/*"))
    assert sync.run(3)["actor/sync_fallbacks"] == 2.0
    assert_synced(senders, receivers, 3)


def test_a_trainer_compares_checksums_when_the_route_has_changed(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Training continues when a route fails and the next delivers everything. A route that loses a tensor ends the run."""

    def trainer() -> Trainer:
        there = with_route(settings, tmp_path / "weights")
        coordinator: Any = None  # asked for nothing by a sync
        return Trainer(there, senders, receivers, coordinator, device="cpu", colocated=False)

    receivers.call("hide", "/proc/", timeout_s=60)
    receivers.call("lose", None, timeout_s=60)
    assert trainer().sync_weights(1)["actor/sync_fallbacks"] == 2.0
    assert_synced(senders, receivers, 1)
    receivers.call("lose", "layer.3.weight", timeout_s=60)
    try:
        with pytest.raises(GateError, match=r"1 of 10 tensors of engine 0 differ .*layer\.3\.weight"):
            trainer().sync_weights(2)
    finally:
        receivers.call("lose", None, timeout_s=60)
        receivers.call("hide", None, timeout_s=60)


def test_the_last_routes_failure_is_raised_and_the_workers_go_on(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Named routes have no fallback. Whoever fails, sender or receiver, nobody stays in the transfer."""
    receivers.call("hide", "/proc/", timeout_s=60)
    with pytest.raises(WorkerFailed, match="is not in this container"):
        sync_of(settings, senders, receivers, tmp_path, "shared_memory").run(1)
    receivers.call("hide", None, timeout_s=60)
    (tmp_path / "file").write_text("a directory cannot be made in a file")
    with pytest.raises(WorkerFailed, match="Not a directory"):
        sync_of(settings, senders, receivers, tmp_path / "file" / "weights", "disk").run(2)
    sync_of(settings, senders, receivers, tmp_path, "broadcast").run(3)
    assert_synced(senders, receivers, 3)


# Every function that a bucket passes, in order. On a route with a host copy also its reading after the sync.
SENDER_STEPS = {
    "cuda_ipc": [
        "_targets",
        "WeightSender._send_bucket",
        "flatten",
        "handle_of",
        "WeightSender._deliver",
        "_fits_host",
        "SharedBucket",
        "_demand_loaded",
    ],
    "shared_memory": ["WeightSender._send_bucket", "SharedBucket", "WeightSender._deliver", "_demand_loaded"],
    "broadcast": ["WeightSender._send_bucket", "WeightSender._deliver", "_within", "_demand_loaded"],
    "disk": ["WeightSender._send_bucket", "SharedBucket", "WeightSender._deliver", "_demand_loaded"],
}
ONCE = ("WeightSender.forget", "_targets")  # the others once a bucket
RECEIVER_STEPS = {
    "cuda_ipc": ["WeightReceiver._transfer_of", "_Transfer.add_part", "DeviceBucket", "read_bucket", "read_kept"],
    "shared_memory": ["WeightReceiver._transfer_of", "OpenedBucket", "_Transfer.put", "read_bucket"],
    "broadcast": ["SharedBucket", "OpenedBucket", "_Transfer.put", "read_bucket"],
    "disk": ["WeightReceiver._transfer_of", "OpenedBucket", "_Transfer.put", "read_bucket"],
}


@pytest.mark.parametrize("kind", SENDER_STEPS)
def test_a_failure_at_any_step_of_any_route_ends_in_the_next_route(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path, kind: RouteKind
) -> None:
    """At the first bucket and in the middle, of a sender and of a receiver."""
    steps = [(senders, step) for step in SENDER_STEPS[kind]]
    steps += [(receivers, step) for step in RECEIVER_STEPS[kind]]
    with_route(settings, tmp_path).actor.weight_sync.bucket_mb = 0  # a bucket for each tensor
    for version, (group, step) in enumerate(steps):
        sync = WeightSync(settings, senders, receivers, "cuda")
        sync._routes = [kind, "disk"]
        group.call("plant", Fault(step, at=0 if step in ONCE else version % 3), ranks=[0], timeout_s=60)
        started = time.monotonic()
        assert sync.run(version)["actor/sync_fallbacks"] == 1.0, step
        assert time.monotonic() - started < STEP_TIMEOUT_S, step
        assert group.call("fired", ranks=[0], timeout_s=60) == [True]
        assert_synced(senders, receivers, version)


def test_a_broadcast_that_brings_nothing_ends_in_the_next_route(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """RLinf logs an error of NCCL or gloo, and hands over the memory as it is."""
    with_route(settings, tmp_path).actor.weight_sync.bucket_mb = 0
    sync = WeightSync(settings, senders, receivers, "cpu")
    sync._routes = ["broadcast", "disk"]
    receivers.call("plant", Fault("WeightReceiver._join_broadcast", at=1, how="blank"), ranks=[0], timeout_s=60)
    assert sync.run(1)["actor/sync_fallbacks"] == 1.0
    assert receivers.call("fired", ranks=[0], timeout_s=60) == [True]
    assert_synced(senders, receivers, 1)


def test_an_actor_rank_that_dies_in_a_sync_is_named_in_seconds(
    cluster, settings: Settings, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Its death ends the run, with the call and the rank. `test_worker_lost` has the death of a rollout worker."""
    doomed = cluster._launch(Sender, "DoomedSenders", "actor")
    sync = WeightSync(with_route(settings, tmp_path), doomed, receivers, "cpu")
    doomed.call("plant", Fault("SharedBucket", how="die"), ranks=[0], timeout_s=60)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"DoomedSenders\..*, rank 0: the worker process died"):
        sync.run(1)
    assert time.monotonic() - started < STEP_TIMEOUT_S
    doomed.kill()


def test_the_host_copy_of_a_device_route_is_whole(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Two actor ranks of one node write its buckets in turns."""
    with_route(settings, tmp_path).actor.weight_sync.bucket_mb = 0
    sync = WeightSync(settings, senders, receivers, "cuda")
    assert sync.route == "cuda_ipc"
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert_synced(senders, receivers, 1)
    sums = senders.call("weights_checksum", timeout_s=60)[0]
    assert receivers.call("kept", timeout_s=60) == [sums, sums]


@pytest.mark.timeout(600)
def test_killed_engines_get_the_weights_of_a_device_route_again(
    cluster, settings: Settings, senders: WorkerGroup, tmp_path: Path
) -> None:
    """Real engines, killed after a sync as version 0 and in the middle of the next one: no route is given up."""
    model = make_model(tmp_path / "model")
    settings.rollout.model.model_path = str(model)
    settings.rollout.max_engine_restarts = 1
    settings.runner.logger.log_path = str(tmp_path)
    with_route(settings, tmp_path).actor.weight_sync.bucket_mb = 0
    settings.rollout.group_name = "Engines"
    engines = cluster._launch(KillableEngine, "Engines", "rollout", settings, "cpu", max_concurrency=64)
    try:
        engines.call("start_engine", str(model), "http://127.0.0.1:9", timeout_s=300)
        sync = WeightSync(settings, senders, engines, "cuda")
        assert sync.route == "cuda_ipc"

        def assert_held(version: int) -> None:
            sums = senders.call("weights_checksum", timeout_s=60)[0]
            assert engines.call("recover", timeout_s=300) == [version] * 2
            assert engines.call("weights_checksum", timeout_s=60) == [sums, sums]

        senders.call("use_model", str(model), 1.5, timeout_s=60)  # not what the files hold
        sync.run(0)
        engines.call("kill_engine", ranks=[0], timeout_s=60)
        assert_held(0)
        senders.call("use_model", str(model), 1.25, timeout_s=60)
        engines.call("kill_at_bucket", 2, ranks=[1], timeout_s=60)
        assert sync.run(1)["actor/sync_fallbacks"] == 0.0
        assert_held(1)
        engines.call("kill_engine", ranks=[0], timeout_s=60)  # the copy serves again
        assert_held(1)
    finally:
        senders.call("use_model", "", 1.0, timeout_s=60)
        engines.call("shutdown", timeout_s=60)
        engines.kill()


def test_channel_carries_items_and_reader_has_a_deadline(cluster, receivers: WorkerGroup) -> None:
    reader = ChannelReader(cluster.channel, "out")
    with pytest.raises(DeadlineExceeded):
        reader.get(timeout_s=1.2)
    echo = receivers.start("echo", cluster.channel)
    for i in range(8):
        cluster.channel.put(i, key="in")
    for _ in range(len(receivers)):
        cluster.channel.put(None, key="in")
    got = [reader.get(timeout_s=60, while_waiting=echo.check) for _ in range(8)]
    assert sorted(item for _, item in got) == list(range(8))
    assert sum(echo.result(30)) == 8
    assert reader.close()
    with pytest.raises(WorkerLost, match="closed"):
        reader.get(timeout_s=1.0)


def test_nothing_listens_beyond_loopback(cluster, senders: WorkerGroup, receivers: WorkerGroup) -> None:
    family = processes_of(cluster)
    outside = {
        (p.name(), c.laddr.ip)
        for p in [psutil.Process(), *family]
        for c in p.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"
    }
    assert not outside
    assert any("ray" in p.name() for p in family)  # the processes we speak about are there


def test_a_dead_worker_is_reported_and_close_leaves_nothing(cluster) -> None:
    """Last in this file: it kills a worker of a group of its own, then closes the cluster."""
    doomed = cluster._launch(Sender, "Doomed", "actor")
    assert doomed.call("rank", timeout_s=60) == [0, 1]
    with pytest.raises(WorkerLost, match="Doomed"):
        doomed.call("die", timeout_s=60)
    family = processes_of(cluster)
    cluster.close()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
