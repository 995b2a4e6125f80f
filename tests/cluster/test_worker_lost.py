"""Rollout workers that are killed: in a rollout, in a weight sync, between them. The others go on."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rstar2_megatron.cluster.calls import EnginesLost, WorkerGroup
from rstar2_megatron.cluster.channel import unpack
from rstar2_megatron.cluster.phases.coordinator import PhaseResult, RolloutCoordinator
from rstar2_megatron.cluster.phases.server import PhaseEvents, PhaseServer
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.cluster.weights import STEP_TIMEOUT_S
from rstar2_megatron.rollout.messages import WorkRequest
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training.async_trainer import AsyncTrainer
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.training.weight_sync import WeightSync
from rstar2_megatron.trajectory import Problem
from rstar2_megatron.weights.route import RouteKind
from tests.cluster.test_cluster import cluster, senders, settings, with_route  # noqa: F401  fixtures
from tests.cluster.workers import Fault, KillableEngine, Receiver
from tests.rollout.memorised import SETTINGS
from tests.rollout.tiny import make_model

PROBLEMS = [Problem(f"problem-{n}", [{"role": "user", "content": f"{n}?"}], ["1"]) for n in range(16)]
SPEC = RolloutSpec(4, 1.0, 1.0, -1, max_new_tokens=96, max_assistant_turns=1)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("shared_memory", "OpenedBucket"),
        ("cuda_ipc", "DeviceBucket"),
        ("broadcast", "SharedBucket"),
        ("broadcast", "_collective"),
    ],
)
def test_a_sync_goes_on_without_a_worker_that_dies_in_it(
    cluster: Any,  # noqa: F811
    settings: Settings,  # noqa: F811
    senders: WorkerGroup,  # noqa: F811
    tmp_path: Path,
    kind: RouteKind,
    step: str,
) -> None:
    """No route is given up, also not the broadcast whose receiver died inside or on the way to it."""
    name = f"Doomed{len(cluster._groups)}"
    doomed = cluster._launch(Receiver, name, "rollout", max_concurrency=16)
    doomed.call("place", timeout_s=240)
    sync = WeightSync(with_route(settings, tmp_path), senders, doomed, "cuda")
    sync._routes = [kind, "disk"]
    doomed.call("plant", Fault(step, how="die"), ranks=[0], timeout_s=60)
    started = time.monotonic()
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert time.monotonic() - started < STEP_TIMEOUT_S
    assert list(doomed.lost) == [0] and "the worker process died" in doomed.lost[0]
    sums = senders.call("weights_checksum", timeout_s=60)[0]
    assert doomed.call("held", timeout_s=60) == [(1, sums)]
    doomed.kill()


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


def test_an_engine_that_waits_gets_a_dead_workers_work_without_a_further_message() -> None:
    phase = RolloutPhase(WorkQueue("kv_adaptive", 2, 4), 4)
    phase.add_problems(PROBLEMS[:1])
    sent: list[tuple[str, Any]] = []
    engines: Any = Engines()
    end: Any = SimpleNamespace(
        channel=SimpleNamespace(put=lambda item, key: sent.append((key, item))),
        engines=engines,
        lengths=LengthSurvival(100),
        show_progress=None,
    )
    run = PhaseServer(end, phase, replace(SPEC, phase=1), "rollout", PhaseEvents())
    while phase.queue.left:
        run.handle(WorkRequest(0, 1, 8), 0.0)
    sent.clear()
    run.handle(WorkRequest(1, 1, 8), 0.0)
    assert not sent
    engines.lost[0] = "it died"
    run.look_for_lost_workers()
    assert [key for key, _ in sent] == ["work R:1"] and sent[0][1].work


def assert_complete(done: PhaseResult) -> None:
    """Every trajectory exactly once, none dropped."""
    assert [group.problem.query_id for group in done.groups] == [p.query_id for p in PROBLEMS]
    indices = [sorted(t.rollout_index for t in group.trajectories) for group in done.groups]
    assert indices == [[0, 1, 2, 3]] * len(PROBLEMS)
    assert all(t.usable for group in done.groups for t in group.trajectories)


def use_model(settings: Settings, directory: Path) -> Path:  # noqa: F811
    """Make a model for real engines, and let the settings use it."""
    model = make_model(directory / "model")
    settings.rollout.model.model_path = str(model)
    settings.runner.logger.log_path = str(directory)
    settings.agentloop.system_prompt = SETTINGS.system_prompt
    return model


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_worker_is_replaced_and_its_work_done(
    cluster: Any,  # noqa: F811
    settings: Settings,  # noqa: F811
    senders: WorkerGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL in a rollout: nothing is lost or doubled. The restarted one has the sync's weights; a second death is final."""
    model = use_model(settings, tmp_path)
    with_route(settings, tmp_path).rollout.engine_start_timeout_s = 300.0
    monkeypatch.setattr(cluster.settings.rollout, "max_engine_restarts", 1)
    engines = cluster._launch(KillableEngine, "Mortal", "rollout", settings, "cpu", max_concurrency=64)
    reward = cluster._launch(RewardWorker, "MortalReward", "reward", settings.reward, max_concurrency=16)
    handle = PhaseServer.handle
    kill: list[int] = []

    def listen(run: Any, message: Any, now: float) -> None:
        handle(run, message, now)
        if kill and isinstance(message, bytes) and any(one.engine == 0 for one in unpack(message)):
            os.kill(kill.pop(), signal.SIGKILL)  # others are running there

    monkeypatch.setattr(PhaseServer, "handle", listen)
    phases: RolloutCoordinator | None = None
    try:
        engines.start_engines(str(model), "http://127.0.0.1:9").result(300)
        phases = RolloutCoordinator(cluster.channel, engines, reward, settings)
        trainer = Trainer(settings, senders, engines, phases, device="cpu", colocated=False)
        senders.call("use_model", str(model), 1.25, timeout_s=60)  # not what the files hold
        trainer.sync_weights(4)
        pids = engines.call("pids", timeout_s=60)
        kill.append(pids[0][0])
        engine = psutil.Process(pids[0][1])
        done = phases.run(PROBLEMS, SPEC, "rollout")
        assert_complete(done)
        assert done.stats["workers_lost"] == done.stats["engines_gone"] == 1
        assert {t.held.worker for group in done.groups for t in group.trajectories if t.held} == {1}
        phases.tokens.fetch(t for group in done.groups for t in group.trajectories)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE

        senders.call("use_model", str(model), 1.5, timeout_s=60)
        assert trainer.sync_weights(5)["actor/sync_fallbacks"] == 0.0  # compares checksums
        assert not engines.lost and engines.names[0].startswith("Mortal-0-restart-1")
        done = phases.run(PROBLEMS, SPEC, "rollout")
        assert_complete(done)
        assert (done.stats["engines_gone"], done.stats["worker_restarts"]) == (0, 1)
        every = [t for group in done.groups for t in group.trajectories]
        assert {t.held.worker for t in every if t.held} == {0, 1}
        assert {span.version for t in every for span in t.version_spans} == {5}
        batch = phases.tokens.put_batch(every, [0.0] * len(every))
        assert len(batch) == len(every)

        engines.start("die", ranks=[0])
        trainer.sync_weights(6)
        assert list(engines.lost) == [0]
        done = phases.run(PROBLEMS, SPEC, "rollout")
        assert_complete(done)
        assert (done.stats["engines_gone"], done.stats["workers_lost"]) == (1, 0)
        kill.append(engines.call("pids", timeout_s=60)[0][0])
        monkeypatch.setattr(
            PhaseServer,
            "handle",
            lambda run, message, now: (handle(run, message, now), kill and os.kill(kill.pop(), signal.SIGKILL)),
        )
        with pytest.raises(EnginesLost, match=r"no engine is left: .*the worker process died"):
            phases.run(PROBLEMS, SPEC, "rollout")
    finally:
        senders.call("use_model", "", 1.0, timeout_s=60)
        if phases is not None:
            phases.close()
        engines.kill()


