"""Real Ray, RLinf cluster and placement on CPU slots: calls, channel, addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rlinf.scheduler import Channel

from rstar2_megatron.cluster.calls import ChannelReader, DeadlineExceeded, WorkerFailed, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.channel import ENDED, pack
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.rollout.messages import RolloutResult
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Problem
from tests.algorithm.trajectories import trajectory
from tests.cluster.conftest import CALL_S, Launch, kill_channel, ray_processes


@pytest.fixture
def until(tmp_path: Path) -> Iterator[str]:
    """A file that is there when the test has ended: calls that hang until then end with it."""
    file = tmp_path / "ended"
    yield str(file)
    file.touch()


def test_placement_gives_each_component_its_slots(
    cluster: TrainingCluster, senders: WorkerGroup, receivers: WorkerGroup
) -> None:
    assert cluster.device == "cpu"
    assert senders.call("rank", timeout_s=60) == [0, 1]
    assert len(receivers) == 2  # rollout TP 1 on two slots: two engines


def test_a_failure_on_one_rank_is_raised_while_the_others_hang(senders: WorkerGroup, until: str) -> None:
    with pytest.raises(WorkerFailed, match="no luck on rank 1"):
        senders.call("hang", until, fails=1, timeout_s=120)


def test_deadline(senders: WorkerGroup, until: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"Senders.hang did not finish within 1 s on 2 of 2 workers"):
        senders.call("hang", until, timeout_s=1.0)


def test_a_channel_carries_items_and_keeps_those_that_come_late(cluster: TrainingCluster, receivers: WorkerGroup) -> None:
    reader = ChannelReader(cluster.channel, "out")
    assert reader.poll(0.5) is None
    echo = receivers.start("echo", cluster.channel)
    for i in range(8):
        cluster.channel.put(i, key="in")
    for _ in range(len(receivers)):
        cluster.channel.put(None, key="in")
    got = [reader.poll(60) for _ in range(8)]
    assert sorted(item for _, item in got) == list(range(8))
    assert sum(echo.result(60)) == 8


@pytest.mark.ci
def test_a_killed_channel_ends_the_wait(cluster: TrainingCluster) -> None:
    reader = ChannelReader(Channel.create("doomed"), "out")
    kill_channel("doomed")
    with pytest.raises(WorkerLost, match="the channel is gone"):
        reader.poll(60)


def test_nothing_listens_beyond_loopback(senders: WorkerGroup, receivers: WorkerGroup) -> None:
    family = ray_processes()
    outside = {
        (p.name(), c.laddr.ip)
        for p in [psutil.Process(), *family]
        for c in p.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"
    }
    assert not outside
    assert any("ray" in p.name() for p in family)  # the processes we speak about are there


def test_a_grading_that_fails_is_known_at_once_while_no_further_message_comes(
    launch: Launch, settings: Settings, channel: Channel
) -> None:
    """As the last trajectories of a phase: the driver would wait for them until its deadline."""
    reward: WorkerGroup = launch(RewardWorker, "reward", settings.reward, max_concurrency=16)
    grading = reward.start("serve", channel)
    reward.call("shutdown", timeout_s=CALL_S)  # its graders are gone
    problem = Problem("problem", [], ["1"])
    channel.put(pack([RolloutResult(0, 1, 0, problem, trajectory())]), key=ENDED)
    with pytest.raises(WorkerFailed, match=r"\.serve failed:(?s:.)*RuntimeError: the grader pool is closed"):
        grading.result(30)
