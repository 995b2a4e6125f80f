"""Problems from jsonl.

A row is `{"prompt": [{"role": ..., "content": ...}, ...], "solutions": [...], "query_id": ..., "task": ...}`.
`prompt` may also be a string (one user message); `query_id` and `task` may be absent.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.data.conversation import role_and_text
from rstar2_megatron.data.json_text import exact_number, unreadable
from rstar2_megatron.data.rows import DataError, json_line, text_lines
from rstar2_megatron.trajectory import Problem

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # all but tab and line ends
_IN_ANSWER = re.compile(_CONTROL.pattern + r"|\t|\r(?!\n)")  # JSON's reading of \text and \rho


def read_problems(paths: Iterable[str | Path], prompt_key: str = "prompt", answer_key: str = "solutions") -> list[Problem]:
    """All problems of the jsonl files, in order. Raises DataError with file and line number.

    A row without `query_id` gets `{file stem}-{line}`; a `query_id` that occurs twice is an error, because
    it names a group. A file that has not changed is parsed once in a process.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    paths = list(paths)
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"data file {path} does not exist")
        stat = path.stat()
        for where, problem in _read_file(path, stat.st_mtime_ns, stat.st_size, prompt_key, answer_key):
            if problem.query_id in seen:
                raise DataError(
                    f"{where}: query_id {problem.query_id!r} was already used at {seen[problem.query_id]}; make them unique"
                )
            seen[problem.query_id] = where
            problems.append(problem)
    if not problems:
        raise DataError(
            f"no problems in {', '.join(map(str, paths)) or '(no files)'}; give jsonl files with one problem a line"
        )
    return problems


@functools.lru_cache(maxsize=8)  # the check before a run and the run itself read the same files
def _read_file(path: Path, mtime_ns: int, size: int, prompt_key: str, answer_key: str) -> list[tuple[str, Problem]]:
    """(file:line, problem) of each row. Time and size tell whether the file has changed since it was parsed."""
    problems = []
    for number, line in text_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            row = json_line(line, where)
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
            if missing := [key for key in (prompt_key, answer_key) if key not in row]:
                raise DataError(f"{where}: row without {missing[0]!r}; it has {', '.join(sorted(row)) or 'nothing'}")
            problems.append((where, problem_of(row, where, prompt_key, answer_key, f"{path.stem}-{number}")))
    return problems


def problem_of(row: dict[str, Any], where: str, prompt_key: str, answer_key: str, default_id: str) -> Problem:
    """A row as training reads it. Raises DataError that begins with `where`."""
    known = {prompt_key, answer_key, "query_id", "task"}
    given = {key: value for key, value in row.items() if value is not None}
    solutions = row[answer_key] if isinstance(row[answer_key], list) else [row[answer_key]]
    extra = {key: value for key, value in row.items() if key not in known}
    if fault := unreadable(json.dumps(extra, ensure_ascii=False)):
        raise DataError(f"{where}: the row has {fault}")
    return Problem(
        query_id=_text(given.get("query_id", default_id), where, "query_id"),
        prompt=_messages(row[prompt_key], where, prompt_key),
        solutions=[_text(answer, where, answer_key, "a non-empty list of answers, ") for answer in solutions or [[]]],
        task=_text(given.get("task", "math"), where, "task"),
        extra=extra,
    )


def _text(value: Any, where: str, key: str, expected: str = "") -> str:
    if not exact_number(value) and not (isinstance(value, str) and value.strip()):
        raise DataError(f"{where}: {key!r} must be {expected}a text or an exact number, got {value!r}")
    return _readable(str(value), where, key, _IN_ANSWER)


def _readable(text: str, where: str, key: str, controls: re.Pattern[str] = _CONTROL) -> str:
    fault = unreadable(text)
    if not fault and (control := controls.search(text.rstrip(" \t\r\n"))):
        remedy = "write LaTeX's backslash as \\\\" if control[0] in "\b\f\t\r" else "remove it"
        fault = f"the control character U+{ord(control[0]):04X}, which no reader sees; {remedy}"
    if fault:
        raise DataError(f"{where}: {key!r} has {fault}")
    return text


def _messages(prompt: Any, where: str, key: str) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: {key!r} must be a string or a non-empty list of messages")
    messages = []
    for number, raw in enumerate(prompt, 1):
        try:
            role, text = role_and_text(raw)
        except ValueError as error:
            raise DataError(f"{where}: message {number} of {key!r} {error}") from None
        messages.append({"role": role, "content": _readable(text, where, key)})
    said = [message["content"] for message in messages if message["role"] == "user"]
    if not said:
        raise DataError(f"{where}: {key!r} has no user message")
    if not all(text.strip() for text in said):
        raise DataError(f"{where}: {key!r} is empty; write the problem, or remove the row")
    return messages


def drop_long_prompts(
    problems: Sequence[Problem], prompt_length: Callable[[Problem], int], max_prompt_length: int
) -> tuple[list[Problem], int]:
    """(problems whose rendered prompt has at most `max_prompt_length` tokens, how many were dropped).

    Raises DataError when none is left.
    """
    lengths = [prompt_length(problem) for problem in problems]
    kept = [p for p, length in zip(problems, lengths, strict=True) if length <= max_prompt_length]
    if problems and not kept:
        raise DataError(
            f"every prompt is longer than data.max_prompt_length={max_prompt_length} tokens (shortest {min(lengths)}); raise it"
        )
    return kept, len(problems) - len(kept)
