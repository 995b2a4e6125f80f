"""Runs a turn's tool calls on the judge. Typed outcomes separate the model's errors from infrastructure failures."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from rstar2_megatron.records.trace import TOOLS, TRACE
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool_call import CallStatus, ParsedCall
from rstar2_megatron.rollout.tool_response import ToolRun, format_refusal, format_tool_response, truncate
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.tools import JUPYTER
from rstar2_megatron.trajectory import ToolCall, ToolOutcome, Trajectory

# Outcomes that the judge reports. Exceeding memory or output limits is an error of the program. Any outcome that is
# not listed is an infrastructure failure.
_OUTCOMES = {
    "ok": ToolOutcome.OK,
    "error": ToolOutcome.ERROR,
    "memory": ToolOutcome.ERROR,
    "output_limit": ToolOutcome.ERROR,
    "killed": ToolOutcome.ERROR,
    "invalid_input": ToolOutcome.ERROR,
    "timeout": ToolOutcome.TIMEOUT,
}

_CLOSE_TIMEOUT_S = 5.0


class Judge(Protocol):
    """The methods of the Code Judge's client that are used here. It retries, and raises when the judge stays unreachable."""

    async def run(self, code: str, stdin: str = "", *, session: str | None = None) -> ToolRun: ...

    def expect_session(self, session: str) -> None: ...

    async def close_session(self, session: str) -> None: ...


class ToolRunner:
    """The tools of one agent loop. `stats` may be replaced at any time."""

    def __init__(self, judge: Judge, settings: AgentLoopSettings) -> None:
        self.judge = judge
        self.settings = settings
        self.shown_seconds: float | None = None
        """Shown to the model as every execution time, so that equal calls give equal tokens; None: the measured time."""

    async def run(
        self, trajectory: Trajectory, calls: list[ParsedCall], seconds_left: Callable[[], float], stats: RolloutStats
    ) -> tuple[list[ToolCall], list[str]]:
        """Run the turn's first `max_parallel_calls` calls together, of more the well-formed ones. Returns calls and responses.

        `seconds_left` returns the time until the trajectory's deadline and may raise. A failure of the judge does not
        raise: the call's outcome is INFRASTRUCTURE.
        """
        limit = self.settings.max_parallel_calls
        if len(calls) > limit:
            calls = sorted(calls, key=lambda call: not call.valid)
        begun = time.monotonic()
        cells = any(call.valid and call.name == JUPYTER for call in calls[:limit])
        try:
            if cells and (lost := await self._replay(trajectory, seconds_left)) is not None:
                return [lost], []
            done = await asyncio.gather(*(self._run_one(trajectory, c, seconds_left()) for c in calls[:limit]))
        finally:
            stats.tool_seconds += time.monotonic() - begun
        responses = [call.response_text for call in done]
        if len(calls) > limit:
            skipped = len(calls) - limit
            responses.append(format_refusal(f"{skipped} further call(s) were not run: at most {limit} per turn."))
        return done, responses

    async def _replay(self, trajectory: Trajectory, seconds_left: Callable[[], float]) -> ToolCall | None:
        """Run the cells of earlier turns in a new interpreter, for a trajectory that continues another one's turns.

        A trajectory that runs from its beginning keeps its interpreter, so nothing is replayed. Returns the call that the
        infrastructure lost, if any.
        """
        if trajectory.session:
            return None
        for done in trajectory.tool_calls:
            if done.name == JUPYTER and done.outcome is not ToolOutcome.MALFORMED:
                call = ParsedCall(CallStatus.VALID, done.name, done.arguments)
                again = await self._run_one(trajectory, call, seconds_left())
                if again.outcome is ToolOutcome.INFRASTRUCTURE:
                    return again
        return None

    async def close(self, trajectory: Trajectory) -> None:
        """Close the trajectory's interpreter session, if it has one."""
        if trajectory.session:
            with contextlib.suppress(TimeoutError):  # the judge also ends the session after its time to live
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self.judge.close_session(trajectory.session)
            trajectory.session = ""

    async def _run_one(self, trajectory: Trajectory, call: ParsedCall, limit_s: float) -> ToolCall:
        if not call.valid:
            return ToolCall(call.name, call.arguments, ToolOutcome.MALFORMED, format_refusal(call.message))
        session = None
        if call.name == JUPYTER:
            trajectory.session = trajectory.session or uuid.uuid4().hex  # the name alone gives access
            session = trajectory.session
        begun = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                with TRACE.span(call.name, TOOLS, trajectory=f"{trajectory.query_id}#{trajectory.rollout_index}"):
                    run = await self.judge.run(call.arguments["code"], call.arguments.get("input", ""), session=session)
        except Exception as error:  # JudgeUnavailable, or the deadline
            outcome, text = ToolOutcome.INFRASTRUCTURE, f"{type(error).__name__}: {error}"
        else:
            outcome = _OUTCOMES.get(str(run.outcome), ToolOutcome.INFRASTRUCTURE)
            text = self._shown(format_tool_response(run, self.shown_seconds))
        return ToolCall(call.name, call.arguments, outcome, text, time.monotonic() - begun)

    def _shown(self, text: str) -> str:
        return truncate(text, self.settings.max_tool_response_length, self.settings.tool_response_truncate_side)
