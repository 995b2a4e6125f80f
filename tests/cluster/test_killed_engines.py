"""Real engines and their workers, killed between and in weight syncs and rollouts: nothing is lost, doubled or too old."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlinf.scheduler import Channel

from rstar2_megatron.cluster.calls import NoEngineLeft, WorkerGroup
from rstar2_megatron.cluster.channel import unpack
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.phases.asynchronous import AsynchronousSource
from rstar2_megatron.cluster.phases.coordinator import PhaseResult, RolloutCoordinator
from rstar2_megatron.cluster.phases.server import DriverChannel, PhaseServer
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.cluster.rollout_group import RolloutGroup
from rstar2_megatron.rollout.messages import EngineGone, WorkRequest
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import SamplingParams, Settings
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.trajectory import Problem
from tests.cluster.conftest import CALL_S, Launch, for_sync, sync_in_turn
from tests.cluster.workers import KillableEngine
from tests.rollout.memorised import SETTINGS
from tests.rollout.tiny import make_model

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

JUDGE = "http://127.0.0.1:9"  # nobody listens there, and nobody calls a tool here
START_S = 300.0
SPEC = RolloutSpec(4, SamplingParams(max_new_tokens=96), max_assistant_turns=1)


def problem(number: int) -> Problem:
    return Problem(f"problem-{number}", [{"role": "user", "content": f"{number}?"}], ["1"])


PROBLEMS = [problem(number) for number in range(16)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_settings(settings: Settings, model: Path, tmp_path: Path) -> Settings:
    settings.rollout.model.model_path = str(model)
    settings.rollout.engine_start_timeout_s = START_S
    settings.rollout.max_engine_restarts = 1
    settings.runner.logger.log_path = str(tmp_path)
    settings.agentloop.system_prompt = SETTINGS.system_prompt
    return settings


@pytest.fixture(scope="module")
def launched() -> Iterator[list[RolloutGroup]]:
    groups: list[RolloutGroup] = []
    yield groups
    for group in groups:
        group.kill()


@pytest.fixture
def engines(
    launched: list[RolloutGroup], cluster: TrainingCluster, engine_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> RolloutGroup:
    """Two rollout workers with an engine each, those of the test before if they live. Each may be started again once."""
    if not launched or launched[-1].lost:
        monkeypatch.setattr(cluster.settings.rollout, "max_engine_restarts", 1)
        name = f"Engines{len(launched)}"
        group = cluster.launch(KillableEngine, name, "rollout", engine_settings, "cpu", max_concurrency=64)
        launched.append(group)
        group.start_engines(engine_settings.rollout.model.model_path, JUDGE).result(START_S)
    return launched[-1]


@pytest.fixture
def reward(launch: Launch, settings: Settings) -> WorkerGroup:
    group: WorkerGroup = launch(RewardWorker, "reward", settings.reward, max_concurrency=16)
    return group


@pytest.fixture
def phases(
    channel: Channel, engines: RolloutGroup, reward: WorkerGroup, engine_settings: Settings
) -> Iterator[RolloutCoordinator]:
    coordinator = RolloutCoordinator(DriverChannel(channel, engines, reward, engine_settings.runner), engine_settings)
    yield coordinator
    coordinator.channel.close()


class Heard:
    """What the driver hears of the engines in a phase, and what is to happen at certain messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[Any] = []
        self.at_results: Any = None
        """Called once, when trajectories of engine 1 have ended."""
        handle = PhaseServer.handle

        def listen(run: PhaseServer, message: Any, now: float) -> None:
            heard = unpack(message) if isinstance(message, bytes) else message
            self.messages.append(heard)
            if self.at_results is not None and isinstance(heard, list) and any(one.engine == 1 for one in heard):
                act, self.at_results = self.at_results, None
                act(run)
            handle(run, message, now)

        monkeypatch.setattr(PhaseServer, "handle", listen)


def kill_and_wait_until_known(worker: psutil.Process, engines: RolloutGroup, run: PhaseServer) -> None:
    """Kill the worker of engine 1; the phase does not end before the driver knows, so that others roll out what it held."""
    worker.kill()
    deadline = time.monotonic() + CALL_S
    while 1 not in engines.lost and time.monotonic() < deadline:
        run.look_for_lost_workers()
        time.sleep(0.05)


def assert_complete(done: PhaseResult) -> None:
    """Every trajectory exactly once, none dropped."""
    assert [group.problem.query_id for group in done.groups] == [p.query_id for p in PROBLEMS]
    indices = [sorted(t.rollout_index for t in group.trajectories) for group in done.groups]
    assert indices == [[0, 1, 2, 3]] * len(PROBLEMS)
    assert all(t.usable for group in done.groups for t in group.trajectories)


