"""Weight syncs in which one end hangs, or never joins a collective: the next route has everything within 30 s."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.cluster.calls import DeadlineExceeded, WorkerGroup
from rstar2_megatron.cluster.weights import SENDER_STEPS, STEP_TIMEOUT_S
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training import weight_sync
from rstar2_megatron.training.weight_sync import WeightSync
from rstar2_megatron.weights.route import RouteKind
from tests.cluster.test_cluster import assert_synced, cluster, receivers, senders, settings, with_route  # noqa: F401  fixtures
from tests.cluster.workers import FORGET, Fault, Receiver, Sender

STEP_S = 3.0  # here; STEP_TIMEOUT_S in a run

# Every wait of a receiver. The engines of a node are rank 0, which receives a broadcast, and rank 1, which it passes it to.
HANGS: list[tuple[RouteKind, str, int]] = [
    ("cuda_ipc", "_Transfer.add_part", 0),
    ("shared_memory", "_Transfer.put", 1),
    ("broadcast", "_Transfer.put", 0),
    ("broadcast", "_Transfer.put", 1),
    ("disk", "_Transfer.put", 1),
]


@pytest.fixture
def impatient(senders: WorkerGroup, receivers: WorkerGroup) -> Iterator[None]:  # noqa: F811
    for group in (senders, receivers):
        group.call("set_step_timeout", STEP_S, timeout_s=240)
    yield
    for group in (senders, receivers):
        group.call("set_step_timeout", STEP_TIMEOUT_S, timeout_s=60)


@pytest.mark.parametrize(("kind", "step", "rank"), HANGS)
def test_a_receiver_that_hangs_costs_one_deadline(
    settings: Settings,  # noqa: F811
    senders: WorkerGroup,  # noqa: F811
    receivers: WorkerGroup,  # noqa: F811
    impatient: None,
    tmp_path: Path,
    kind: RouteKind,
    step: str,
    rank: int,
) -> None:
    """In the middle of a sync; the sync that follows takes the other route at once."""
    with_route(settings, tmp_path).actor.weight_sync.bucket_mb = 0
    sync = WeightSync(settings, senders, receivers, "cuda")
    sync._routes = [kind, "shared_memory" if kind == "disk" else "disk"]
    receivers.call("plant", Fault(step, at=2, how="hang"), ranks=[rank], timeout_s=60)
    started = time.monotonic()
    assert sync.run(1)["actor/sync_fallbacks"] == 1.0
    assert STEP_S <= time.monotonic() - started < STEP_S + 15
    assert receivers.call("fired", ranks=[rank], timeout_s=60) == [True]
    assert_synced(senders, receivers, 1)
    sync.run(2)
    assert_synced(senders, receivers, 2)


STUCK = {
    "shared memory": ("shared_memory", "SharedBucket", 1, r"send_weights is stuck on rank 0[, 1]*.* checkpoint"),
    "device buffer": ("cuda_ipc", "handle_of", 0, r"send_weights is stuck on rank 0[, 1]*.* checkpoint"),
    "after the last bucket": ("disk", FORGET, 0, r"forget_weights did not finish within 6 s on 1 of 2"),
}


@pytest.mark.parametrize(("kind", "step", "at", "words"), STUCK.values(), ids=STUCK)
def test_a_sender_stuck_in_a_call_that_never_returns_ends_the_run(
    cluster: Any,  # noqa: F811
    settings: Settings,  # noqa: F811
    receivers: WorkerGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: RouteKind,
    step: str,
    at: int,
    words: str,
) -> None:
    """As in a CUDA call that waits for a dead peer: nothing can interrupt it, so no other route is possible.

    The error names rank and remedy, the engines' workers serve on, and the stuck process can be killed.
    """
    monkeypatch.setattr(weight_sync, "STEP_TIMEOUT_S", STEP_S)
    monkeypatch.setattr(weight_sync, "_SHORT_CALL_S", 2 * STEP_S)
    name = f"StuckSenders{len(cluster._groups)}"
    settings = with_route(settings, tmp_path)
    settings.actor.group_name = name
    settings.actor.weight_sync.bucket_mb = 0
    stuck = cluster._launch(Sender, name, "actor")
    for group in (stuck, receivers):
        group.call("set_step_timeout", STEP_S, timeout_s=240)
    try:
        sync = WeightSync(settings, stuck, receivers, "cuda")
        sync._routes = [kind, "disk"]
        stuck.call("plant", Fault(step, at=at, how="stick"), ranks=[0], timeout_s=60)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=rf"{name}\.{words}"):
            sync.run(1)
        assert time.monotonic() - started < (SENDER_STEPS + 2) * STEP_S + 15
        assert len(receivers.call("place", timeout_s=10)) == 2
    finally:
        started = time.monotonic()
        stuck.kill()
        assert time.monotonic() - started < 15
        receivers.call("set_step_timeout", STEP_TIMEOUT_S, timeout_s=60)


# After these one end of the collective waits for the other, and RLinf's group serves nobody any more.
BEFORE_JOINING = [
    ("receiver", "WeightReceiver._receive_broadcast", "hang"),
    *(
        pytest.param(*row, marks=pytest.mark.long)
        for row in (
            ("receiver", "WeightReceiver._transfer_of", "raise"),
            ("receiver", "_collective", "raise"),
            ("sender", "_collective", "raise"),
        )
    ),
]


@pytest.mark.parametrize(("end", "step", "how"), BEFORE_JOINING)
def test_a_broadcast_that_one_end_never_joins_ends_in_the_next_route(
    cluster: Any,  # noqa: F811
    settings: Settings,  # noqa: F811
    tmp_path: Path,
    end: str,
    step: str,
    how: str,
) -> None:
    number = len(cluster._groups)
    settings = with_route(settings, tmp_path)
    settings.actor.group_name, settings.rollout.group_name = f"Senders{number}", f"Receivers{number}"
    settings.actor.weight_sync.bucket_mb = 0
    ours = cluster._launch(Sender, settings.actor.group_name, "actor")
    theirs = cluster._launch(Receiver, settings.rollout.group_name, "rollout", max_concurrency=16)
    assert STEP_TIMEOUT_S < 30
    try:
        for group in (ours, theirs):
            group.call("set_step_timeout", STEP_S, timeout_s=240)
        sync = WeightSync(settings, ours, theirs, "cuda")
        sync._routes = ["broadcast", "disk"]
        broken = ours if end == "sender" else theirs
        broken.call("plant", Fault(step, at=1, how=how), ranks=[0], timeout_s=60)
        started = time.monotonic()
        assert sync.run(1)["actor/sync_fallbacks"] == 1.0
        assert time.monotonic() - started < 30
        assert_synced(ours, theirs, 1)
    finally:
        ours.kill()
        theirs.kill()
