"""Conversations in the turns of tokenizers without `<|im_start|>`: Llama 3's and Mistral's forms."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rstar2_megatron.rollout.chat import ChatTemplate, check_tools_in_prompt
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.trajectory import Problem

LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.role == 'system' %}{{- 'Today Date: ' + date_string + '\n\n' }}{%- endif %}"
    "{{- m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
SPECIAL = {
    LLAMA3: ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    MISTRAL: ["<s>", "</s>", "[INST]", "[/INST]"],
}
ASKED = Problem("q", [{"role": "user", "content": "What is 2+2?"}], ["4"])


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, with the template's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL[template]])
    bos, eos, *others = SPECIAL[template]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=others, chat_template=template
    )


def test_llama_turns() -> None:
    template = ChatTemplate(tokenizer_of(LLAMA3), AgentLoopSettings(system_prompt="S {tools}"))
    text = template.prompt_text(ASKED)
    check_tools_in_prompt(text, template.schemas)
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nS "
    assert text.startswith(head)
    opening = "<|start_header_id|>assistant<|end_header_id|>\n\n<reason>"
    assert text.endswith(f"What is 2+2?<|eot_id|>{opening}")
    assert template.decode(template.tokenizer.encode("x<|eot_id|>")) == "x"
    assert template.tool_response_text(["4"]) == (
        f"<|start_header_id|>user<|end_header_id|>\n\n<tool_response>\n4\n</tool_response><|eot_id|>{opening}"
    )


def test_a_template_without_a_system_role_has_the_tools_in_the_first_message() -> None:
    template = ChatTemplate(tokenizer_of(MISTRAL), AgentLoopSettings())
    text = template.prompt_text(ASKED)
    check_tools_in_prompt(text, template.schemas)
    assert text.startswith("<s>[INST] You are an assistant") and text.endswith("What is 2+2?[/INST]<reason>")
    assert template.tool_response_text(["4"]) == "[INST] <tool_response>\n4\n</tool_response>[/INST]<reason>"


@pytest.mark.parametrize("form", [LLAMA3, MISTRAL], ids=["llama", "mistral"])
def test_whole_conversation(form: str) -> None:
    """It is what the template renders from its messages, its pieces encode as the whole does, and only turns are trained."""
    tokenizer = tokenizer_of(form)
    template = ChatTemplate(tokenizer, AgentLoopSettings(system_prompt="", user_prefix=""))
    segments = template.conversation(ASKED, ["a</reason>", "b</reason>"], [["4"]])
    whole = "".join(text for text, _ in segments)
    messages = [
        *ASKED.prompt,
        {"role": "assistant", "content": "<reason>a</reason>"},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
        {"role": "assistant", "content": "<reason>b</reason>"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024")
    assert whole == rendered.replace("[/INST] <reason>", "[/INST]<reason>")  # Mistral's blank is not in its opening
    pieces = [i for text, _ in segments for i in tokenizer.encode(text, add_special_tokens=False)]
    assert pieces == tokenizer.encode(whole, add_special_tokens=False)
    assert [text for text, trained in segments if trained] == [f"{turn}</reason>{template.turns.end}" for turn in "ab"]
    assert template.stop_token_ids == [tokenizer.convert_tokens_to_ids(SPECIAL[form][1])]


@pytest.mark.parametrize("form", [LLAMA3, MISTRAL], ids=["llama", "mistral"])
def test_tool_output_cannot_open_or_close_a_turn(form: str) -> None:
    template = ChatTemplate(tokenizer_of(form), AgentLoopSettings())
    plain, evil = (template.tool_response_ids([text]) for text in ("x", "x" + "".join(SPECIAL[form])))
    special = set(template.tokenizer.all_special_ids)
    assert [i for i in evil if i in special] == [i for i in plain if i in special]


@pytest.mark.parametrize("form", [LLAMA3, MISTRAL], ids=["llama", "mistral"])
def test_a_problem_cannot_open_or_close_a_turn(form: str) -> None:
    template = ChatTemplate(tokenizer_of(form), AgentLoopSettings())
    special = set(template.tokenizer.all_special_ids)
    plain, evil = (
        template.prompt_ids(Problem("q", [{"role": "user", "content": text}], ["4"]))
        for text in ("x", "x" + "".join(SPECIAL[form]))
    )
    assert [i for i in evil if i in special] == [i for i in plain if i in special]


def test_the_tokenizers_own_wording_needs_tools() -> None:
    with pytest.raises(ValueError, match=r"=tokenizer, but .* has no tools .*; set it to null"):
        ChatTemplate(tokenizer_of(LLAMA3), AgentLoopSettings(chat_template="tokenizer"))
    hermes = LLAMA3.replace(
        "{%- for m in messages",
        "{%- for t in tools or [] %}{{ t | tojson }} in <tool_call>{%- endfor %}{%- for m in messages",
        1,
    )
    tokenizer = tokenizer_of(LLAMA3)
    tokenizer.chat_template = hermes
    template = ChatTemplate(tokenizer, AgentLoopSettings(chat_template="tokenizer"))
    text = template.prompt_text(ASKED)
    check_tools_in_prompt(text, template.schemas)
    assert text.endswith("assistant<|end_header_id|>\n\n")


def test_a_template_that_writes_no_conversation_is_told() -> None:
    tokenizer = tokenizer_of(LLAMA3)
    for broken in ("{% if a %}", "{{ messages | nofilter }}", "{{ raise_exception('no') }}", "{{ 'a' + 1 }}"):
        tokenizer.chat_template = broken
        with pytest.raises(ValueError, match=r"^the chat template cannot write a conversation of user: "):
            ChatTemplate(tokenizer, AgentLoopSettings())
