"""Sampled attempts on disk: one JSON line each, written as it ends, so that a stopped evaluation can continue. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.trajectory_row import trajectory_row
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.trajectory import FinishReason, Problem, ToolOutcome, Trajectory, is_usable


class SamplesError(ValueError):
    """The file belongs to another evaluation; the message names the differences and the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The facts of one attempt that statistics need. Attempts that infrastructure spoiled or that were cut are not `usable`."""

    query_id: str
    index: int  # 0 .. k-1 among the problem's attempts
    reward: float
    positive: bool  # counts as right
    answer: str | None
    finish_reason: str | None
    num_turns: int
    num_tool_calls: int
    num_tool_errors: int
    response_tokens: int  # tool responses included
    generated_tokens: int

    @property
    def usable(self) -> bool:
        return is_usable(self.finish_reason)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Sample:
        """From a line of trajectories.jsonl. Raises KeyError, TypeError or ValueError for a row of another kind."""
        outcomes = [ToolOutcome(call["outcome"]) for call in row["tool_calls"]]
        calls = [outcome for outcome in outcomes if outcome is not ToolOutcome.INFRASTRUCTURE]
        return cls(
            query_id=row["query_id"],
            index=int(row["rollout_index"]),
            reward=float(row["reward"] or 0.0),
            positive=bool(row["positive"]),
            answer=row["answer"],
            finish_reason=row["finish_reason"],
            num_turns=len(row["turns"]),
            num_tool_calls=len(calls),
            num_tool_errors=sum(outcome.is_model_error for outcome in calls),
            response_tokens=int(row["response_tokens"]),
            generated_tokens=int(row["trained_tokens"]),
        )


class SampleFile:
    """The samples at `path`, and beside it `path.settings.json` with the settings that they were drawn with.

    `identity` must be the same for every sample of a file; the number of samples per problem is not part of it, so
    that more can be drawn later.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._file = JsonlFile(self.path, sync=False)
        self._identity = identity

    def open(self, problems: Sequence[Problem]) -> dict[tuple[str, int], Sample]:
        """The usable samples of `problems` in the file, by (query_id, index). Must be called before `append`.

        A line that a kill cut short is removed. Raises SamplesError when the file was made with other settings or
        other problems of the same query_id.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_identity(self.path, self._identity)
        by_id = {problem.query_id: problem for problem in problems}
        found: dict[tuple[str, int], Sample] = {}
        for _, row in read_rows(self._file):
            problem = by_id.get(row.get("query_id", ""))
            if problem is None:
                continue
            check_problem(self.path, row, problem)
            try:
                sample = Sample.from_row(row)
            except (KeyError, TypeError, ValueError) as error:
                raise SamplesError(f"{self.path}: a row of {problem.query_id!r} lacks {error}") from None
            if sample.usable:
                found[sample.query_id, sample.index] = sample
        return found

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line; the operating system has it before this returns."""
        self._file.append(row)


def try_row(problem: Problem, trajectory: Trajectory, timeout_s: float) -> dict[str, Any]:
    """The line of a try. One that infrastructure spoiled after `timeout_s`, rollout.trajectory_timeout_s, is marked late."""
    late = trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.seconds >= timeout_s
    return trajectory_row(problem, trajectory) | ({"late": True} if late else {})


def count_late(path: Path, query_ids: Collection[str]) -> int:
    """Tries at these problems that the deadline ended. Each was drawn again, so that shorter ones stand in their place."""
    rows = (row for _, row in JsonlFile(path).numbered_rows() if row is not None)
    return sum(row.get("late", False) and row.get("query_id") in query_ids for row in rows)


def late_note(late: int) -> str:
    """For people, of `count_late` tries; "" where there are none."""
    if not late:
        return ""
    return (
        f"{late} tries took longer than rollout.trajectory_timeout_s was for them and were drawn again; these are the "
        "long ones, without which scores are too high: raise it, with another directory for the results"
    )


def read_rows(file: JsonlFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of each line; one that a kill cut short is removed. Raises SamplesError for a line that is no row."""
    file.drop_torn_line()
    for number, row in file.numbered_rows():
        if row is None:
            raise SamplesError(f"{file.path}:{number}: not JSON; repair or remove this line, and its problem is done again")
        yield number, row


def check_problem(path: Path, row: Mapping[str, Any], problem: Problem) -> None:
    """Raises SamplesError when a row of `path` is of another problem under the same query_id."""
    if (row.get("prompt"), row.get("solutions")) != (problem.prompt, problem.solutions):
        raise SamplesError(
            f"{path} holds results of another problem under query_id {problem.query_id!r}; the data has changed since. Give "
            "another output, or remove this one"
        )


def check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """Compare `identity` with the settings beside an existing file of results, `path.settings.json`, or write them there.

    Raises SamplesError that names the differences.
    """
    settings_path = path.with_name(path.name + ".settings.json")
    identity = json.loads(json.dumps(identity))
    if not path.exists():
        write_json(settings_path, identity)
        return
    try:
        before = json.loads(settings_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SamplesError(f"{path} exists but {settings_path} cannot be read ({error}); give another output") from None
    differing = [
        f"{key}: {before.get(key)!r} then, {identity.get(key)!r} now"
        for key in sorted(set(before) | set(identity))
        if before.get(key) != identity.get(key)
    ]
    if differing:
        raise SamplesError(
            f"{path} was made with other settings ({'; '.join(differing)}); give another output directory, or "
            "remove this file to start again"
        )
