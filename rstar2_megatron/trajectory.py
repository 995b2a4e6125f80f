"""The data that every room passes on: a problem, a trajectory, a group of trajectories.

Tokens in, tokens out: the ids stored here are the ids that the engine consumed and produced, and the
ids that the actor trains on. Text is decoded only for parsing and for people. Nothing here imports torch, Ray or SGLang.

Per-token data are numpy arrays: ids int32, masks uint8, log-probs float32. As JSON they are base64 of their little-endian
bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import PlainSerializer, PlainValidator


def _json_type(kind: str) -> tuple[PlainValidator, PlainSerializer]:
    def read(value: Any) -> np.ndarray:
        try:
            return np.frombuffer(base64.b64decode(value), kind)
        except TypeError as error:
            raise ValueError(f"not an array of {kind}: {error}") from None

    def write(value: np.ndarray) -> str:
        return base64.b64encode(value.astype(kind).tobytes()).decode()

    return PlainValidator(read), PlainSerializer(write, when_used="json")


Ids = Annotated[np.ndarray, *_json_type("<i4")]
Mask = Annotated[np.ndarray, *_json_type("<u1")]
LogProbs = Annotated[np.ndarray, *_json_type("<f4")]


class PerToken:
    """Base of dataclasses with per-token arrays, named with their types in `ARRAYS`.

    Sequences are converted to arrays, and equality compares values.
    """

    __slots__ = ()
    ARRAYS: ClassVar[dict[str, type]]

    def __post_init__(self) -> None:
        for name, kind in self.ARRAYS.items():
            setattr(self, name, np.asarray(getattr(self, name), kind))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]


LOW_LOGPROB = math.log(1e-4)
"""Tokens of less probability than 1e-4 are counted: SimpleTIR (arXiv 2509.02479) finds them behind void turns."""


def generated_spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each run of generated tokens."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


class FinishReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # the model ended its turn without a tool call
    TURN_LIMIT = "turn_limit"  # max_assistant_turns reached with a tool call pending
    LENGTH_LIMIT = "length_limit"  # response token budget exhausted
    TOOL_RESPONSE_TOO_LONG = "tool_response_too_long"  # the tool response does not fit the budget
    REPEATED_CALL = "repeated_call"  # the same call, arguments included, too many times in a row
    MALFORMED_CALLS = "malformed_calls"  # too many turns in a row without a call that could be run
    CUT = "cut"  # rollout.tail=cut ended the phase before the trajectory: dropped, never trained on
    INFRASTRUCTURE = "infrastructure"  # engine or judge lost, or deadline passed: dropped, never trained on


def is_usable(finish_reason: str | None) -> bool:
    """False when the infrastructure spoiled the trajectory or the end of its phase cut it. None: it has not ended."""
    return finish_reason not in (None, FinishReason.INFRASTRUCTURE, FinishReason.CUT)


class ToolOutcome(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    ERROR = "error"  # the code raised or exited non-zero
    TIMEOUT = "timeout"  # the code ran past its time limit
    MALFORMED = "malformed"  # the call itself could not be parsed or named no known tool
    INFRASTRUCTURE = "infrastructure"  # the judge failed, not the model: never a tool error

    @property
    def is_model_error(self) -> bool:
        """True for an error of the model (paper section 2.2.3: parse failure, exception, timeout)."""
        return self in (ToolOutcome.ERROR, ToolOutcome.TIMEOUT, ToolOutcome.MALFORMED)


@dataclass(slots=True)
class ToolCall:
    """One tool call with its result, kept for statistics and for people."""

    name: str
    arguments: dict[str, Any]
    outcome: ToolOutcome
    response_text: str  # as shown to the model, after truncation
    seconds: float = 0.0  # wall time from submit to result, queueing included


@dataclass(slots=True)
class VersionSpan:
    """Tokens response_ids[start:end] were generated under weight version `version`."""

    start: int
    end: int
    version: int


@dataclass(slots=True)
class Problem:
    """One problem of the data set.

    `prompt` is a list of chat messages (role, content); `solutions` are acceptable answers, any of which
    counts. `query_id` is unique in the data set.
    """

    query_id: str
    prompt: list[dict[str, str]]
    solutions: list[str]
    task: str = "math"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class HeldTokens:
    """Figures of a trajectory whose per-token arrays stay with the rollout worker that generated them."""

    worker: int  # rank of the rollout worker
    number: int  # the worker's number of the trajectory
    prompt_tokens: int
    response_tokens: int
    spans: list[tuple[int, int]]  # `generated_spans`
    logprob_sum: float
    logprob_min: float = 0.0
    num_improbable: int = 0


@dataclass(slots=True, eq=False)
class Trajectory(PerToken):
    """One multi-turn attempt at a problem.

    `response_ids`, `loss_mask` and `rollout_logprobs` have one entry per response token. Generated tokens
    have mask 1 and the engine's log-prob; tool text and turn headers have mask 0 and log-prob 0.0.
    With `held` the arrays are empty here (`rollout.token_store`).
    """

    ARRAYS: ClassVar[dict[str, type]] = {
        "prompt_ids": np.int32,
        "response_ids": np.int32,
        "loss_mask": np.uint8,
        "rollout_logprobs": np.float32,
    }

    query_id: str
    rollout_index: int  # 0 .. 2G-1 inside its group
    prompt_ids: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    response_ids: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: Mask = field(default_factory=lambda: np.empty(0, np.uint8))
    rollout_logprobs: LogProbs = field(default_factory=lambda: np.empty(0, np.float32))
    version_spans: list[VersionSpan] = field(default_factory=list)
    assistant_texts: list[str] = field(default_factory=list)  # one per assistant turn, decoded, for parsing
    response_text: str = ""  # the whole response, without special tokens, until own rewards have read it; else empty
    tool_calls: list[ToolCall] = field(default_factory=list)
    opening: str = ""  # what an environment added to the prompt
    observations: list[str] = field(default_factory=list)  # of an environment or own loop by turn; "": tools answered
    environment_reward: float | None = None  # the sum of an environment's rewards, or what an own loop set
    calls_per_turn: list[int] = field(default_factory=list)  # how many of `tool_calls` each turn made
    finish_reason: FinishReason | None = None
    reward: float | None = None  # None until graded
    reward_terms: dict[str, float] = field(default_factory=dict)  # before their weights; empty with the math grader alone
    positive: bool | None = None  # whether the reward is above reward.positive_above; None: above 0
    grade_detail: str = ""  # reason of the reward: correct, timeout, no box, ...
    answer: str | None = None  # the answer that the grader extracted
    seconds: float = 0.0  # wall time of the whole trajectory
    error: str = ""  # message of an infrastructure failure
    user_error: str = ""  # type of the exception of the user's code that spoiled it
    open_turn: int | None = None  # response_ids[open_turn:] is a turn that rollout.tail=carry interrupted
    session: str = ""  # name of its live interpreter in the judge
    held: HeldTokens | None = None

    def note_failed_close(self, error: str, kind: str) -> None:
        """A `close` of the user's code failed: that is counted and told, and the trajectory stays."""
        if not self.error:
            self.error, self.user_error = error, kind

    @property
    def num_turns(self) -> int:
        return len(self.assistant_texts)

    @property
    def prompt_tokens(self) -> int:
        return self.held.prompt_tokens if self.held else len(self.prompt_ids)

    @property
    def response_tokens(self) -> int:
        return self.held.response_tokens if self.held else len(self.response_ids)

    @property
    def num_trained_tokens(self) -> int:
        if self.held:
            return sum(end - start for start, end in self.held.spans)
        return int(np.count_nonzero(self.loss_mask))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each run of generated tokens in the response."""
        return self.held.spans if self.held else generated_spans(self.loss_mask)

    @property
    def logprob_sum(self) -> float:
        """Sum of the engine's log-probs."""
        return self.held.logprob_sum if self.held else float(self.rollout_logprobs.sum(dtype=np.float64))

    @property
    def logprob_min(self) -> float:
        """The engine's lowest log-prob of a generated token; 0.0 without one."""
        return self.held.logprob_min if self.held else float(self.rollout_logprobs.min(initial=0.0))

    @property
    def num_improbable(self) -> int:
        """Generated tokens whose log-prob is below LOW_LOGPROB."""
        return self.held.num_improbable if self.held else int(np.count_nonzero(self.rollout_logprobs < LOW_LOGPROB))

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_tool_errors(self) -> int:
        return sum(call.outcome.is_model_error for call in self.tool_calls)

    @property
    def is_positive(self) -> bool:
        """Whether it counts as right. False before it is graded."""
        return (self.reward or 0.0) > 0 if self.positive is None else self.positive

    @property
    def usable(self) -> bool:
        """False for a trajectory that is counted and dropped: `is_usable`."""
        return is_usable(self.finish_reason)

    @property
    def oldest_version(self) -> int | None:
        """Weight version of its oldest tokens; None before the first."""
        return min((span.version for span in self.version_spans), default=None)

    def append(self, ids: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray | None) -> None:
        """Append generated tokens with their log-probs, or tool text, which has none.

        Raises ValueError when `ids` and `logprobs` differ in length.
        """
        if logprobs is not None and len(ids) != len(logprobs):
            raise ValueError(f"the engine answered with {len(ids)} token ids and {len(logprobs)} log-probs")
        mask = np.full(len(ids), logprobs is not None, np.uint8)
        logprobs = np.zeros(len(ids)) if logprobs is None else logprobs
        self.response_ids = np.concatenate([self.response_ids, np.asarray(ids, np.int32)])
        self.loss_mask = np.concatenate([self.loss_mask, mask])
        self.rollout_logprobs = np.concatenate([self.rollout_logprobs, np.asarray(logprobs, np.float32)])

    def check(self) -> None:
        """Raise ValueError when the per-token arrays disagree in length or the prompt is missing.

        Only a trajectory that ended before it started, for example one that was cut while it waited, may lack its prompt.
        """
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.rollout_logprobs)}
        if len(lengths) != 1:
            raise ValueError(
                f"trajectory {self.query_id}#{self.rollout_index}: response_ids {len(self.response_ids)}, "
                f"loss_mask {len(self.loss_mask)}, rollout_logprobs {len(self.rollout_logprobs)} differ in length"
            )
        if not self.prompt_tokens and (self.response_tokens or self.usable):
            raise ValueError(f"trajectory {self.query_id}#{self.rollout_index}: empty prompt")


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Weight version of the oldest tokens of all; None before the first."""
    versions = [t.oldest_version for t in trajectories]
    return min((version for version in versions if version is not None), default=None)


@dataclass(slots=True)
class Group:
    """All rollouts of one problem in one step (2G of them with resample-on-correct)."""

    problem: Problem
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def usable(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.usable]
