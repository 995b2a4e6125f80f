"""Problems from jsonl, json, parquet or csv files, from a directory that `datasets` reads, or from the hub.

A row is `{"prompt": [{"role": ..., "content": ...}, ...], "solutions": [...], "query_id": ..., "task": ...}`.
`prompt` may also be a string (one user message); `query_id` and `task` may be absent. A row of verl's form has its answer in
`reward_model.ground_truth` and its task in `data_source`. `data.rows` names a function that makes such a row of any other.
Every column that is none of these is in `Problem.extra`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from rstar2_megatron.data.conversation import role_and_text
from rstar2_megatron.data.json_text import BLANKS, CONTROL, exact_number, half_character, unreadable
from rstar2_megatron.data.rows import DataError, Input, check_media, data_input
from rstar2_megatron.extension.choice import own_function
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import Problem

# A text that was a list of texts or messages: it begins and ends so, or is of messages and was cut off.
_LIST = re.compile(r"\[\s*\{?\s*[\"'].*\]|\[?\s*array\(\s*\[.*\)\s*\]?|\[\s*\{\s*[\"'](?:role|content)[\"']\s*:.*", re.DOTALL)
_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_IN_ANSWER = re.compile(CONTROL.pattern + r"|\t|\r(?!\n)")  # JSON's reading of \text and \rho
_WORD = re.compile(r"[^\W\d_]{2,}|\d+")
_SECOND_LABEL = re.compile(r"(?<![^\W_])(?:B(?!\w)|[b2]\s?[).:\]])")  # of the choices in a prompt
# Names that published sets use, the likeliest first; short answers before worked solutions.
_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
_ANSWERS = (
    "solutions", "answer", "answers", "final_answer", "expected_answer", "ground_truth", "target", "label", "solution",
    "output", "response",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Columns:
    """How rows become problems: the keys of `data`, or a function of the user's."""

    prompt: str = "prompt"
    answer: str = "solutions"
    rows: UserCode | None = None

    def __hash__(self) -> int:
        return hash((self.prompt, self.answer, self.rows and self.rows.sha256))


_DEFAULT = Columns()


