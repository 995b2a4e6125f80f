"""Real Ray, RLinf cluster and placement on CPU slots; one cluster serves all tests of this file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rstar2_megatron.cluster.calls import ChannelReader, DeadlineExceeded, Group, WorkerFailed, WorkerLost
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.settings.load import load_settings, to_dict_config
from rstar2_megatron.settings.schema import Settings, WeightSyncSettings
from rstar2_megatron.training.gates import GateError
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.training.weight_sync import WeightSync
from rstar2_megatron.weights.route import Place, RouteKind, make_route
from tests.cluster.workers import Receiver, Sender


@pytest.fixture
def settings() -> Settings:
    return load_settings("rstar2-tiny-cpu", [])[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TrainingCluster]:
    settings, _ = load_settings("rstar2-tiny-cpu", [])
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
def senders(cluster: TrainingCluster) -> Group:
    return cluster._launch(Sender, "Senders", "actor")


@pytest.fixture(scope="module")
def receivers(cluster: TrainingCluster) -> Group:
    return cluster._launch(Receiver, "Receivers", "rollout", max_concurrency=16)


def test_placement_gives_each_component_its_slots(cluster, senders: Group, receivers: Group) -> None:
    assert cluster.device == "cpu"
    assert cluster._cluster.num_accelerators == 2
    assert senders.call("rank", timeout_s=60) == [0, 1]
    assert len(receivers) == 2  # rollout TP 1 on two slots: two engines


def test_a_failure_on_one_rank_is_raised_while_the_others_hang(senders: Group) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="no luck on rank 1"):
        senders.call("fail_on", 1, timeout_s=60)
    assert time.monotonic() - start < 20


def test_deadline(senders: Group) -> None:
    with pytest.raises(DeadlineExceeded, match=r"Senders.sleep did not finish within 1 s"):
        senders.call("sleep", 20.0, timeout_s=1.0)


@pytest.mark.parametrize("kind", ["shared_memory", "broadcast", "disk"])
def test_weights_arrive_bit_by_bit_on_every_route(
    senders: Group, receivers: Group, tmp_path: Path, kind: RouteKind
) -> None:
    places = (senders.call("place", timeout_s=60), [Place(0), Place(0)])
    route = make_route(
        kind, "Senders", "Receivers", *places, bucket_bytes=9000, directory=str(tmp_path / "weights")
    )
    receiving = receivers.start("receive", route)
    sent = senders.call("send", route, timeout_s=90)
    figures, sums = sent[0]
    received = receiving.result(60)
    assert [arrived for arrived, _ in received] == [sums, sums]
    assert all(count >= 5 for _, count in received)
    assert figures["bytes"] == 4 * sum(100 * (10 + i) for i in range(7)) + 66 + 60_000 + 96
    assert sent[1][0]["bytes"] == 0
    senders.call("forget", timeout_s=60)
    assert not list(tmp_path.glob("weights/*"))


def test_a_receiver_that_cannot_open_fails_and_nobody_hangs(
    senders: Group, receivers: Group, tmp_path: Path
) -> None:
    """A directory that only the sender sees: the receivers say so, sender and cluster go on."""
    places = (senders.call("place", timeout_s=60), [Place(0), Place(0)])
    route = make_route("disk", "Senders", "Receivers", *places, bucket_bytes=9000, directory=str(tmp_path))
    receiving = receivers.start("receive_elsewhere", route)
    assert senders.call("send", route, timeout_s=60)[0][0]["bytes"] > 0
    with pytest.raises(WorkerFailed, match="No such file"):
        receiving.result(60)
    assert senders.call("rank", timeout_s=60) == [0, 1]


def with_route(settings: Settings, directory: Path, route: str = "auto") -> Settings:
    settings.runner.step_timeout_s = 60.0
    settings.actor.weight_sync = WeightSyncSettings.model_validate(
        {"route": route, "bucket_mb": 1, "directory": str(directory)}
    )
    settings.actor.group_name, settings.rollout.group_name = "Senders", "Receivers"
    return settings


def sync_of(
    settings: Settings, senders: Group, receivers: Group, directory: Path, route: str = "auto"
) -> WeightSync:
    return WeightSync(with_route(settings, directory, route), senders, receivers, "cpu")


def assert_synced(senders: Group, receivers: Group, version: int) -> None:
    sums = senders.call("weights_checksum", timeout_s=60)[0]
    assert receivers.call("held", timeout_s=60) == [(version, sums)] * 2


def test_routes_that_fail_give_way_down_to_the_disk(
    settings: Settings, senders: Group, receivers: Group, tmp_path: Path
) -> None:
    """First all goes by shared memory; then the engines no longer see the actor's /proc, so only files are left."""
    sync = sync_of(settings, senders, receivers, tmp_path / "weights")
    receivers.call("hide", None, timeout_s=60)
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert sync.route == "shared_memory"
    assert_synced(senders, receivers, 1)
    receivers.call("hide", "/proc/", timeout_s=60)
    metrics = sync.run(2)
    assert (
        metrics["actor/sync_fallbacks"] == 2.0 and sync.route == "disk"
    )  # broadcast ends in shared memory too
    assert metrics["actor/sync_bytes"] > 80_000
    assert_synced(senders, receivers, 2)
    assert not list(tmp_path.glob("weights/*"))
    assert sync.run(3)["actor/sync_fallbacks"] == 2.0
    assert_synced(senders, receivers, 3)


def test_a_trainer_compares_checksums_when_the_route_has_changed(
    settings: Settings, senders: Group, receivers: Group, tmp_path: Path
) -> None:
    """A route that fails and a second one that brings all: training goes on. One that loses a tensor: it ends."""

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
    settings: Settings, senders: Group, receivers: Group, tmp_path: Path
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


def test_channel_carries_items_and_reader_has_a_deadline(cluster, receivers: Group) -> None:
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


def test_nothing_listens_beyond_loopback(cluster, senders: Group, receivers: Group) -> None:
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
