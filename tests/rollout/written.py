"""An agent loop whose engine and judge give written answers, so that a test can provoke each ending exactly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.protocol import INTERRUPTED, GenerateResult
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.tools import JUPYTER, STANDARD_IO
from rstar2_megatron.trajectory import Problem, Trajectory

ANSWER = "so</reason><answer>\\boxed{4}</answer>"
CELL = f'x</reason><tool_call>{{"name": "{JUPYTER}", "arguments": {{"code": "x"}}}}</tool_call>'
PROBLEM = Problem("q", [{"role": "user", "content": "What is 2+2?"}], ["4"])


def call(code: str = "print(4)", name: str = STANDARD_IO) -> str:
    body = json.dumps({"name": name, "arguments": {"code": code, "input": ""}})
    return f"run</reason><tool_call>{body}</tool_call>"


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class WrittenEngine:
    """Gives the written turns in order; a turn may also be an exception, or (text, finish reason)."""

    tokenizer: Any
    turns: list[Any]
    seen: list[list[int]] = field(default_factory=list)
    recovered: int = 0
    recover_error: Exception | None = None
    go: asyncio.Event = field(default_factory=set_event)  # a turn ends when it is set
    aborting: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[object] = field(default_factory=list)  # owners of requests
    change_over: asyncio.Event = field(default_factory=set_event)
    waited: asyncio.Event = field(default_factory=asyncio.Event)  # somebody has waited for a change of weights

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float, **about: Any
    ) -> GenerateResult:
        self.seen.append(list(input_ids))
        await asyncio.sleep(0)
        while not (self.go.is_set() or self.is_aborted(about.get("owner"))):
            await asyncio.sleep(0)
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if isinstance(turn, Exception):
            raise turn
        text, reason = turn if isinstance(turn, tuple) else (turn + "<|im_end|>", "stop")
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: sampling["max_new_tokens"]]
        if len(ids) == sampling["max_new_tokens"]:
            reason = "length"
        ids, logprobs = np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)
        return GenerateResult(ids, logprobs, reason, [(0, len(ids), 3)], len(input_ids), 0)

    def is_aborted(self, owner: object) -> bool:
        return self.aborting.is_set() or owner in self.aborted

    def abort(self, owner: object) -> None:
        self.aborted.append(owner)

    def abort_all(self) -> None:
        self.aborting.set()

    async def wait_until_ready(self) -> None:
        self.waited.set()
        await self.change_over.wait()

    async def recover(self) -> None:
        self.recovered += 1
        if self.recover_error is not None:
            raise self.recover_error


@dataclass
class ParkableEngine(WrittenEngine):
    """Cuts the turn under way in half when it is aborted, as SGLang does."""

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float, **about: Any
    ) -> GenerateResult:
        whole = await super().generate(input_ids, sampling, timeout_s=timeout_s, **about)
        if self.is_aborted(about["owner"]):
            half = whole.token_ids[: len(whole.token_ids) // 2]
            self.turns.insert(0, (self.tokenizer.decode(whole.token_ids[len(half) :]), "stop"))
            logprobs = whole.logprobs[: len(half)]
            return GenerateResult(half, logprobs, "abort", [(0, len(half), 3)], len(input_ids), 0)
        return whole


@dataclass
class InterruptedEngine(WrittenEngine):
    """Gets new weights after as many tokens of a request as the next of `cuts` says."""

    cuts: list[int] = field(default_factory=list)
    version: int = 0

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float, **about: Any
    ) -> GenerateResult:
        whole = await super().generate(input_ids, sampling, timeout_s=timeout_s)
        count, reason = len(whole.token_ids), whole.finish_reason
        version = self.version
        if self.cuts:
            count, reason = self.cuts.pop(0), INTERRUPTED
            self.version += 1
            if rest := whole.token_ids[count:].tolist():
                self.turns.insert(0, (self.tokenizer.decode(rest), "stop"))
        spans = [(0, count, version)] if count else []
        return GenerateResult(whole.token_ids[:count], whole.logprobs[:count], reason, spans, len(input_ids), 0)


class WrittenJudge:
    def __init__(self, *results: JudgeResult | Exception) -> None:
        self.results = list(results) or [JudgeResult(Outcome.OK, "4\n", "", 0, 0.01)]
        self.go = set_event()  # a call ends when it is set
        self.codes: list[str] = []
        self.sessions: list[str | None] = []
        self.expected: list[str] = []
        self.closed: list[str] = []

    def expect_session(self, session: str) -> None:
        self.expected.append(session)

    async def close_session(self, session: str) -> None:
        self.closed.append(session)

    async def run(self, code: str, stdin: str = "", *, session: str | None = None) -> JudgeResult:
        self.codes.append(code)
        self.sessions.append(session)
        await self.go.wait()
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result


def make_loop(tokenizer, turns, judge=None, *, max_new_tokens=2000, timeout_s=20.0, **settings) -> AgentLoop:
    chosen = AgentLoopSettings(system_prompt=f"{STANDARD_IO} code input", user_prefix="", **settings)
    return AgentLoop(
        WrittenEngine(tokenizer, list(turns)),
        judge or WrittenJudge(),
        ChatTemplate(tokenizer, chosen),
        chosen,
        SamplingParams(max_new_tokens=max_new_tokens),
        max_context_tokens=8000,
        timeout_s=timeout_s,
    )


def written(loop: AgentLoop) -> WrittenEngine:
    assert isinstance(loop.engine, WrittenEngine)
    return loop.engine


def assert_same_tokens(ours: Trajectory, theirs: Trajectory) -> None:
    for name in Trajectory.ARRAYS:
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()


async def run(tokenizer, turns, judge=None, **kwargs) -> tuple[Trajectory, AgentLoop]:
    loop = make_loop(tokenizer, turns, judge, **kwargs)
    trajectory = await loop.run(PROBLEM, 0)
    trajectory.check()
    return trajectory, loop
