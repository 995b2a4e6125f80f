"""The tools that `agentloop.tools` names."""

from __future__ import annotations

from rstar2_megatron.rollout.judge_tool import JudgeTool
from rstar2_megatron.rollout.mcp_tool import McpServer, McpTool
from rstar2_megatron.rollout.own_tool import OwnTool
from rstar2_megatron.rollout.tool import Tool
from rstar2_megatron.settings.schema import AgentLoopSettings, McpSettings
from rstar2_megatron.tools import TOOL_SCHEMAS, tool_schemas


def tools_of(settings: AgentLoopSettings) -> list[Tool]:
    """The tools in order. Code of the user is loaded, and MCP servers list theirs.

    Raises ValueError, also for a tool that no model could call.
    """
    own: dict[str, Tool] = {}
    names: list[str] = []
    for entry in settings.tools:
        if isinstance(entry, str):
            names.append(entry)
            continue
        made = _of_server(entry, settings) if isinstance(entry, McpSettings) else [OwnTool(entry, settings)]
        names += [tool.name for tool in made]
        own |= {tool.name: tool for tool in made}
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"agentloop.tools has two tools of the name {repeated[0]!r}; rename the function, or leave one out")
    tools: list[Tool] = []
    known = TOOL_SCHEMAS | {name: tool.schema for name, tool in own.items()}
    for name, schema in zip(names, tool_schemas(names, settings.tool_descriptions, known)):
        tools.append(own.get(name) or JudgeTool(schema, settings.max_tool_response_length))
        tools[-1].schema = schema
    return tools


def _of_server(entry: McpSettings, settings: AgentLoopSettings) -> list[Tool]:
    server = McpServer(entry)
    listed = {tool.name: tool for tool in server.tools}
    if unknown := [name for name in entry.tools or [] if name not in listed]:
        raise ValueError(f"the MCP server {entry.mcp} has no tool {unknown[0]!r}; it has {', '.join(listed)}")
    return [McpTool(server, listed[name], settings) for name in entry.tools or listed]
