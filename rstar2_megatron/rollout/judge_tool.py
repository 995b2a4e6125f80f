"""The built-in tools: code of the model, run by the Code Judge."""

from __future__ import annotations

import asyncio
from typing import Any

from rstar2_megatron.rollout.tool import CallContext, Judge, Tool, ToolAnswer
from rstar2_megatron.rollout.tool_response import format_tool_response, truncate
from rstar2_megatron.settings.schema import AgentLoopSettings
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

    def __init__(self, schema: ToolSchema, settings: AgentLoopSettings) -> None:
        super().__init__(schema)
        self.settings = settings
        self.has_session = self.name == JUPYTER

    async def run(self, arguments: dict[str, Any], context: CallContext) -> ToolAnswer:
        session = context.session if self.has_session else None
        async with asyncio.timeout(context.limit_s):
            run = await context.judge.run(arguments["code"], arguments.get("input", ""), session=session)
        text = format_tool_response(run, context.shown_seconds)
        outcome = _OUTCOMES.get(str(run.outcome), ToolOutcome.INFRASTRUCTURE)
        return ToolAnswer(
            outcome, truncate(text, self.settings.max_tool_response_length, self.settings.tool_response_truncate_side)
        )

    def expect(self, session: str, judge: Judge) -> None:
        judge.expect_session(session)

    async def close(self, session: str, judge: Judge) -> None:
        await judge.close_session(session)
