"""Messages between `EngineClient` and the engine's process: length-prefixed msgpack over a Unix socket pair.

A request is [id, method, params]; its reply is [id, error or null, result]. Id 0 is the child's own: a report
(`EngineReport`) when the engine is up and then once a second.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

_HEADER = struct.Struct("<I")
REPORT_ID = 0


class EngineReport(msgspec.Struct):
    """What the child says about itself."""

    ready: bool
    progress: float  # time of the scheduler's last message; only its changes matter
    max_total_tokens: int = 0  # KV capacity
    max_context_tokens: int = 0  # longest request the engine takes


class EngineInfo(msgspec.Struct):
    """The engine's load as SGLang reports it."""

    kv_capacity_tokens: int
    kv_used_tokens: int
    running_requests: int
    waiting_requests: int
    cache_hit_rate: float = 0.0


class GeneratePayload(msgspec.Struct):
    """Result of one generation on the wire."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version_spans: list[tuple[int, int, int]]  # start, end, version
    prompt_tokens: int
    cached_tokens: int
    retractions: int  # times the engine evicted this request and computed it again


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


async def read_message(reader: asyncio.StreamReader) -> list[Any]:
    """The next message. Raises asyncio.IncompleteReadError when the other side is gone."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    message: list[Any] = _decoder.decode(await reader.readexactly(size))
    return message


def write_message(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    body = _encoder.encode(message)
    writer.write(_HEADER.pack(len(body)) + body)
