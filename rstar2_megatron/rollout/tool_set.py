"""The tools that `agentloop.tools` names."""

from __future__ import annotations

from rstar2_megatron.rollout.judge_tool import JudgeTool
from rstar2_megatron.rollout.own_tool import OwnTool
from rstar2_megatron.rollout.tool import Tool
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.tools import TOOL_SCHEMAS, tool_schemas


def tools_of(settings: AgentLoopSettings) -> list[Tool]:
    """The tools in order; code of the user is loaded. Raises ValueError, also for a tool that no model could call."""
    own = [None if isinstance(entry, str) else OwnTool(entry, settings) for entry in settings.tools]
    names = [str(entry) if tool is None else tool.name for entry, tool in zip(settings.tools, own)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"agentloop.tools has two tools of the name {repeated[0]!r}; rename the function, or leave one out")
    known = TOOL_SCHEMAS | {tool.name: tool.schema for tool in own if tool is not None}
    tools: list[Tool] = []
    for tool, schema in zip(own, tool_schemas(names, settings.tool_descriptions, known)):
        if tool is not None:
            tool.schema = schema
        tools.append(tool or JudgeTool(schema, settings))
    return tools