class Problems:
    """As many as are asked for."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Problem]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [Problem(f"problem-{n}", [{"role": "user", "content": f"{n}?"}], ["1"]) for n in numbers]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_rollouts_that_go_on_outlive_a_killed_worker(
    cluster: Any,  # noqa: F811
    settings: Settings,  # noqa: F811
    senders: WorkerGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of `algorithm.max_staleness`, without an actor: a worker is killed while groups of it wait in the buffer."""
    model = use_model(settings, tmp_path)
    settings.agentloop.max_assistant_turns = 1
    settings.algorithm.max_staleness, settings.algorithm.group_size = 2, 4
    settings.algorithm.sampling_params.max_new_tokens = 96
    settings.algorithm.down_sampling.do_down_sampling = False  # so nothing is rejected
    settings.data.rollout_batch_size, settings.runner.max_steps = 4, 6
    with_route(settings, tmp_path).rollout.engine_start_timeout_s = 300.0
    monkeypatch.setattr(cluster.settings.rollout, "max_engine_restarts", 1)
    engines = cluster._launch(KillableEngine, "GoingOn", "rollout", settings, "cpu", max_concurrency=64)
    reward = cluster._launch(RewardWorker, "GoingOnReward", "reward", settings.reward, max_concurrency=16)
    phases: RolloutCoordinator | None = None
    trainer: AsyncTrainer | None = None
    problems: Any = Problems()
    seen: list[str] = []
    try:
        engines.start_engines(str(model), "http://127.0.0.1:9").result(300)
        phases = RolloutCoordinator(cluster.channel, engines, reward, settings)
        trainer = AsyncTrainer(settings, senders, engines, phases, device="cpu", colocated=False)
        senders.call("use_model", str(model), 1.25, timeout_s=60)
        trainer.sync_weights(0)
        for step in range(1, 7):
            trainer.continuous.start(problems)
            groups = trainer.continuous.take()
            seen += [group.problem.query_id for group in groups]
            every = [t for group in groups for t in group.trajectories]
            assert len(every) == 16 and all(t.usable for t in every)
            assert all(step - 3 <= s.version < step for t in every for s in t.version_spans)
            batch = phases.tokens.put_batch(every, [0.0] * 16, done=every)
            assert len(batch) == 16
            if step == 2:
                os.kill(engines.call("pids", timeout_s=60)[0][0], signal.SIGKILL)
            assert trainer.sync_weights(step)["actor/sync_fallbacks"] == 0.0
        assert engines.restarts.total() == 1 and not engines.lost
        assert sorted(seen) == sorted(f"problem-{n}" for n in range(problems.taken)) and len(seen) == 24
    finally:
        senders.call("use_model", "", 1.0, timeout_s=60)
        if trainer is not None:
            trainer.close()
        if phases is not None:
            phases.close()
        engines.kill()
