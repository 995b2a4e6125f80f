"""The sender of the rollout channel: order, batches while it sends and pauses, a flush without pauses, errors."""

from __future__ import annotations

import asyncio
import time

import pytest

from rstar2_megatron.cluster.channel import Outbox, pack, unpack
from rstar2_megatron.rollout.messages import RolloutResult
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory


async def test_items_that_come_while_it_sends_or_pauses_are_one_message() -> None:
    messages: list[list[int]] = []

    async def send(items: list[int]) -> None:
        await asyncio.sleep(0.02)
        messages.append(items)

    outbox = Outbox(send)
    for item in range(50):
        outbox.add(item)
        await asyncio.sleep(0.004)
    await outbox.flush()
    assert [item for items in messages for item in items] == list(range(50)) and outbox.sent == 50
    assert messages[0] == [0], "the first item goes at once"
    assert len(messages) <= 6, "a message of 20 ms is followed by a pause of 80 ms"


async def test_a_flush_does_not_wait_for_the_pause() -> None:
    messages: list[list[int]] = []

    async def send(items: list[int]) -> None:
        await asyncio.sleep(0.1)
        messages.append(items)

    outbox = Outbox(send)
    outbox.add(1)
    await asyncio.sleep(0.12)
    outbox.add(2)
    started = time.monotonic()
    await outbox.flush()
    assert messages == [[1], [2]]
    assert time.monotonic() - started < 0.3, "0.1 s of sending; the pauses take 0.25 s each"


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