def losses(done: PhaseResult) -> tuple[float, float, float]:
    return done.stats["engines_gone"], done.stats["workers_lost"], done.stats["worker_restarts"]


def test_killed_engines_get_the_weights_of_a_device_route_again(
    engines: RolloutGroup, engine_settings: Settings, senders: WorkerGroup, model: Path, tmp_path: Path
) -> None:
    """Killed after a sync as version 0 and in the middle of the next one: no route is given up."""
    sync = sync_in_turn(engine_settings, senders, engines, tmp_path)
    assert sync.route == "cuda_ipc"

    def assert_held(version: int) -> None:
        sums = senders.call("weights_checksum", timeout_s=CALL_S)[0]
        assert engines.call("recover", timeout_s=START_S) == [version] * 2
        assert engines.call("weights_checksum", timeout_s=CALL_S) == [sums, sums]

    senders.call("use_model", str(model), 1.5, timeout_s=CALL_S)  # not what the files hold
    sync.run(0)
    engines.call("kill_engine", ranks=[0], timeout_s=CALL_S)
    assert_held(0)
    senders.call("use_model", str(model), 1.25, timeout_s=CALL_S)
    engines.call("kill_at_bucket", 2, ranks=[1], timeout_s=CALL_S)
    assert sync.run(1)["actor/sync_fallbacks"] == 0.0
    assert_held(1)


