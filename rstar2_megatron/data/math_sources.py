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
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.data.rows import DataError, HubName, Row


@dataclass(frozen=True, slots=True)
class RawProblem:
    """A problem as it was published. `why_not` says why the row cannot be used, "" when it can."""

    text: str
    answer: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class MathSource:
    """One form of data set: the columns that it needs, and its reader."""

    name: str
    columns: tuple[str, ...]
    """Columns that may be read."""
    needs: tuple[tuple[str, ...], ...]
    """A row must have at least one column of each group."""
    read: Callable[[Mapping[str, Any], str], RawProblem]
    hub: HubName | None = None
    configs: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()

    def parse(self, row: Row) -> RawProblem:
        """Raises DataError naming file, row and the columns that are missing or of another type."""
        for group in self.needs:
            if not any(name in row.values for name in group):
                wanted = " or ".join(repr(name) for name in group)
                raise DataError(
                    f"{row.where}: a row of {self.name} needs {wanted}; it has {', '.join(sorted(row.values)) or 'nothing'}"
                )
        return self.read(row.values, row.where)


def _text(value: Any, where: str, column: str) -> str:
    """A text column; numbers are written out, null is empty."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: column {column!r} must be text, got {type(value).__name__}")
    return str(int(value)) if float(value).is_integer() else str(value)


def _last_user_message(value: Any, where: str, column: str) -> str:
    """The problem of a prompt that is text, or a list of messages (role, content)."""
    if not isinstance(value, list):
        return _text(value, where, column)
    users = [m for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
    if not users:
        raise DataError(f"{where}: column {column!r} has no user message")
    return _text(users[-1].get("content"), where, f"{column}[].content")


def _first_present(values: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first column that is there and not null; the first that is there when all are null."""
    present = [name for name in names if name in values]
    return next((name for name in present if values[name] is not None), present[0])


def _read_dapo(values: Mapping[str, Any], where: str) -> RawProblem:
    text = _last_user_message(values["prompt"], where, "prompt")
    if values.get("solution") is not None:
        return RawProblem(text, _text(values["solution"], where, "solution"))
    model = values.get("reward_model")
    if model is not None and not (isinstance(model, Mapping) and "ground_truth" in model):
        raise DataError(f"{where}: column 'reward_model' needs 'ground_truth', got {model!r}")
    return RawProblem(text, _text(model["ground_truth"] if model else None, where, "reward_model.ground_truth"))


def _read_openmath(values: Mapping[str, Any], where: str) -> RawProblem:
    text = _text(values["problem"], where, "problem")
    answer = _text(values["expected_answer"], where, "expected_answer")
    kind = values.get("problem_type")
    # answers of the other kinds are majority votes of models, or the problem is a proof turned into a question
    if kind is not None and kind != "has_answer_extracted":
        return RawProblem(text, answer, why_not="answer not stated by the source")
    return RawProblem(text, answer)


_EULER_TEXT = ("problem", "question", "description", "content", "prompt")
_EULER_ANSWER = ("answer", "solution", "expected_answer")


def _read_euler(values: Mapping[str, Any], where: str) -> RawProblem:
    text, answer = _first_present(values, _EULER_TEXT), _first_present(values, _EULER_ANSWER)
    return RawProblem(_last_user_message(values[text], where, text), _text(values[answer], where, answer))


def _read_own(values: Mapping[str, Any], where: str) -> RawProblem:
    solutions = values["solutions"]
    if isinstance(solutions, list):
        if len(solutions) > 1:
            return RawProblem("", "", why_not="several answers")
        solutions = solutions[0] if solutions else None
    return RawProblem(_last_user_message(values["prompt"], where, "prompt"), _text(solutions, where, "solutions"))


SOURCES: dict[str, MathSource] = {
    source.name: source
    for source in (
        MathSource(
            "dapo",
            ("prompt", "solution", "reward_model"),
            (("prompt",), ("solution", "reward_model")),
            _read_dapo,
            HubName("open-r1/DAPO-Math-17k-Processed", "en"),
            configs=("all", "en", "cn"),
            splits=("train",),
        ),
        MathSource(
            "openmathreasoning",
            ("problem", "expected_answer", "problem_type"),
            (("problem",), ("expected_answer",)),
            _read_openmath,
            HubName("nvidia/OpenMathReasoning", "default", "cot"),
            configs=("default",),
            splits=("cot", "tir", "genselect", "additional_problems"),
        ),
        MathSource("project-euler", (*_EULER_TEXT, *_EULER_ANSWER), (_EULER_TEXT, _EULER_ANSWER), _read_euler),
        MathSource("problems", ("prompt", "solutions"), (("prompt",), ("solutions",)), _read_own),
    )
}


def find_source(name: str) -> MathSource:
    """Raises DataError listing the known shapes."""
    if name not in SOURCES:
        raise DataError(f"unknown source {name!r}; known shapes are {', '.join(SOURCES)}")
    return SOURCES[name]


def problem_text(row: Row) -> str:
    """The problem of a row of any shape, for evaluation sets, which need no answer.

    Raises DataError naming file and row when no column holds one.
    """
    for column in ("problem", "question", "prompt", "description", "content"):
        if row.values.get(column) is not None:
            return _last_user_message(row.values[column], row.where, column)
    raise DataError(
        f"{row.where}: no column with a problem (problem, question, prompt); it has {', '.join(sorted(row.values))}"
    )