def read_problems(
    paths: Iterable[str | Path],
    data: DataSettings | Columns = _DEFAULT,
    say: Callable[[str], None] = lambda line: None,
    *,
    limit: int | None = None,
) -> list[Problem]:
    """All problems that `paths` name (`rows.data_input`), in order. Raises DataError with file and line or row.

    A row without `query_id` gets `{file stem}-{line}`; a `query_id` that occurs twice is an error, because
    it names a group. A file that has not changed is parsed once in a process.
    data: its keys name the columns. say: gets a line when `data.rows` drops rows. limit: only the first so many of each path.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    inputs = [data_input(path) for path in paths]
    columns = data if isinstance(data, Columns) else Columns(data.prompt_key, data.answer_key, data.rows)
    left_out = 0
    for one, stem in zip(inputs, _stems(inputs)):
        read, dropped = _read(one, stem, tuple(one.state), columns)
        left_out += dropped
        for where, problem in read[:limit]:
            if problem.query_id in seen:
                raise DataError(
                    f"{where}: query_id {problem.query_id!r} was already used at {seen[problem.query_id]}; make them unique"
                )
            seen[problem.query_id] = where
            problems.append(problem)
    dropped_by = f"; data.rows={columns.rows.label} dropped {left_out} rows" if columns.rows and left_out else ""
    if not problems:
        names = ", ".join(one.label for one in inputs) or "(no files)"
        raise DataError(f"no problems in {names}{dropped_by}; give files with one problem a row")
    if dropped_by:
        say(f"{len(problems)} problems{dropped_by}")
    return problems


def _stems(inputs: Sequence[Input]) -> list[str]:
    """Short names of the inputs, with as many directories as tell them apart: `gsm8k-train` and `math-train`."""
    paths = [one.place.absolute() for one in inputs]
    tails = [  # the names with suffixes are of files that differ in these
        [(*path.parts[1:-1], last)[-depth:] for last in (path.stem, path.name) for depth in range(1, len(path.parts))]
        for path in paths
    ]
    count = Counter(tail for of_path in tails for tail in {*of_path})
    alone = (next((tail for tail in of_path if count[tail] == 1), None) for of_path in tails)
    return ["-".join(tail or (str(one.hub or one.place.name),)) for one, tail in zip(inputs, alone)]


@functools.lru_cache(maxsize=8)  # the check before a run and the run itself read the same files
def _read(one: Input, stem: str, state: tuple[int, ...], columns: Columns) -> tuple[list[tuple[str, Problem]], int]:
    """(place, problem) of each row, and the number of those that `data.rows` dropped."""
    problems, dropped = [], 0
    own = None if columns.rows is None else own_function("data.rows", columns.rows, "row")
    for row in one.rows():
        values: Any = row.values
        if own is not None:
            try:
                values = own(values)
            except UserCodeError as error:
                raise DataError(f"{row.where}: {error}") from error
            if isinstance(values, Problem):
                values = row_of(values, columns)
            if values is None:
                dropped += 1
                continue
            if not isinstance(values, dict):
                raise DataError(
                    f"{row.where}: data.rows={columns.rows.label if columns.rows else ''} returned a "
                    f"{type(values).__name__}; return a dict, a Problem, or None to drop the row"
                )
            if odd := [key for key in values if not isinstance(key, str)]:
                raise DataError(f"{row.where}: data.rows returned a row with the key {odd[0]!r}; a column's name is a text")
        values = _with_answer(values, columns)
        if missing := [key for key in (columns.prompt, columns.answer) if key not in values]:
            words = [f"data.{key}={name}" for key, name in proposed_keys(values, columns).items()]
            remedy = f"set {' '.join(words)}" if words else "map it by data.rows=my_data.py:row (docs/extend.md)"
            has = ", ".join(sorted(values)) or "nothing"
            raise DataError(f"{row.where}: row without {missing[0]!r}; it has {has}; {remedy}")
        problem = problem_of(values, row.where, columns.prompt, columns.answer, f"{stem}-{row.number}")
        problems.append((row.where, problem))
    return problems, dropped


def row_of(problem: Problem, columns: Columns) -> dict[str, Any]:
    """The row that is read as `problem`."""
    own = {"query_id": problem.query_id or None, "task": problem.task}
    return {**problem.extra, columns.prompt: problem.prompt, columns.answer: problem.solutions, **own}


def _with_answer(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """A row of verl's form with its answer under the answer's key. An object, or a list that holds one or a list, is JSON."""
    rule = row.get("reward_model")
    truth = rule.get("ground_truth") if isinstance(rule, dict) else None
    if row.get(columns.answer) is not None or truth is None:
        return row
    answers = truth if isinstance(truth, list) else [truth]
    with contextlib.suppress(TypeError, ValueError, RecursionError):  # a list of several texts is one answer
        match json.loads(truth):
            case [str(), *rest] as found if all(isinstance(one, int | float) for one in rest):
                answers = found
    if any(isinstance(one, dict | list) for one in answers):
        with contextlib.suppress(TypeError, ValueError):  # what is no JSON is refused with the row's other columns
            answers = [json.dumps(truth, ensure_ascii=False)]
    return {**row, columns.answer: answers, "task": row.get("task") or row.get("data_source")}


def proposed_keys(row: Mapping[str, Any], columns: Columns = _DEFAULT) -> dict[str, str]:
    """Keys of `data` under which the row is read, by the names of its columns; empty when there is none to propose."""
    row = _with_answer(dict(row), columns)
    by_lower = {name.lower(): name for name in reversed(row)}

    def find(key: str, names: tuple[str, ...]) -> str | None:
        return key if key in row else next((by_lower[name] for name in names if name in by_lower), None)

    prompt, answer = find(columns.prompt, _PROMPTS), find(columns.answer, _ANSWERS)
    if prompt is None or answer is None:
        return {}
    found = {"prompt_key": (prompt, columns.prompt), "answer_key": (answer, columns.answer)}
    return {key: name for key, (name, set_now) in found.items() if name != set_now}


def problem_of(row: dict[str, Any], where: str, prompt_key: str, answer_key: str, default_id: str) -> Problem:
    """A row as training reads it. Raises DataError that begins with `where`."""
    try:
        return _problem(row, prompt_key, answer_key, default_id)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _problem(row: dict[str, Any], prompt_key: str, answer_key: str, default_id: str) -> Problem:
    known = {prompt_key, answer_key, "query_id", "task"}
    given = {key: value for key, value in row.items() if value is not None}
    check_media(row)
    answers = listed(row[answer_key], answer_key, str)
    solutions = list(answers) if isinstance(answers, list | tuple | np.ndarray) else [answers]
    extra = {key: value for key, value in row.items() if key not in known}
    try:
        text = json.dumps(extra, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a column is no JSON ({error}); leave it out, or map it by data.rows") from None
    if fault := half_character(text):
        raise ValueError(f"the row has {fault}")
    problem = Problem(
        query_id=_text(given.get("query_id", default_id), "query_id"),
        prompt=_messages(listed(row[prompt_key], prompt_key, dict), prompt_key),
        solutions=[_text(answer, answer_key, "a non-empty list of answers, ") for answer in solutions or [[]]],
        task=_text(given.get("task", "math"), "task"),
        extra=json.loads(text),  # as a file would have it, without classes of the user's
    )
    _check_whole(problem, prompt_key)
    return problem


def _check_whole(problem: Problem, prompt_key: str) -> None:
    """Raises ValueError where choices, of which the answer is a letter or a number, or Alpaca's input are not in the prompt."""
    said = "\n".join(message["content"] for message in problem.prompt)
    apart = "input" if prompt_key == "instruction" and str(problem.extra.get("input") or "").strip() not in said else ""
    choices = {key: problem.extra.get(key) for key in ("options", "choices")}
    if "B" in problem.extra:  # a column for each choice
        choices["A"] = {key: problem.extra[key] for key in string.ascii_uppercase if key in problem.extra}
    for key, value in choices.items():
        if _chosen_from(value, problem.solutions, said):
            apart = key
    if apart:
        raise ValueError(f"{apart!r} belongs to the problem and is not in {prompt_key!r}; put it there by data.rows")


