"""What the agent loop knows of a tool, built in or the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rstar2_megatron.rollout.tool_response import ToolRun
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
    limit_s: float  # until the trajectory's deadline
    shown_seconds: float | None = None  # written as the execution time; None: the measured one


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """How a call ended, and what the model reads."""

    outcome: ToolOutcome
    text: str


class Tool:
    """One tool for all trajectories of a process."""

    has_session = False
    """Calls of one trajectory share state, which earlier calls make again where it is lost."""

    def __init__(self, schema: ToolSchema) -> None:
        self.schema = schema

    @property
    def name(self) -> str:
        return tool_name(self.schema)

    async def run(self, arguments: dict[str, Any], context: CallContext) -> ToolAnswer:
        """One call with arguments that fit the schema. It ends within `context.limit_s`.

        Whatever it raises is a failure of the infrastructure, never of the model; UserCodeError: of the user's code.
        """
        raise NotImplementedError

    def is_open(self, session: str) -> bool:
        """Whether the trajectory's state is still here."""
        return bool(session)

    def expect(self, session: str, judge: Judge) -> None:
        """The trajectory continues: a lost state is a failure from here on."""

    async def close(self, session: str, judge: Judge) -> None:
        """The trajectory has ended. Does not raise."""
