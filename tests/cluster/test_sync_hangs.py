"""Weight syncs in which one end hangs, or never joins a collective: the next route has everything within 30 s."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from rstar2_megatron.cluster.calls import DeadlineExceeded, WorkerGroup
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training import weight_sync
from rstar2_megatron.weights.route import RouteKind
from tests.cluster.conftest import CALL_S, Launch, assert_synced, sync_in_turn
from tests.cluster.weight_ends import FORGET, Fault, Receiver, Sender

STEP_S = 6.0  # here; weight_sync.STEP_TIMEOUT_S in a run
PROMISED_S = 30.0  # of docs/actor.md, for the deadlines of a run; here most of it is room for a busy machine

# Every wait of a receiver. The engines of a node are rank 0, which receives a broadcast, and rank 1, which it passes it to.
HANGS = [
    ("shared_memory", "_Transfer.put", 1),
    *(
        pytest.param(*row, marks=pytest.mark.ci)
        for row in (
            ("cuda_ipc", "_Transfer.add_part", 0),
            ("broadcast", "_Transfer.put", 0),
            ("broadcast", "_Transfer.put", 1),
            ("disk", "_Transfer.put", 1),
        )
    ),
]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a first sync."""
    assert weight_sync.STEP_TIMEOUT_S < PROMISED_S
    for name in ("STEP_TIMEOUT_S", "FIRST_STEP_TIMEOUT_S"):
        monkeypatch.setattr(weight_sync, name, STEP_S)


@pytest.mark.parametrize(("kind", "step", "rank"), HANGS)
def test_a_receiver_that_hangs_costs_one_deadline(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path, kind: RouteKind, step: str, rank: int
) -> None:
    """In the middle of a sync; the sync that follows takes the other route at once."""
    other: RouteKind = "shared_memory" if kind == "disk" else "disk"
    sync = sync_in_turn(settings, senders, receivers, tmp_path, kind, other)
    receivers.call("plant", Fault(step, at=2, how="hang"), ranks=[rank], timeout_s=CALL_S)
    started = time.monotonic()
    assert sync.run(1)["actor/sync_fallbacks"] == 1.0
    assert STEP_S <= time.monotonic() - started < PROMISED_S
    assert receivers.call("fired", ranks=[rank], timeout_s=CALL_S) == [True]
    assert_synced(senders, receivers, 1)
    sync.run(2)
    assert_synced(senders, receivers, 2)


IN_A_BUCKET = r"send_weights is stuck on rank 0[, 1]*.* checkpoint"
STUCK = [
    pytest.param("shared_memory", "SharedBucket", 1, IN_A_BUCKET, marks=pytest.mark.ci),
    pytest.param("cuda_ipc", "handle_of", 0, IN_A_BUCKET, marks=pytest.mark.release),
    pytest.param("disk", FORGET, 0, r"forget_weights did not finish within 6 s on 1 of 2", marks=pytest.mark.release),
]


@pytest.mark.parametrize(("kind", "step", "at", "words"), STUCK)
def test_a_sender_stuck_in_a_call_that_never_returns_ends_the_run(
    launch: Launch,
    settings: Settings,
    receivers: WorkerGroup,
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
    monkeypatch.setattr(weight_sync, "_SHORT_CALL_S", 2 * STEP_S)
    stuck = launch(Sender, "actor")
    pids = stuck.call("pid", timeout_s=CALL_S)
    sync = sync_in_turn(settings, stuck, receivers, tmp_path, kind, "disk")
    stuck.call("plant", Fault(step, at=at, how="stick"), ranks=[0], timeout_s=CALL_S)
    with pytest.raises(DeadlineExceeded, match=rf"{stuck.name}\.{words}"):
        sync.run(1)
    assert len(receivers.call("place", timeout_s=CALL_S)) == 2
    processes = [psutil.Process(pid) for pid in pids]
    stuck.kill()
    assert not psutil.wait_procs(processes, timeout=60)[1]


# After these one end of the collective waits for the other, and RLinf's group serves nobody any more.
BEFORE_JOINING = [
    pytest.param("receiver", "WeightReceiver._receive_broadcast", "hang", marks=pytest.mark.ci),
    *(
        pytest.param(*row, marks=pytest.mark.release)
        for row in (
            ("sender", "_collective", "raise"),
            ("receiver", "WeightReceiver._transfer_of", "raise"),
            ("receiver", "_collective", "raise"),
        )
    ),
]


@pytest.mark.parametrize(("end", "step", "how"), BEFORE_JOINING)
def test_a_broadcast_that_one_end_never_joins_ends_in_the_next_route(
    launch: Launch, settings: Settings, tmp_path: Path, end: str, step: str, how: str
) -> None:
    ours, theirs = launch(Sender, "actor"), launch(Receiver, "rollout", max_concurrency=16)
    sync = sync_in_turn(settings, ours, theirs, tmp_path, "broadcast", "disk")
    broken = ours if end == "sender" else theirs
    broken.call("plant", Fault(step, at=1, how=how), ranks=[0], timeout_s=CALL_S)
    started = time.monotonic()
    assert sync.run(1)["actor/sync_fallbacks"] == 1.0
    assert time.monotonic() - started < PROMISED_S
    assert_synced(ours, theirs, 1)