def _chosen_from(choices: Any, solutions: Sequence[str], said: str) -> bool:
    """Whether the answers are labels of these choices, none of which the prompt `said`.

    A second label or one word in the prompt is enough, since spellings differ and one refused row costs its whole file.
    """
    text = str(choices).lower()
    words = {*_WORD.findall(text)} - {"none", "text", "label"}  # the last two are keys of ARC's choices
    if not words or _SECOND_LABEL.search(said) or any(word in said.lower() for word in words):
        return False
    labels = {*string.ascii_lowercase, *string.digits[: text.count(",") + 2]} - words
    labels -= {str(choice).lower() for choice in choices} if isinstance(choices, list) else set()
    several = re.search(r"""(?s)\[.*(?:,|['"]\s+['"])|\bb\b""", text)  # in a list of any spelling, or by their labels
    return bool(several) and all(one.strip("()").lower() in labels for one in solutions)


def listed(value: Any, key: str, *kinds: type) -> Any:
    """The list with one of these kinds that a text holds, as tables write it: '["4"]' in JSON, "['4']" in Python.

    Any other value is itself. Raises ValueError for a list that cannot be read.
    """
    if not isinstance(value, str) or not _LIST.fullmatch(value.strip()):
        return value
    for parse in (json.loads, _literal):
        try:
            found = parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list) and any(isinstance(part, kinds) for part in found) else value
    raise ValueError(
        f"{key!r} is a list that became text and cannot be read again exactly, got {value[:80]!r}; write the list itself, as "
        "parquet or jsonl"
    )


def _literal(text: str) -> Any:
    """What Python reads, but for strings with only blanks between them: it joins them, and numpy writes arrays so."""
    if re.search(r"''\s*''", _STRING.sub("''", text)):
        raise ValueError("strings without a comma")
    return ast.literal_eval(text)


def _text(value: Any, key: str, expected: str = "") -> str:
    value = value.item() if isinstance(value, np.generic) else value
    value = str(value) if isinstance(value, Decimal) and value.is_finite() else value
    if not exact_number(value) and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{key!r} must be {expected}a text or an exact number, got {value!r}")
    return _readable(str.__str__(value) if isinstance(value, str) else str(value), key, _IN_ANSWER)


def _readable(text: str, key: str, controls: re.Pattern[str] = CONTROL) -> str:
    if fault := unreadable(text.rstrip(BLANKS), controls):
        raise ValueError(f"{key!r} has {fault}")
    return text


def _messages(prompt: Any, key: str) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{key!r} must be a string or a non-empty list of messages")
    messages = []
    for number, raw in enumerate(prompt, 1):
        try:
            role, text = role_and_text(raw)
        except ValueError as error:
            raise ValueError(f"message {number} of {key!r} {error}") from None
        messages.append({"role": role, "content": _readable(str.__str__(text), key)})
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{key!r} ends with a message of the assistant, so the model would read an answer before its own; name "
            "the column with the problem alone by data.prompt_key, or map it by data.rows"
        )
    said = [message["content"] for message in messages if message["role"] == "user"]
    if not said:
        raise ValueError(f"{key!r} has no user message")
    if not all(text.strip() for text in said):
        raise ValueError(f"{key!r} is empty; write the problem, or remove the row")
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


def trained_note(held_out: Sequence[Problem], trained: Sequence[Problem]) -> str:
    """How many held-out problems are trained on, by prompt and solutions; "" for none."""
    known = {str((problem.prompt, problem.solutions)) for problem in trained}
    same = sum(str((problem.prompt, problem.solutions)) in known for problem in held_out)
    said = f"{same} of {len(held_out)} held-out problems are training problems too; scores tell little of new ones"
    return said if same else ""
