"""The tools a model may call, as data: OpenAI-style function schemas.

Names follow the released rStar2-Agent code; the paper writes the first one
`execute_python_code_with_standard_io` (arXiv 2508.20722, figure 3), so both names are known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ToolSchema = dict[str, Any]


STANDARD_IO = "python_code_with_standard_io"
STANDARD_IO_PAPER = "execute_python_code_with_standard_io"
JUPYTER = "jupyter_code"


def _schema(name: str, description: str, **parameters: str) -> ToolSchema:
    """parameters: descriptions of texts that every call has."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    required = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": required}}


TOOL_SCHEMAS: dict[str, ToolSchema] = {
    name: _schema(
        name,
        "Run Python code in a fresh process with the given standard input and return what it writes to standard output and "
        "standard error.",
        code="The Python program to run.",
        input="Text for standard input; may be empty.",
    )
    for name in (STANDARD_IO, STANDARD_IO_PAPER)
}
TOOL_SCHEMAS[JUPYTER] = _schema(
    JUPYTER,
    "Run Python code in an interpreter that keeps its names and imports from call to call, and return what it writes and the "
    "value of its last expression.",
    code="The code of the next cell.",
)


def tool_schemas(
    names: list[str], described: list[ToolSchema] | None = None, known: Mapping[str, ToolSchema] = TOOL_SCHEMAS
) -> list[ToolSchema]:
    """Schemas of the named tools, in order; `described` replaces those of the same names.

    Raises ValueError for a name that no tool has, or a description of a tool that is not used.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"agentloop.tools names {unknown}; known tools are {sorted(TOOL_SCHEMAS)}, an own one is path/to/file.py:name"
        )
    own = {tool_name(schema): schema for schema in described or []}
    unused = sorted(set(own) - set(names))
    if unused:
        raise ValueError(f"agentloop.tool_descriptions describes {unused}, agentloop.tools has {names}")
    return [own.get(name, known[name]) for name in names]


def tool_name(schema: ToolSchema) -> str:
    return str(schema["function"]["name"])


def required_parameters(schema: ToolSchema) -> list[str]:
    return list(schema["function"]["parameters"].get("required", []))


def render_schemas(schemas: list[ToolSchema]) -> str:
    """One JSON object a line, as Qwen's chat template lists tools."""
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
