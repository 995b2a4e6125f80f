"""A real engine that is killed for good in the middle of a phase, over the real channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.cluster.channel import unpack
from rstar2_megatron.cluster.phases.coordinator import RolloutCoordinator
from rstar2_megatron.cluster.phases.server import PhaseServer
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.rollout.messages import EngineGone, WorkRequest
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Problem
from tests.cluster.test_cluster import cluster, settings  # noqa: F401  fixtures
from tests.cluster.workers import KillableEngine
from tests.rollout.memorised import SETTINGS
from tests.rollout.tiny import make_model

PROBLEMS = [Problem(f"problem-{n}", [{"role": "user", "content": f"{n}?"}], ["1"]) for n in range(16)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_other_engine_rolls_out_what_a_lost_one_had(
    cluster: Any,  # noqa: F811
    settings: Settings,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its slices go back to the queue, it asks for nothing more, and no trajectory is lost or doubled."""
    model = make_model(tmp_path / "model")
    settings.rollout.model.model_path = str(model)
    settings.rollout.max_engine_restarts = 0
    settings.runner.logger.log_path = str(tmp_path)
    settings.agentloop.system_prompt = SETTINGS.system_prompt
    engines = cluster._launch(KillableEngine, "Lost", "rollout", settings, "cpu", max_concurrency=64)
    reward = cluster._launch(RewardWorker, "LostReward", "reward", settings.reward, max_concurrency=16)
    heard: list[Any] = []
    handle = PhaseServer.handle

    def listen(run: Any, message: Any, now: float) -> None:
        if not isinstance(message, WorkRequest) and not any(isinstance(x, list) for x in heard):
            engines.start("kill_engine", ranks=[0])  # the first trajectories have ended, others are running
        heard.append(unpack(message) if isinstance(message, bytes) else message)
        handle(run, message, now)

    monkeypatch.setattr(PhaseServer, "handle", listen)
    phases: RolloutCoordinator | None = None
    try:
        engines.call("start_engine", str(model), "http://127.0.0.1:9", timeout_s=300)
        phases = RolloutCoordinator(cluster.channel, engines, reward, settings)
        spec = RolloutSpec(4, 1.0, 1.0, -1, max_new_tokens=96, max_assistant_turns=1)
        done = phases.run(PROBLEMS, spec, "rollout")
    finally:
        if phases is not None:
            phases.close()
        engines.call("shutdown", timeout_s=60)
    assert done.stats["engines_gone"] == 1
    assert [group.problem.query_id for group in done.groups] == [p.query_id for p in PROBLEMS]
    indices = [sorted(t.rollout_index for t in group.trajectories) for group in done.groups]
    assert indices == [[0, 1, 2, 3]] * len(PROBLEMS)
    assert all(t.usable for group in done.groups for t in group.trajectories)
    (lost,) = [n for n, message in enumerate(heard) if isinstance(message, EngineGone)]
    assert heard[lost].engine == 0
    assert not [x for x in heard[lost:] if isinstance(x, WorkRequest) and x.engine == 0]
    ended = [x for message in heard if isinstance(message, list) for x in message]
    finished = [x for x in ended if x.trajectory.finish_reason is not None]
    assert len(finished) == 4 * len(PROBLEMS)
    assert len(ended) > len(finished), "the engine was idle when it was killed"