def test_an_engine_that_shares_the_actors_accelerators_restarts_when_they_are_free(
    engines: RolloutGroup,
    phases: RolloutCoordinator,
    engine_settings: Settings,
    senders: WorkerGroup,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost while the actor trains: a restart within the sync would find the actor's weights, and a smaller KV cache."""
    for_sync(engine_settings, senders, engines, tmp_path)
    calls: list[str] = []
    for group in (senders, engines):
        monkeypatch.setattr(group, "before", None)  # as after the test
    trainer = Trainer(engine_settings, senders, engines, phases, device="cpu", colocated=True)
    senders.call("use_model", str(model), 1.25, timeout_s=CALL_S)
    trainer.sync_weights(0)
    senders.call("use_model", str(model), 1.5, timeout_s=CALL_S)
    engines.call("kill_engine", ranks=[1], timeout_s=CALL_S)
    hooks = {"actor": senders.before, "engines": engines.before}
    senders.before = lambda method: calls.append(f"actor {method}") or hooks["actor"](method)  # type: ignore[func-returns-value]
    engines.before = lambda method: calls.append(f"engines {method}") or hooks["engines"](method)  # type: ignore[func-returns-value]
    trainer.sync_weights(1)
    assert engines.call("weights_checksum", timeout_s=CALL_S) == senders.call("weights_checksum", timeout_s=CALL_S)
    restart = calls.index("engines restart_engine")
    assert calls[restart - 1 : restart + 2] == ["actor offload", "engines restart_engine", "engines release_memory"]
    assert "engines restart_engine" not in calls[restart + 1 :]
    engines.call("kill_engine", ranks=[0], timeout_s=CALL_S)
    trainer.check_weights()  # there is nothing to compare of an engine that is lost
    assert_complete(phases.run(PROBLEMS, SPEC, "rollout"))


class Problems:
    """As many as are asked for."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Problem]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [problem(number) for number in numbers]


def test_rollouts_that_go_on_outlive_a_killed_worker(
    engines: RolloutGroup,
    phases: RolloutCoordinator,
    engine_settings: Settings,
    senders: WorkerGroup,
    model: Path,
    tmp_path: Path,
) -> None:
    """Steps of `algorithm.max_staleness`, without an actor. A worker is killed while groups of it wait; later all are."""
    settings = for_sync(engine_settings, senders, engines, tmp_path)
    settings.agentloop.max_assistant_turns = 1
    settings.algorithm.max_staleness, settings.algorithm.group_size = 2, 4
    settings.algorithm.sampling_params.max_new_tokens = 96
    settings.algorithm.down_sampling.do_down_sampling = False  # so nothing is rejected
    settings.data.rollout_batch_size, settings.runner.max_steps = 4, 6
    problems: Any = Problems()
    restarts = engines.restarts.total()
    seen: list[str] = []
    trainer = Trainer(settings, senders, engines, phases, device="cpu", colocated=False)
    assert isinstance(trainer.source, AsynchronousSource)
    try:
        senders.call("use_model", str(model), 1.25, timeout_s=CALL_S)
        trainer.sync_weights(0)
        for step in range(1, 7):
            if step == 5:  # no engine is left: one of them can be started again
                for pid in engines.call("pids", timeout_s=CALL_S):
                    os.kill(pid[0], signal.SIGKILL)
                deadline = time.monotonic() + CALL_S
                while len(engines.lost) < len(engines) and time.monotonic() < deadline:
                    time.sleep(0.1)
            groups = trainer.next_groups(step, problems)
            seen += [group.problem.query_id for group in groups]
            every = [t for group in groups for t in group.trajectories]
            assert len(every) == 16 and all(t.usable for t in every)
            assert all(step - 3 <= s.version < step for t in every for s in t.version_spans)
            batch = phases.tokens.put_batch(every, [0.0] * 16, done=every)
            assert len(batch) == 16
            if step == 2:
                os.kill(engines.call("pids", timeout_s=CALL_S)[0][0], signal.SIGKILL)
            assert trainer.sync_weights(step)["actor/sync_fallbacks"] == 0.0
        trainer.source.pause()
        assert engines.restarts.total() == restarts + 2 and list(engines.lost) == [0]
        assert sorted(seen) == sorted(f"problem-{n}" for n in range(problems.taken)) and len(seen) == 24
    finally:
        trainer.source.close()


def test_the_others_do_the_work_of_an_engine_and_of_a_worker_that_are_lost(
    engines: RolloutGroup,
    phases: RolloutCoordinator,
    engine_settings: Settings,
    senders: WorkerGroup,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engine 1 cannot be started again, then its worker's replacement dies for good, then the last worker does, twice."""
    for_sync(engine_settings, senders, engines, tmp_path)
    heard, restarts = Heard(monkeypatch), engines.restarts.total()
    trainer = Trainer(engine_settings, senders, engines, phases, device="cpu", colocated=False)
    senders.call("use_model", str(model), 1.25, timeout_s=CALL_S)  # not what the files hold
    trainer.sync_weights(4)

    # engine 1 dies in a rollout, and has no restart left
    engines.call("no_more_restarts", ranks=[1], timeout_s=CALL_S)
    engines.call("kill_at_request", ranks=[1], timeout_s=CALL_S)
    done = phases.run(PROBLEMS, SPEC, "rollout")
    assert_complete(done)
    assert losses(done) == (1, 0, restarts)
    (lost,) = [n for n, message in enumerate(heard.messages) if isinstance(message, EngineGone)]
    assert heard.messages[lost].engine == 1
    assert not [m for m in heard.messages[lost:] if isinstance(m, WorkRequest) and m.engine == 1]
    ended = [one for message in heard.messages if isinstance(message, list) for one in message]
    assert len(ended) > sum(one.trajectory.finish_reason is not None for one in ended) == 4 * len(PROBLEMS), "it was idle"

    # no weights reach it, so its worker is lost, and the next sync has another worker in its place
    pids = engines.call("pids", ranks=[0], timeout_s=CALL_S)
    assert trainer.sync_weights(5)["actor/sync_fallbacks"] == 0.0
    assert list(engines.lost) == [1]
    senders.call("use_model", str(model), 1.5, timeout_s=CALL_S)
    assert trainer.sync_weights(6)["actor/sync_fallbacks"] == 0.0  # compares checksums
    assert not engines.lost and engines.names[1].startswith(f"{engines.name}-1-restart-1")
    assert engines.call("pids", ranks=[0], timeout_s=CALL_S) == pids

    # that one is killed in a rollout, with its engine
    worker, engine = (psutil.Process(pid) for pid in engines.call("pids", ranks=[1], timeout_s=CALL_S)[0])
    heard.at_results = functools.partial(kill_and_wait_until_known, worker, engines)
    done = phases.run(PROBLEMS, SPEC, "rollout")
    assert_complete(done)
    assert losses(done) == (1, 1, restarts + 1)
    every = [t for group in done.groups for t in group.trajectories]
    assert {t.held.worker for t in every if t.held} == {0}
    assert {span.version for t in every for span in t.version_spans} == {6}
    assert len(phases.tokens.put_batch(every, [0.0] * len(every), done=every)) == len(every)
    assert not psutil.wait_procs([engine], timeout=60)[1]

    # it is not started again; when the last one dies within a sync, a new one gets that sync's weights
    trainer.sync_weights(7)
    assert list(engines.lost) == [1]
    pid = engines.call("pids", timeout_s=CALL_S)[0][0]

    def dies(method: str) -> None:
        if method == "receive_weights" and psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(engines, "before", dies)
    senders.call("use_model", str(model), 1.25, timeout_s=CALL_S)
    assert trainer.sync_weights(8)["actor/sync_fallbacks"] == 0.0  # compares checksums
    assert list(engines.lost) == [1] and engines.restarts.total() == restarts + 2
    assert_complete(phases.run(PROBLEMS, SPEC, "rollout"))

    # that one is not started again, and the run ends
    os.kill(engines.call("pids", timeout_s=CALL_S)[0][0], signal.SIGKILL)
    with pytest.raises(NoEngineLeft, match=r"no engine is left: .*the worker process died"):
        phases.run(PROBLEMS, SPEC, "rollout")
