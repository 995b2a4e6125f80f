"""The built-in tools: code of the model, run by the Code Judge."""

from __future__ import annotations

from typing import Any

from rstar2_megatron.rollout.tool import CallContext, Judge, Tool
from rstar2_megatron.rollout.tool_response import format_tool_response
from rstar2_megatron.tools import JUPYTER, ToolSchema
from rstar2_megatron.trajectory import ToolOutcome

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


class JudgeTool(Tool):
    """Its time and memory limits are the judge's (`tools.codejudge`)."""

    def __init__(self, schema: ToolSchema, max_length: int) -> None:
        super().__init__(schema, max_length)
        self.has_session = self.name == JUPYTER

    async def run(self, arguments: dict[str, Any], context: CallContext) -> tuple[ToolOutcome, str]:
        session = context.session if self.has_session else None
        run = await context.judge.run(arguments["code"], arguments.get("input", ""), session=session)
        outcome = _OUTCOMES.get(str(run.outcome), ToolOutcome.INFRASTRUCTURE)
        return outcome, format_tool_response(run, context.shown_seconds)

    def expect(self, session: str, judge: Judge) -> None:
        judge.expect_session(session)

    async def close(self, session: str, judge: Judge) -> None:
        await judge.close_session(session)
