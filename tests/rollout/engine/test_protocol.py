"""Messages between an engine's client and its process, over a real socket pair."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from rstar2_megatron.rollout.engine.protocol import read_message, write_message

pytestmark = pytest.mark.ci


async def test_arrays_arrive_as_they_are() -> None:
    """Empty ones, every second token of one, and more than a socket takes at once; a reader gets whole messages in order."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=ours)
    reader, other = await asyncio.open_unix_connection(sock=theirs)
    whole = np.arange(300_000, dtype=np.int32)
    sent = [whole, whole[::2], whole[:0], whole[5:9].astype(np.float32) / 3, whole.reshape(-1, 2)[:, 1]]
    for number, array in enumerate(sent):
        write_message(writer, [number, "generate", {"ids": array, "text": "ö"}])
    for number, array in enumerate(sent):
        got_number, method, params = await read_message(reader)
        assert (got_number, method, params["text"]) == (number, "generate", "ö")
        assert params["ids"].dtype == array.dtype and np.array_equal(params["ids"], array)
    with pytest.raises(TypeError, match="no array of int32 or float32"):
        write_message(writer, [0, None, whole.astype(np.int64)])
    writer.close()
    other.close()
