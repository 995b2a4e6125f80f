"""The format of tool calls that a chat template shows, and the settings that contradict it."""

from __future__ import annotations

import pytest

from rstar2_megatron.model.tokenizer_files import format_of, template_fault

HERMES = '{{ tools }} <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": "{{ tools }} <tool_call>\n<function=example>",
    "llama3": '{{ tools }} in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "pythonic": "{{ tools }} in the format [func_name1(params_name1=params_value1), func_name2(params)]",
    "mistral": "{{ tools }}{{ '[TOOL_CALLS]' + m.content }}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_shows_its_format(form: str) -> None:
    assert format_of(TEMPLATES[form]) == form
    assert template_fault(TEMPLATES[form], form) == template_fault(TEMPLATES[form], "auto") == ""
    assert template_fault("{{ messages }}", form).startswith("has no tools")


@pytest.mark.parametrize("form", TEMPLATES)
def test_another_format_than_the_templates_is_refused(form: str) -> None:
    """Qwen3-Coder's calls are between the same tags as the Hermes ones, and would all be malformed."""
    for other in TEMPLATES.keys() - {form}:
        assert (
            template_fault(TEMPLATES[form], other) == f"shows calls of the format {form}; set agentloop.tool_call_format={form}"
        )


def test_what_shows_nothing() -> None:
    assert template_fault("{{ tools }}", "auto").startswith("shows no known form of a tool call; name it in")
    assert template_fault("{{ tools }}", "hermes").startswith("has no tools called between <tool_call> tags; set it to null")
    assert template_fault("{{ tools }}", "llama3") == ""  # the user knows what the model has learnt
    assert template_fault(HERMES + "x = [f(a=1)]", "hermes") == ""
