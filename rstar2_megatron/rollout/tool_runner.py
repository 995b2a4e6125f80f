"""Runs a turn's tool calls. Typed outcomes separate the model's errors from infrastructure failures."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence

from rstar2_megatron.extension import ToolError
from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.records.trace import TOOLS, TRACE
from rstar2_megatron.rollout.judge_tool import JudgeTool
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool import CallContext, Judge, Malformed, Tool
from rstar2_megatron.rollout.tool_call import CallStatus, ParsedCall
from rstar2_megatron.rollout.tool_response import NOISE, format_refusal, truncate
from rstar2_megatron.rollout.user_call import TookTooLong
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.trajectory import Problem, ToolCall, ToolOutcome, Trajectory

_CLOSE_TIMEOUT_S = 5.0


class ToolRunner:
    """The tools of one agent loop."""

    def __init__(self, judge: Judge, settings: AgentLoopSettings, tools: Sequence[Tool]) -> None:
        self.judge = judge
        self.settings = settings
        self.tools = {tool.name: tool for tool in tools}
        self._with_state = [tool for tool in tools if tool.has_session]
        self.shown_seconds: float | None = None
        """Shown to the model as every execution time, so that equal calls give equal tokens; None: the measured time."""

    async def run(
        self,
        problem: Problem,
        trajectory: Trajectory,
        calls: list[ParsedCall],
        seconds_left: Callable[[], float],
        stats: RolloutStats,
    ) -> tuple[list[ToolCall], list[str]]:
        """Run the turn's first `max_parallel_calls` calls together, of more the well-formed ones. Returns calls and responses.

        `seconds_left` returns the time until the trajectory's deadline and may raise. A failure of the judge or of the
        user's code does not raise: the call's outcome is INFRASTRUCTURE.
        """
        limit = self.settings.max_parallel_calls
        if len(calls) > limit:
            calls = sorted(calls, key=lambda call: not call.valid)
        begun = time.monotonic()
        try:
            for earlier in self._to_replay(trajectory, calls[:limit]):
                again = await self._run_one(problem, trajectory, earlier, seconds_left())
                if again.outcome is ToolOutcome.INFRASTRUCTURE:
                    return [again], []
            run = (self._run_one(problem, trajectory, c, seconds_left(), self.settings.tool_noise) for c in calls[:limit])
            done = await asyncio.gather(*run)
        finally:
            stats.tool_seconds += time.monotonic() - begun
        for call in done:
            if call.name in self.tools:
                stats.add_call(call)
        responses = [call.response_text for call in done]
        if len(calls) > limit:
            skipped = len(calls) - limit
            responses.append(format_refusal(f"{skipped} further call(s) were not run: at most {limit} per turn."))
        return done, responses

    def _to_replay(self, trajectory: Trajectory, calls: list[ParsedCall]) -> list[ParsedCall]:
        """The calls of earlier turns that make the state again which `calls` need and which is not here.

        A trajectory that runs from its beginning keeps its state, so nothing is replayed; one that continues another one's
        turns, or came from another process, does not have it.
        """
        called = [tool for tool in self._with_state if any(c.valid and c.name == tool.name for c in calls)]
        if called and not trajectory.session:
            called = self._with_state
        lost = {tool.name for tool in called if not tool.is_open(trajectory.session)}
        return [
            ParsedCall(CallStatus.VALID, done.name, done.arguments)
            for done in trajectory.tool_calls
            if done.name in lost and done.outcome is not ToolOutcome.MALFORMED and done.response_text != NOISE
        ]

    def expect(self, trajectory: Trajectory) -> None:
        """A trajectory continues: the state that it has in its tools must still be there."""
        if trajectory.session:
            for tool in self._with_state:
                tool.expect(trajectory.session, self.judge)

    async def close(self, trajectory: Trajectory) -> None:
        """Close the trajectory's state in its tools, if it has any."""
        if trajectory.session:
            for tool in self._with_state:
                try:
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await tool.close(trajectory.session, self.judge)
                except TimeoutError:
                    if not isinstance(tool, JudgeTool):  # which also ends the session after its time to live
                        trajectory.note_failed_close(f"tool {tool} was not closed in {_CLOSE_TIMEOUT_S:g} s", "Timeout")
                except UserCodeError as error:
                    trajectory.note_failed_close(str(error), error.kind)
            trajectory.session = ""

    async def _run_one(
        self, problem: Problem, trajectory: Trajectory, call: ParsedCall, limit_s: float, noise: float = 0.0
    ) -> ToolCall:
        """noise: the chance that the call fails; the same calls do when a turn is repeated."""
        if not call.valid:
            return ToolCall(call.name, call.arguments, ToolOutcome.MALFORMED, format_refusal(call.message))
        if noise and _draw(trajectory, call) < noise:
            return ToolCall(call.name, call.arguments, ToolOutcome.ERROR, NOISE)
        tool = self.tools[call.name]
        if tool.has_session:
            trajectory.session = trajectory.session or uuid.uuid4().hex  # the name alone gives access
        context = CallContext(problem, self.judge, trajectory.session, self.shown_seconds)
        begun = time.monotonic()
        try:
            with TRACE.span(call.name, TOOLS, trajectory=f"{trajectory.query_id}#{trajectory.rollout_index}"):
                async with asyncio.timeout(limit_s) as deadline:
                    outcome, text = await tool.run(call.arguments, context)
        except Malformed as error:
            outcome, text = ToolOutcome.MALFORMED, format_refusal(str(error))
        except ToolError as error:
            outcome, text = ToolOutcome.ERROR, format_refusal(str(error) or "the tool gave no reason")
        except TookTooLong as error:
            outcome, text = ToolOutcome.TIMEOUT, format_refusal(str(error))
        except UserCodeError as error:
            outcome, text, trajectory.user_error = ToolOutcome.INFRASTRUCTURE, str(error), error.kind
        except Exception as error:  # JudgeUnavailable, the deadline
            late = f"the trajectory's deadline passed in {tool}" if deadline.expired() else error
            outcome, text = ToolOutcome.INFRASTRUCTURE, f"{type(error).__name__}: {late}"
        text = text.encode(errors="replace").decode()  # half of a surrogate pair is no character
        if outcome not in (ToolOutcome.MALFORMED, ToolOutcome.INFRASTRUCTURE):  # why a call was refused is shown whole
            text = truncate(text, tool.max_length, self.settings.tool_response_truncate_side)
        return ToolCall(call.name, call.arguments, outcome, text, time.monotonic() - begun)


def _draw(trajectory: Trajectory, call: ParsedCall) -> float:
    """In [0, 1), by the place and arguments of the call alone: a turn that is repeated draws the same."""
    t = trajectory
    place = f"{t.query_id} {t.rollout_index} {t.oldest_version} {len(t.tool_calls)} {call.arguments}"
    return random.Random(place).random()
