"""Messages between `EngineClient` and the engine's process: length-prefixed msgpack over a Unix socket pair.

A request is [id, method, params]; its reply is [id, error or null, result]. Id 0 marks a report (`EngineReport`), which the
child sends when the engine is up and then once a second. The module also holds the results and errors of engine calls. It
imports neither torch nor SGLang. Arrays of int32 and float32 travel as their little-endian bytes.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import numpy as np

_HEADER = struct.Struct("<I")
REPORT_ID = 0
INTERRUPTED = "interrupted"
"""Finish reason of a request that a weight update ended: its caller goes on from the same tokens."""


class EngineReport(msgspec.Struct):
    """Load of the engine, as its process reports it."""

    progress: float  # time of the scheduler's last message; only compared for change
    max_total_tokens: int = 0  # KV capacity
    used_tokens: int = 0  # of the KV cache
    running_requests: int = 0
    waiting_requests: int = 0
    generated: dict[str, int] = {}  # tokens so far by request id, up to a few dozen tokens behind


class GenerateResult(msgspec.Struct):
    """Generated tokens. `token_ids` (int32) and `logprobs` (float32, temperature applied) have one entry per token."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str  # stop | length | abort | interrupted
    version_spans: list[tuple[int, int, int]]  # (start, end, weight version) of each span of tokens
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the KV cache
    retractions: int = 0  # times the engine evicted this request and computed it again


class EngineLost(RuntimeError):
    """The engine died, made no progress, or was closed during a call."""


class GenerationTimeout(EngineLost):
    """One request missed its deadline and was aborted. The engine itself still serves."""


class EngineError(RuntimeError):
    """The engine refused a call and still serves."""


_ARRAYS = {1: "<i4", 2: "<f4"}  # by the code of msgpack's extension type


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    for code, kind in _ARRAYS.items():
        if isinstance(value, np.ndarray) and value.dtype == kind:
            return msgspec.msgpack.Ext(code, value.tobytes())
    raise TypeError(f"a message holds {type(value).__name__}, which is no array of int32 or float32")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(ext_hook=lambda code, data: np.frombuffer(data, _ARRAYS[code]))


async def read_message(reader: asyncio.StreamReader) -> list[Any]:
    """The next message. Raises asyncio.IncompleteReadError when the other side has closed the socket."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    message: list[Any] = _decoder.decode(await reader.readexactly(size))
    return message


def write_message(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    body = _encoder.encode(message)
    writer.write(_HEADER.pack(len(body)) + body)
