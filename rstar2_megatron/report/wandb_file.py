"""Reads the history of an offline `.wandb` file without wandb.

The file is a LevelDB log (blocks of 32 KiB; records of checksum u32, length u16, kind u8, data; a record that does not fit
its block is cut into first, middle, last) behind a header of 7 bytes. Each record is a protobuf message of wandb's public
schema, of which only the history matters: Record.history = 2; HistoryRecord.item = 1, .step = 2; HistoryItem.key = 1,
.nested_key = 2, .value_json = 16; HistoryStep.num = 1.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAGIC = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


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
            for history in _messages(record, 2):
                yield _history(history, number)
        except (IndexError, ValueError, UnicodeDecodeError) as error:
            raise BrokenFile(f"record {number} cannot be read ({error})") from None


def _history(message: bytes, number: int) -> tuple[int, dict[str, Any]]:
    values: dict[str, Any] = {}
    step = number
    for field, value in _fields(message):
        if field == 2 and isinstance(value, bytes):
            step = next((v for f, v in _fields(value) if f == 1 and isinstance(v, int)), 0)
        elif field == 1 and isinstance(value, bytes):
            names: list[str] = []
            text = "null"
            for item_field, item in _fields(value):
                if item_field in (1, 2) and isinstance(item, bytes):
                    names.append(item.decode())
                elif item_field == 16 and isinstance(item, bytes):
                    text = item.decode()
            values[".".join(names)] = json.loads(text)
    return int(values.get("_step", step)), values


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


# --------------------------------------------------------------------------------------------- protobuf


def _messages(message: bytes, wanted: int) -> Iterator[bytes]:
    for field, value in _fields(message):
        if field == wanted and isinstance(value, bytes):
            yield value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: integers of varints, bytes of everything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        if at + length > len(message):
            raise ValueError("a field longer than its message")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
