"""Workers that are killed in a weight sync or between two: an actor's death ends the run, the engines' workers go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rstar2_megatron.cluster.calls import NoEngineLeft, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.phases.server import PhaseEvents, PhaseServer
from rstar2_megatron.rollout.messages import EngineGone, WorkRequest
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import SamplingParams, Settings
from rstar2_megatron.training import weight_sync
from rstar2_megatron.trajectory import FinishReason, HeldTokens, Problem, Trajectory
from rstar2_megatron.weights.route import RouteKind
from tests.cluster.conftest import CALL_S, Launch, sync_in_turn
from tests.cluster.weight_ends import Fault, Receiver, Sender

NEVER_S = 1000.0  # a deadline that no sync here may wait for: the death itself ends the wait


@pytest.mark.ci
def test_an_actor_rank_that_dies_in_a_sync_is_named_at_once(
    launch: Launch, settings: Settings, receivers: WorkerGroup, tmp_path: Path
) -> None:
    """Its death ends the run, with the call and the rank. A receiver's deadline would be another error."""
    doomed = launch(Sender, "actor")
    sync = sync_in_turn(settings, doomed, receivers, tmp_path, "shared_memory", "disk")
    doomed.call("plant", Fault("SharedBucket", how="die"), ranks=[0], timeout_s=CALL_S)
    with pytest.raises(WorkerLost, match=rf"{doomed.name}\..*, rank 0: the worker process died"):
        sync.run(1)


DEATHS = [
    ("shared_memory", "OpenedBucket"),
    pytest.param("broadcast", "_collective", marks=pytest.mark.ci),
    pytest.param("broadcast", "SharedBucket", marks=pytest.mark.release),
    pytest.param("cuda_ipc", "DeviceBucket", marks=pytest.mark.release),
]


@pytest.mark.parametrize(("kind", "step"), DEATHS)
def test_a_sync_goes_on_without_a_worker_that_dies_in_it(
    launch: Launch,
    settings: Settings,
    senders: WorkerGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: RouteKind,
    step: str,
) -> None:
    """No route is given up, also not the broadcast whose receiver died inside or on the way to it."""
    doomed = launch(Receiver, "rollout", max_concurrency=16)
    monkeypatch.setattr(weight_sync, "FIRST_STEP_TIMEOUT_S", NEVER_S)
    sync = sync_in_turn(settings, senders, doomed, tmp_path, kind, "disk")
    doomed.call("plant", Fault(step, how="die"), ranks=[0], timeout_s=CALL_S)
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert list(doomed.lost) == [0] and "the worker process died" in doomed.lost[0]
    sums = senders.call("weights_checksum", timeout_s=CALL_S)[0]
    assert doomed.call("held", timeout_s=CALL_S) == [(1, sums)]


class Engines:
    """Two workers as the driver sees them."""

    names = ("R:0", "R:1")
    alive = (0, 1)

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}

    def start(self, method: str) -> None:
        raise AssertionError(method)

    def __len__(self) -> int:
        return 2


def served() -> tuple[PhaseServer, Any, list[tuple[str, Any]]]:
    """A phase of one group, whose four rollouts engine 0 has; the engines; what they are sent from now on."""
    phase = RolloutPhase(WorkQueue("kv_adaptive", 2, 4), 4)
    phase.add_problems([Problem("problem", [{"role": "user", "content": "?"}], ["1"])])
    sent: list[tuple[str, Any]] = []
    engines: Any = Engines()
    end: Any = SimpleNamespace(
        rlinf=SimpleNamespace(put=lambda item, key: sent.append((key, item))),
        engines=engines,
        lengths=LengthSurvival(100),
        show_progress=None,
    )
    spec = RolloutSpec(4, SamplingParams(max_new_tokens=96), max_assistant_turns=1)
    run = PhaseServer(end, phase, replace(spec, phase=1), "rollout", PhaseEvents())
    while phase.queue.left:
        run.handle(WorkRequest(0, 1, 8), 0.0)
    sent.clear()
    return run, engines, sent


def test_an_engine_that_waits_gets_a_dead_workers_work_without_a_further_message() -> None:
    run, engines, sent = served()
    run.handle(WorkRequest(1, 1, 8), 0.0)
    assert not sent
    engines.lost[0] = "it died"
    run.look_for_lost_workers()
    assert [key for key, _ in sent] == ["work R:1"] and sent[0][1].work


def test_what_the_last_worker_held_is_taken_back_before_the_loss_is_raised() -> None:
    """The other engine is gone. A phase that follows must not ask a new worker for tokens that this one held."""
    run, engines, _ = served()
    ended = Trajectory("problem", 0, finish_reason=FinishReason.ANSWERED, held=HeldTokens(0, 0, 1, 1, [], 0.0))
    run.phase.ended(0, 0, ended, 0.0)
    run.handle(EngineGone(1, 1, "no restart is left"), 0.0)
    engines.lost[0] = "it died"
    with pytest.raises(NoEngineLeft, match="no engine is left: it died"):
        run.look_for_lost_workers()
    assert run.take_back() == [] and run.phase.open_groups[0].missing == [0, 1, 2, 3]
