"""The sender of the rollout channel: order, batches while it sends and pauses, a flush without pauses, errors."""

from __future__ import annotations

import asyncio
import time

import pytest

from rstar2_megatron.cluster import channel
from rstar2_megatron.cluster.channel import Outbox, pack, unpack
from rstar2_megatron.rollout.messages import RolloutResult
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory


class Sender:
    """Takes `seconds` for a message, and keeps what it sent and when."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.messages: list[list[int]] = []
        self.times: list[tuple[float, float]] = []  # begin and end of each message
        self.begun = asyncio.Event()

    async def __call__(self, items: list[int]) -> None:
        begin = time.monotonic()
        self.begun.set()
        await asyncio.sleep(self.seconds)
        self.messages.append(items)
        self.times.append((begin, time.monotonic()))


async def test_items_that_come_while_it_sends_or_pauses_are_one_message() -> None:
    sender = Sender(0.02)
    outbox = Outbox(sender)
    outbox.add(0)
    await sender.begun.wait()
    for item in range(1, 50):
        outbox.add(item)
    while len(sender.messages) < 2:
        await asyncio.sleep(0)
    assert sender.messages == [[0], list(range(1, 50))] and outbox.sent == 50
    (begin, end), (next_begin, _) = sender.times
    assert next_begin - end >= min(4 * (end - begin), 0.25) - 0.01  # the timer's resolution
    await outbox.close()


async def test_a_flush_does_not_wait_for_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_REST", 1e9)
    monkeypatch.setattr(channel, "_LONGEST_PAUSE_S", 1e6)
    sender = Sender()
    outbox = Outbox(sender)
    outbox.add(1)
    while not sender.messages:
        await asyncio.sleep(0)
    outbox.add(2)
    await asyncio.wait_for(outbox.flush(), 60)
    assert sender.messages == [[1], [2]]


async def test_a_failed_message_is_raised() -> None:
    async def send(items: list[int]) -> None:
        raise ConnectionError("the channel is gone")

    outbox = Outbox(send)
    outbox.add(1)
    with pytest.raises(ConnectionError, match="the channel is gone"):
        await outbox.flush()
    with pytest.raises(ConnectionError, match="the channel is gone"):
        outbox.add(2)
    await outbox.close()


def test_results_survive_the_channel() -> None:
    one = Trajectory("q", 3, assistant_texts=["a"], finish_reason=FinishReason.ANSWERED, reward=1.0)
    (back,) = unpack(pack([RolloutResult(1, 2, 3, Problem("q", [], ["42"]), one, grading_s=0.5)]))
    assert back.trajectory == one and (back.engine, back.phase, back.group, back.grading_s) == (1, 2, 3, 0.5)
