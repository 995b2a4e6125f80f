"""A submission as the public Code Judge names it, and the checks of its options: session and files."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from rstar2_megatron.judge.limits import MEGABYTE

_SESSION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MOST_FILES = 64
_FILES_BYTES = MEGABYTE  # of all files together, because they pass through Redis


class Submission(BaseModel):
    """One program to run."""

    model_config = ConfigDict(extra="ignore")

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, Any] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(BaseModel):
    """Several programs; their results have the same order."""

    model_config = ConfigDict(extra="ignore")

    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1)


def check_text(*texts: str | None) -> None:
    """Raises ValueError for a lone surrogate, which JSON can hold and UTF-8 cannot."""
    try:
        "".join(text or "" for text in texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"solution, input, expected_output: {error}") from None


def check_session_name(name: object) -> str:
    """The name, if the queue can use it in a key. Raises ValueError."""
    if not isinstance(name, str) or not _SESSION_NAME.fullmatch(name):
        raise ValueError(f"session={name!r}: 1 to 128 letters, digits, or characters of '_.:-'")
    return name


def check_session(options: Mapping[str, Any], kind: str) -> tuple[str | None, bool]:
    """The session's name or None, and whether it must be open already. Raises ValueError."""
    if options.get("session") is None:
        return None, False
    name = check_session_name(options["session"])
    if kind != "python":
        raise ValueError(f"session={name!r}: only submissions of type python have sessions, not {kind}")
    must_exist = str(options.get("session_must_exist", "false")).lower()
    if must_exist not in ("true", "false"):
        raise ValueError(f"session_must_exist={must_exist!r}: true or false")
    return name, must_exist == "true"


def check_files(options: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Path -> base64 of each file of `options.files`: text, or {"base64": ...}. Raises ValueError.

    The JSON text of such a dictionary is accepted too, because the public server's options are strings.
    """
    files = options.get("files") or {}
    if isinstance(files, str):
        try:
            files = orjson.loads(files)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"files: no JSON ({error})") from None
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise ValueError(f'files: give {{"path": "text" or {{"base64": ...}}}}, at most {_MOST_FILES}')
    if files and kind == "math":
        raise ValueError("files: not for submissions of type math")
    checked = {_checked_path(path): _content(path, content) for path, content in files.items()}
    parts = sorted(PurePosixPath(path).parts for path in checked)
    for one, other in itertools.pairwise(parts):
        if other[: len(one)] == one:
            raise ValueError(f"files: {'/'.join(one)!r} and {'/'.join(other)!r} cannot both be written")
    size = sum(map(len, checked.values())) * 3 // 4
    if size > _FILES_BYTES:
        raise ValueError(f"files: {size} bytes together, at most {_FILES_BYTES}")
    return checked


def _checked_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > 255:
        raise ValueError(f"files: {path!r} is not a path below the working directory")
    return path


def _content(path: str, content: Any) -> str:
    if isinstance(content, str):
        return base64.b64encode(content.encode("utf-8", "surrogatepass")).decode()
    encoded = content.get("base64") if isinstance(content, dict) else None
    if not isinstance(encoded, str):
        raise ValueError(f'files: {path!r} is neither text nor {{"base64": ...}}')
    try:
        base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(f"files: {path!r}: {error}") from None
    return encoded
