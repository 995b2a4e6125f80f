"""What the agent loop knows of a tool, built in or the user's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rstar2_megatron.extension import ToolError
from rstar2_megatron.rollout.tool_response import ToolRun
from rstar2_megatron.rollout.user_call import TookTooLong, UserThread, call_user
from rstar2_megatron.settings.sections.environment import AgentLoopSettings, ToolLimits
from rstar2_megatron.tools import ToolSchema, tool_name
from rstar2_megatron.trajectory import Problem, ToolOutcome


class Judge(Protocol):
    """The methods of the Code Judge's client that are used here. It retries, and raises when the judge stays unreachable."""

    async def run(self, code: str, stdin: str = "", *, session: str | None = None) -> ToolRun: ...

    def expect_session(self, session: str) -> None: ...

    async def close_session(self, session: str) -> None: ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call gets beside its arguments."""

    problem: Problem
    judge: Judge
    session: str  # names the trajectory's state in tools that have one
    shown_seconds: float | None = None  # written as the execution time; None: the measured one


class Malformed(ToolError):
    """The arguments do not fit, as the types of the user's function show, or an MCP server says."""


class Tool:
    """One tool for all trajectories of a process."""

    has_session = False
    """Calls of one trajectory share state, which earlier calls make again where it is lost."""

    def __init__(self, schema: ToolSchema, max_length: int) -> None:
        """max_length: characters of a result that the model reads."""
        self.schema = schema
        self.max_length = max_length

    @property
    def name(self) -> str:
        return tool_name(self.schema)

    def __str__(self) -> str:
        """For people: what a call is waiting for."""
        return self.name

    async def run(self, arguments: dict[str, Any], context: CallContext) -> tuple[ToolOutcome, str]:
        """One call with arguments that fit the schema: how it ended, and what the model reads.

        Of the model are ToolError, TookTooLong. Whatever else it raises is a failure of the infrastructure; UserCodeError: of
        the user's code.
        """
        raise NotImplementedError

    def is_open(self, session: str) -> bool:
        """Whether the trajectory's state is still here."""
        return bool(session)

    def expect(self, session: str, judge: Judge) -> None:
        """The trajectory continues: a lost state is a failure from here on."""

    async def close(self, session: str, judge: Judge) -> None:
        """The trajectory has ended. Raises UserCodeError alone."""


class LimitedTool(Tool):
    """A tool that is not the judge's, with the limits that the YAML gives it."""

    def __init__(self, schema: ToolSchema, limits: ToolLimits, agentloop: AgentLoopSettings) -> None:
        super().__init__(schema, limits.max_length or agentloop.max_tool_response_length)
        self.limits = limits
        self.slots = asyncio.Semaphore(limits.max_concurrency)
        self.running = 0

    async def limited(
        self,
        function: Callable[..., Any],
        values: dict[str, Any],
        failed: Callable[[BaseException], Exception],
        thread: UserThread | None = None,
    ) -> Any:
        """`call_user` within the limits. A thread that goes on after its time keeps its place among `max_concurrency`."""
        if thread is not None and thread.is_late:  # it would wait behind a call that keeps its own place
            raise TookTooLong(f"an earlier call of {self.name} still runs")
        await self.slots.acquire()
        self.running += 1
        try:
            return await call_user(function, (), values, self.limits.timeout_s, failed, self._ended, thread)
        except TookTooLong:
            raise TookTooLong(f"{self.name} took longer than {self.limits.timeout_s:g} s") from None

    def _ended(self, _: object) -> None:
        self.running -= 1
        self.slots.release()
