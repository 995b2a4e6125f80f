"""Sampled attempts on disk: one JSON line each, written as it ends, so that a stopped evaluation goes on. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2_megatron.trajectory import UNUSABLE, Problem, ToolOutcome


class SamplesError(ValueError):
    """The file belongs to another evaluation; the message says what differs and what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What statistics need of one attempt. Only `usable` ones count: the others were spoilt by infrastructure."""

    query_id: str
    index: int  # 0 .. k-1 among the problem's attempts
    task: str
    reward: float
    grade: str
    answer: str | None
    finish_reason: str | None
    num_turns: int
    num_tool_calls: int
    num_tool_errors: int
    response_tokens: int  # tool responses included
    generated_tokens: int
    seconds: float

    @property
    def usable(self) -> bool:
        return self.finish_reason not in UNUSABLE

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Sample:
        """From a line of trajectories.jsonl. Raises KeyError, TypeError or ValueError for a row of another kind."""
        outcomes = [ToolOutcome(call["outcome"]) for call in row["tool_calls"]]
        calls = [outcome for outcome in outcomes if outcome is not ToolOutcome.INFRASTRUCTURE]
        return cls(
            query_id=row["query_id"],
            index=int(row["rollout_index"]),
            task=row.get("task", "math"),
            reward=float(row["reward"] or 0.0),
            grade=row["grade"],
            answer=row.get("answer"),
            finish_reason=row["finish_reason"],
            num_turns=len(row["turns"]),
            num_tool_calls=len(calls),
            num_tool_errors=sum(outcome.is_model_error for outcome in calls),
            response_tokens=int(row["response_tokens"]),
            generated_tokens=int(row["trained_tokens"]),
            seconds=float(row["seconds"]),
        )


class SampleFile:
    """`path`, and beside it `path.settings.json`: what the samples were drawn with.

    `identity` must be the same for every sample of a file; the number of samples per problem is not part of it, so
    that more can be drawn later.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.settings_path = self.path.with_name(self.path.name + ".settings.json")
        self._identity = json.loads(json.dumps(identity))

    def open(self, problems: Sequence[Problem]) -> dict[tuple[str, int], Sample]:
        """The usable samples of `problems` that are there, by (query_id, index); ready for `append` then.

        A line that a kill cut short is removed. Raises SamplesError when the file was made with other settings or
        other problems of the same query_id.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        by_id = {problem.query_id: problem for problem in problems}
        found: dict[tuple[str, int], Sample] = {}
        for row in self._rows():
            problem = by_id.get(row.get("query_id", ""))
            if problem is None:
                continue
            if (row.get("prompt"), row.get("solutions")) != (problem.prompt, problem.solutions):
                raise SamplesError(
                    f"{self.path} holds samples of another problem under query_id {problem.query_id!r}; the data "
                    "has changed since. Give another output, or remove this one"
                )
            try:
                sample = Sample.from_row(row)
            except (KeyError, TypeError, ValueError) as error:
                raise SamplesError(f"{self.path}: a row of {problem.query_id!r} lacks {error}") from None
            if sample.usable:
                found[sample.query_id, sample.index] = sample
        return found

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line; it is with the operating system before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _check_settings(self) -> None:
        if not self.path.exists():
            self.settings_path.write_text(json.dumps(self._identity, indent=2) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SamplesError(
                f"{self.path} exists but {self.settings_path} cannot be read ({error}); give another output"
            ) from None
        keys = sorted(set(before) | set(self._identity))
        differing = [
            f"{key}: {before.get(key)!r} then, {self._identity.get(key)!r} now"
            for key in keys
            if before.get(key) != self._identity.get(key)
        ]
        if differing:
            raise SamplesError(
                f"{self.path} was made with other settings ({'; '.join(differing)}); give another output directory, or "
                "remove this file to start anew"
            )

    def _rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        rows = []
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise SamplesError(f"{self.path}:{number}: not JSON ({error}); repair or remove it") from None
        return rows
