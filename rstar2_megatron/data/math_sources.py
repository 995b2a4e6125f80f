"""Shapes of public mathematics sets, and how a row of each becomes a problem and its answer.

| source | columns | on the hub |
|---|---|---|
| dapo | prompt (text or messages), solution or reward_model.ground_truth | open-r1/DAPO-Math-17k-Processed: en, cn, all |
| openmathreasoning | problem, expected_answer, problem_type | nvidia/OpenMathReasoning: cot, tir, additional_problems |
| project-euler | problem or question or description, answer | none; give a file |
| problems | prompt (messages), solutions: this project's own form | none; give a file |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rstar2_megatron.data.conversation import content_text
from rstar2_megatron.data.json_text import exact_number, json_type
from rstar2_megatron.data.problems import listed
from rstar2_megatron.data.rows import DataError, HubName, Row, Source, Unusable, with_names

Published = tuple[str, str]
"""A problem and its answer, as they were published."""


def _text(value: Any, column: str) -> str:
    """A text column; numbers are written out, null is empty. Raises ValueError, as do the others."""
    if value is None or isinstance(value, str):
        return value or ""
    if not exact_number(value):
        raise ValueError(f"column {column!r} of type {json_type(value)} is no text and no exact number")
    return str(int(value)) if value == int(value) else str(value)


def _last_user_message(value: Any, column: str) -> str:
    """The problem of a prompt that is text, or a list of messages (role, content)."""
    value = listed(value, column, dict)
    if not isinstance(value, list):
        return _text(value, column)
    messages = [m for m in value if isinstance(m, Mapping)]
    users = [m for m in messages if m.get("role") == "user"]
    if not users:
        raise ValueError(f"column {column!r} has no user message")
    if [m for m in messages if m.get("content")] != users[-1:]:
        raise Unusable("a prompt of several messages, of which training has the last one alone")
    content = users[-1].get("content")
    return content_text(content, "user") if isinstance(content, list) else _text(content, f"{column}[].content")


def _answer(value: Any, column: str) -> str:
    """The one answer of a column, which may be in a list."""
    found = listed(value, column, str)
    if not isinstance(found, list):
        return _text(found, column)
    if len(found) > 1:
        raise Unusable("several answers")
    return _text(found[0] if found else None, column)


def _given(values: Mapping[str, Any], names: str) -> str | None:
    """The first column of `a|b|c` that is there and not null."""
    return next((name for name in names.split("|") if values.get(name) is not None), None)


def _read_dapo(values: Mapping[str, Any]) -> Published:
    text = _last_user_message(values["prompt"], "prompt")
    if values.get("solution") is not None:
        return text, _answer(values["solution"], "solution")
    model = values.get("reward_model")
    if model is not None and not (isinstance(model, Mapping) and "ground_truth" in model):
        raise ValueError("column 'reward_model' without 'ground_truth'")
    return text, _answer(model["ground_truth"] if model else None, "reward_model.ground_truth")


def _read_openmath(values: Mapping[str, Any]) -> Published:
    text = _text(values["problem"], "problem")
    answer = _answer(values["expected_answer"], "expected_answer")
    kind = values.get("problem_type")
    # answers of the other kinds are majority votes of models, or the problem is a proof turned into a question
    if kind is not None and kind != "has_answer_extracted":
        raise Unusable("answer not stated by the source")
    return text, answer


def _columns(texts: str, answers: str) -> Callable[[Mapping[str, Any]], Published]:
    """Reads the first column of each `a|b|c` that is there and not null."""

    def read(values: Mapping[str, Any]) -> Published:
        text, answer = (_given(values, names) or names.partition("|")[0] for names in (texts, answers))
        return _last_user_message(values.get(text), text), _answer(values.get(answer), answer)

    return read


_EULER = ("problem|question|description|content|prompt", "answer|solution|expected_answer")
_OPENMATH = HubName("nvidia/OpenMathReasoning", "default", "cot")
SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("dapo", ("prompt", "solution|reward_model"), _read_dapo, HubName("open-r1/DAPO-Math-17k-Processed", "en")),
        Source("openmathreasoning", ("problem", "expected_answer"), _read_openmath, _OPENMATH, ("problem_type",)),
        Source("project-euler", _EULER, _columns(*_EULER)),
        Source("problems", ("prompt", "solutions"), _columns("prompt", "solutions")),
    )
}


def problem_text(row: Row) -> str:
    """The problem of a row of any shape, for evaluation sets, which need no answer.

    Raises DataError naming file and row when no column holds one.
    """
    columns = "problem|question|prompt|description|content"
    values = with_names(row.values, columns.split("|"))
    if (column := _given(values, columns)) is None:
        raise DataError(
            f"{row.where}: no column with a problem (problem, question, prompt); it has {', '.join(sorted(row.values))}"
        )
    try:
        return _last_user_message(values[column], column)
    except ValueError as error:
        raise DataError(f"{row.where}: {error}") from None
