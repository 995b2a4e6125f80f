"""Weight syncs by every route between real workers, and failures at every step of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.cluster.calls import WorkerFailed, WorkerGroup
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training.gates import GateError
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.training.weight_sync import STEP_TIMEOUT_S, WeightSync
from rstar2_megatron.weights.route import RouteKind, make_route
from tests.cluster.conftest import CALL_S, assert_synced, for_sync, sync_in_turn
from tests.cluster.weight_ends import Fault


@pytest.mark.parametrize("kind", ["cuda_ipc", "shared_memory", "broadcast", "disk"])
def test_weights_arrive_bit_by_bit_on_every_route(
    senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path, kind: RouteKind
) -> None:
    """Also by CUDA IPC, whose buffers lie in host memory here."""
    places = senders.call("place", timeout_s=CALL_S), receivers.call("place", timeout_s=CALL_S)
    route = make_route(kind, senders.name, *places, bucket_bytes=9000, directory=str(tmp_path / "weights"))
    receivers.call("set_engine_workers", receivers.workers, timeout_s=CALL_S)
    receiving = receivers.start("receive", route)
    sent = senders.call("send", route, receivers.workers, timeout_s=CALL_S)
    figures, sums = sent[0]
    received = receiving.result(CALL_S)
    assert [arrived for arrived, _ in received] == [sums, sums]
    assert all(count == figures.num_buckets >= 5 for _, count in received)
    assert figures.num_bytes == 4 * sum(100 * (10 + i) for i in range(7)) + 66 + 60_000 + 96
    assert sent[1][0].num_bytes == (figures.num_bytes if kind == "cuda_ipc" else 0)
    senders.call("forget_weights", timeout_s=CALL_S)
    assert not list(tmp_path.glob("weights/*"))


def sync_by(settings: Settings, senders: WorkerGroup, receivers: Any, directory: Path, route: str = "auto") -> WeightSync:
    return WeightSync(for_sync(settings, senders, receivers, directory, route), senders, receivers, "cpu")


def test_routes_that_fail_give_way_down_to_the_disk(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """First all goes by shared memory; then the engines no longer see the actor's /proc, so only files are left."""
    sync = sync_by(settings, senders, receivers, tmp_path / "weights")
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert sync.route == "shared_memory"
    assert_synced(senders, receivers, 1)
    receivers.call("hide", "/proc/", timeout_s=CALL_S)
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
    for_sync(settings, senders, receivers, tmp_path / "weights")

    def trainer() -> Trainer:
        coordinator: Any = None  # asked for nothing by a sync
        return Trainer(settings, senders, receivers, coordinator, device="cpu", colocated=False)

    receivers.call("hide", "/proc/", timeout_s=CALL_S)
    assert trainer().sync_weights(1)["actor/sync_fallbacks"] == 2.0
    assert_synced(senders, receivers, 1)
    receivers.call("lose", "layer.3.weight", timeout_s=CALL_S)
    with pytest.raises(GateError, match=r"1 of 10 tensors of engine 0 differ .*layer\.3\.weight"):
        trainer().sync_weights(2)


def test_the_last_routes_failure_is_raised_and_the_workers_go_on(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Named routes have no fallback. Whoever fails, sender or receiver, nobody stays in the transfer."""
    receivers.call("hide", "/proc/", timeout_s=CALL_S)
    with pytest.raises(WorkerFailed, match="is not in this container"):
        sync_by(settings, senders, receivers, tmp_path, "shared_memory").run(1)
    receivers.call("hide", None, timeout_s=CALL_S)
    (tmp_path / "file").write_text("a directory cannot be made in a file")
    with pytest.raises(WorkerFailed, match="Not a directory"):
        sync_by(settings, senders, receivers, tmp_path / "file" / "weights", "disk").run(2)
    sync_by(settings, senders, receivers, tmp_path, "broadcast").run(3)
    assert_synced(senders, receivers, 3)


# Every function that a bucket passes, in order. On a route with a host copy also its reading after the sync.
SENDER_STEPS: dict[RouteKind, list[str]] = {
    "cuda_ipc": [
        "_targets",
        "WeightSender._send_bucket",
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
ONCE = "_targets"  # the others once a bucket
RECEIVER_STEPS: dict[RouteKind, list[str]] = {
    "cuda_ipc": ["WeightReceiver._transfer_of", "_Transfer.add_part", "DeviceBucket", "read_bucket", "read_kept"],
    "shared_memory": ["WeightReceiver._transfer_of", "OpenedBucket", "_Transfer.put", "read_bucket"],
    "broadcast": ["SharedBucket", "OpenedBucket", "_Transfer.put", "read_bucket"],
    "disk": ["WeightReceiver._transfer_of", "OpenedBucket", "_Transfer.put", "read_bucket"],
}


@pytest.mark.parametrize("kind", SENDER_STEPS)
def test_a_failure_at_any_step_of_any_route_ends_in_the_next_route(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path, kind: RouteKind
) -> None:
    """At the first bucket and in the middle, of a sender and of a receiver. The whole table takes seconds."""
    steps = [(senders, step) for step in SENDER_STEPS[kind]]
    steps += [(receivers, step) for step in RECEIVER_STEPS[kind]]
    for version, (group, step) in enumerate(steps):
        sync = sync_in_turn(settings, senders, receivers, tmp_path, kind, "disk")
        group.call("plant", Fault(step, at=0 if step == ONCE else version % 3), ranks=[0], timeout_s=CALL_S)
        started = time.monotonic()
        assert sync.run(version)["actor/sync_fallbacks"] == 1.0, step
        assert time.monotonic() - started < STEP_TIMEOUT_S, f"{step}: a deadline has passed"
        assert group.call("fired", ranks=[0], timeout_s=CALL_S) == [True]
        assert_synced(senders, receivers, version)


def test_a_broadcast_that_brings_nothing_ends_in_the_next_route(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """RLinf logs an error of NCCL or gloo, and hands over the memory as it is."""
    sync = sync_in_turn(settings, senders, receivers, tmp_path, "broadcast", "disk")
    receivers.call("plant", Fault("WeightReceiver._join_broadcast", at=1, how="blank"), ranks=[0], timeout_s=CALL_S)
    assert sync.run(1)["actor/sync_fallbacks"] == 1.0
    assert receivers.call("fired", ranks=[0], timeout_s=CALL_S) == [True]
    assert_synced(senders, receivers, 1)


def test_the_host_copy_of_a_device_route_is_whole(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Two actor ranks of one node write its buckets in turns."""
    sync = sync_in_turn(settings, senders, receivers, tmp_path)
    assert sync.route == "cuda_ipc"
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert_synced(senders, receivers, 1)
    sums = senders.call("weights_checksum", timeout_s=CALL_S)[0]
    assert receivers.call("kept", timeout_s=CALL_S) == [sums, sums]
