"""Reads the history of an offline `.wandb` file without wandb.

The file is a LevelDB log (blocks of 32 KiB; records of checksum u32, length u16, kind u8, data; a record that does not fit
its block is cut into first, middle, last) behind a header of 7 bytes. Each record is a protobuf message of wandb's public
schema, of which only the history matters.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

_MAGIC = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SCHEMA = """
name: "history" syntax: "proto3"
message_type { name: "Step" field { name: "num" number: 1 type: TYPE_INT64 } }
message_type {
  name: "Item"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "nested_key" number: 2 type: TYPE_STRING label: LABEL_REPEATED }
  field { name: "value_json" number: 16 type: TYPE_STRING }
}
message_type {
  name: "History"
  field { name: "item" number: 1 type: TYPE_MESSAGE type_name: "Item" label: LABEL_REPEATED }
  field { name: "step" number: 2 type: TYPE_MESSAGE type_name: "Step" }
}
message_type { name: "Record" field { name: "history" number: 2 type: TYPE_MESSAGE type_name: "History" } }
"""
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
_RecordMessage: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("Record"))


class BrokenFile(ValueError):
    """The file ends in the middle of a record, or a record is damaged; the records before it are valid."""


def read_history(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, values by name) of each `wandb.log`; nested names are joined by dots.

    Raises BrokenFile, after everything before the break was yielded, and ValueError for a file of another kind.
    """
    data = Path(path).read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not a .wandb file")
    for number, record in enumerate(_records(data)):
        try:
            message = _RecordMessage.FromString(record)
            row = _history(message.history, number) if message.HasField("history") else None
        except (DecodeError, ValueError) as error:
            raise BrokenFile(f"record {number} cannot be read ({error})") from None
        if row is not None:
            yield row


def _history(history: Any, number: int) -> tuple[int, dict[str, Any]]:
    values = {
        ".".join([*filter(None, [item.key]), *item.nested_key]): json.loads(item.value_json or "null") for item in history.item
    }
    return int(values.get("_step", history.step.num if history.HasField("step") else number)), values


# ------------------------------------------------------------------------------------------- LevelDB's log


def _records(data: bytes) -> Iterator[bytes]:
    offset = _HEADER_BYTES
    parts: list[bytes] = []
    while offset < len(data):
        left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if left < _RECORD.size:
            offset += left  # padding
            continue
        if offset + _RECORD.size > len(data):
            raise BrokenFile("it ends in the middle of a record")
        checksum, length, kind = _RECORD.unpack_from(data, offset)
        start = offset + _RECORD.size
        piece = data[start : start + length]
        if kind == 0 and length == 0:
            return  # room reserved but not written yet
        if len(piece) < length:
            raise BrokenFile("it ends in the middle of a record")
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(bytes([kind]) + piece) != checksum:
            raise BrokenFile(f"a damaged record at byte {offset}")
        offset = start + length
        parts = [piece] if kind in (_FULL, _FIRST) else [*parts, piece]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
