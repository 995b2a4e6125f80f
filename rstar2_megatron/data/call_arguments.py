"""Whether the arguments of a tool call fit the tool's schema: the check of rollouts, which data for SFT must pass too. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from rstar2_megatron.data.json_text import JSON_TYPES, half_character, json_type
from rstar2_megatron.tools import ToolSchema, required_parameters, tool_name


def argument_fault(arguments: dict[str, Any], schema: ToolSchema) -> str:
    """Error in the arguments, or an empty string. Unknown arguments are ignored, as in the released code."""
    missing = [f'"{key}"' for key in required_parameters(schema) if key not in arguments]
    if missing:
        return f"{tool_name(schema)} needs the argument {', '.join(missing)}."
    for key, spec in schema["function"]["parameters"]["properties"].items():
        if key not in arguments:
            continue
        value, wanted = arguments[key], str(spec.get("type", "any"))  # JSON Schema also has lists of types
        if value is None and spec.get("nullable"):
            continue
        if wanted == "integer" and isinstance(value, float) and value.is_integer():  # 3.0 is one in JSON Schema
            continue
        wrong_bool = isinstance(value, bool) and wanted in JSON_TYPES and wanted != "boolean"
        if wrong_bool or not isinstance(value, JSON_TYPES.get(wanted, (object,))):
            return f'Argument "{key}" must be of type {wanted}, got {json_type(value)}.'
        if fault := _unwritable(value):
            return f'Argument "{key}" holds {fault}.'
    return ""


def is_call_as_text(text: str, names: Iterable[str]) -> bool:
    """Whether a text is a call of one of the tools in Python, or begins as one in JSON, which a rollout would not run."""
    rest = re.sub(r"""\A\s*(?:```\w*\s*)?\[?\s*(?:\{\s*"name"\s*:\s*)?['"]?""", "", text)
    form = re.compile(r"""['"]?\s*\(.*\)\s*+\]?\s*+(?:```\s*+)?\Z|"\s*(?:\}|,\s*"(?:arguments|parameters)")""", re.DOTALL)
    return any(rest.startswith(name) and form.match(rest, len(name)) for name in names)


def _unwritable(value: Any) -> str:
    """Why a value is no JSON, as those of the pythonic format may be, or cannot be encoded; "" when it can be written."""
    try:
        return half_character(json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True))
    except (TypeError, ValueError, RecursionError) as error:
        return f"a value that is no JSON: {error}"
