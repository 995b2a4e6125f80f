"""Checks of the tokenizer of a Hugging Face directory by its files alone: no torch, no tokenizer is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rstar2_megatron.model.config_json import AGAIN, read_object
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.weight_files import weight_problems

OWN_TEMPLATE = "tokenizer"
"""Value of `agentloop.chat_template`: the tokenizer's own, tools included."""
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # the last is no JSON: transformers reads it
_SMALLEST_SHARE = 0.5  # of the embedding that a tokenizer of the same model names; the rest of an embedding is padding
_TURN_END = "<|im_end|>"
_TURN_TOKENS = {"<|im_start|>", _TURN_END}
DATE = "26 Jul 2024"
"""For templates that write today's date, as Llama 3's: with its default a prompt is the same every day."""
_NO_TOKENS = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}
_ASKED = {"role": "user", "content": "1+1?"}
_ANSWERED = [_ASKED, {"role": "assistant", "content": "2"}, _ASKED]
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "X."}}, "required": ["x"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": _PARAMETERS}}


# What the chat template of a format of tool calls says, the most particular first.
_SIGNS = {
    "qwen3_coder": re.compile("<function="),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "pythonic": re.compile(r"\[\w+\(\w+="),
    "llama3": re.compile(r'<\|python_tag\|>|"name": function name, "parameters"'),
    "hermes": re.compile("<tool_call>"),
}


def format_of(template: str) -> str:
    """The format in which a chat template tells a model to write tool calls; "" for none that is known."""
    return next((name for name, sign in _SIGNS.items() if sign.search(template)), "")


def template_fault(template: str, tool_call_format: str) -> str:
    """Why a chat template cannot write the whole conversation in this format; "" when it can."""
    shown, hermes = format_of(template), tool_call_format == "hermes"
    unset = "; set it to null: then the system message describes them"
    if "tools" not in template or (hermes and not shown):
        return f"has no tools{' called between <tool_call> tags' if hermes else ''}{unset}"
    if tool_call_format == "auto":
        return "" if shown else "shows no known form of a tool call; name it in agentloop.tool_call_format"
    if not shown or (_SIGNS[tool_call_format].search(template) and not (hermes and shown == "qwen3_coder")):
        return ""
    return f"shows calls of the format {shown}; set agentloop.tool_call_format={shown}"


def directory_problems(
    directory: Path, model: ModelConfig, chat_template: str | None, tool_call_format: str = "hermes"
) -> list[str]:
    """What is wrong with the weights; else with the tokenizer, and its turns in conversations by `chat_template`."""
    return (
        [*weight_problems(directory, model)]
        or [*tokenizer_problems(directory, model, chat_template, tool_call_format)]
        or [*_unread_tokenizer(directory / "tokenizer.json")]
    )


def _unread_tokenizer(path: Path) -> Iterator[str]:
    """That of a newer tokenizers than the installed one, or a damaged one."""
    import tokenizers  # here: a plan without a model's directory needs none

    if path.is_file():
        try:
            tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # its own type
            with_which = f"tokenizers {tokenizers.__version__} ({error})"
            yield f"{path} cannot be read by {with_which}; save it again by this version, or {AGAIN}"


def tokenizer_problems(
    directory: Path, model: ModelConfig, chat_template: str | None, tool_call_format: str = "hermes"
) -> Iterator[str]:
    """A tokenizer of another vocabulary than the model's, or without the turns that a conversation needs."""
    path = next((directory / name for name in _FILES if (directory / name).is_file()), None)
    if path is not None and path.name == "vocab.json" and not (directory / "merges.txt").is_file():
        yield f"{directory} has vocab.json without merges.txt; copy the tokenizer's files of the model into it"
    if path is None:
        yield f"{directory} has no tokenizer ({', '.join(_FILES)}); copy the tokenizer's files of the model into it"
    if path is None or path.suffix != ".json":
        return
    try:
        raw, model_config = read_object(path), read_object(directory / "config.json")
        config, generation = (_optional(directory / f"{of}_config.json") for of in ("tokenizer", "generation"))
        added = _optional(directory / "added_tokens.json")
    except ValueError as error:
        yield str(error)
        return
    try:
        raw = {"model": {"vocab": raw}} if path.name == "vocab.json" else raw
        words = (raw.get("model") or {}).get("vocab") or {}
        words = words if isinstance(words, dict) else {word[0]: i for i, word in enumerate(words)}
        added = _added(raw, config, added)
        size = max([*words.values(), *added.values()]) + 1 if words else 0
    except (AttributeError, KeyError, TypeError, ValueError):
        size = 0
    if not size:
        yield f"{path} is no tokenizer of transformers: expected tokens and their numbers; {AGAIN}"
        return
    if size > model.vocab_size:
        beyond = sorted((i, token) for token, i in added.items() if i >= model.vocab_size)
        which = f", e.g. the added token {beyond[0][1]!r} ({beyond[0][0]})" if beyond else ""
        yield (
            f"{path} has {size} tokens{which}, the model's embedding {model.vocab_size}: enlarge it by "
            "resize_token_embeddings of transformers, or take the tokenizer of this model"
        )
    elif size < _SMALLEST_SHARE * model.vocab_size:
        yield (
            f"{path} has {size} tokens, the model's embedding {model.vocab_size}: they are of different models; copy the "
            "model's own tokenizer beside it"
        )
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    of_model = model_config.get("eos_token_id")
    for file, ends in (("config.json", of_model), ("generation_config.json", generation.get("eos_token_id"))):
        given = [i for i in (ends if isinstance(ends, list) else [ends]) if i is not None]
        wrong = [i for i in given if type(i) is not int or i not in added.values()]
        if wrong and added:
            yield (
                f"{directory / file}: eos_token_id={wrong[0]!r} is no special token of {path.name}: model and tokenizer are of "
                "different vocabularies; copy the model's own tokenizer beside it"
            )
    if eos is None and of_model is None:
        yield (f"{directory} names no end-of-text token: set eos_token in tokenizer_config.json or eos_token_id in config.json")
    elif eos is not None and not (isinstance(eos, str) and (eos in added or eos in words)):
        yield f"{directory / 'tokenizer_config.json'}: eos_token {eos!r} is not in tokenizer.json; {AGAIN}"
    yield from _template_problems(directory, config, chat_template, tool_call_format, chatml=added.keys() >= _TURN_TOKENS)


def _template_problems(
    directory: Path, config: dict[str, Any], chat_template: str | None, tool_call_format: str, *, chatml: bool
) -> Iterator[str]:
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in (directory / "additional_chat_templates").glob("*.jinja")}
    templates: Any = {}
    for name, file in files.items():
        try:
            templates |= {name: file.read_text(encoding="utf-8")} if file.is_file() else {}
        except UnicodeDecodeError as error:
            yield f"{file} is not UTF-8: {error}; {AGAIN}"
            return
    if not templates:
        templates, files = config.get("chat_template"), {}
    whole = chat_template is not None
    name, own = own_template(templates, whole=whole)
    if chat_template == OWN_TEMPLATE and (fault := template_fault(own, tool_call_format)):
        yield f"agentloop.chat_template=tokenizer, but the chat template of {directory} {fault}"
    elif not whole and not chatml and not own:
        yield (
            f"the tokenizer of {directory} has neither <|im_start|> and <|im_end|> nor a chat template; take the tokenizer of "
            "an instruct model, or write chat_template.jinja beside it"
        )
    elif whole or not chatml:
        is_own = chat_template in (None, OWN_TEMPLATE)
        place = files.get(name, directory / "tokenizer_config.json") if is_own else "agentloop.chat_template"
        tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
        if fault := _rendering_fault(own if is_own else str(chat_template), tokens, whole=whole, chatml=chatml):
            yield f"{place}: the chat template cannot write a conversation ({fault}); mend it, or take another"


def own_template(templates: Any, *, whole: bool) -> tuple[str, str]:
    """(name, text) of that of a tokenizer's chat templates which is used; whole: it describes the tools. "" for none."""
    if isinstance(templates, list):
        templates = {
            one.get("name"): one.get("template")
            for one in templates
            if isinstance(one, dict) and isinstance(one.get("name"), str)
        }
    elif not isinstance(templates, Mapping):
        templates = {"default": templates}
    name = "tool_use" if whole and "tool_use" in templates else "default"
    return name, str(templates.get(name) or "")


def _rendering_fault(template: str, tokens: dict[str, Any], *, whole: bool, chatml: bool) -> str:
    """Why transformers cannot render the conversations by which the turns are found; "" when it can."""
    # here, because it takes a second, which runs in this project's own wording need not wait for
    from transformers.utils.chat_template_utils import render_jinja_template

    known: dict[str, Any] = _NO_TOKENS | {
        key: value for key, value in tokens.items() if key.endswith("_token") and isinstance(value, str)
    }
    try:
        render_jinja_template(
            [[_ASKED], *([] if chatml else [_ANSWERED])],
            tools=[_TOOL] if whole else None,
            chat_template=template,
            add_generation_prompt=True,
            date_string=DATE,
            **known,
        )
    except Exception as error:  # a template is a program, which can raise any error
        line = getattr(error, "lineno", None)
        return (f"line {line}: " if line else "") + " ".join(str(error).split())
    return ""


def turn_end_id(directory: Path) -> int | None:
    """The token that ends a turn in training; None for a tokenizer without ChatML's turns, of which a chat template decides."""
    files = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
    try:
        added = _added(*(_optional(directory / file) for file in files))
    except (AttributeError, KeyError, TypeError, ValueError):  # as below
        return None
    return added[_TURN_END] if added.keys() >= _TURN_TOKENS else None


def _added(raw: dict[str, Any], config: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Id by token of those that a tokenizer keeps whole, of the objects of its three files."""
    of_tokenizer = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    return added | of_tokenizer | {entry["content"]: int(i) for i, entry in (config.get("added_tokens_decoder") or {}).items()}


def declared_special_tokens(directory: Path) -> list[str]:
    """As `rollout.chat.special_tokens`, by the tokenizer.json of a directory; none where it cannot be read."""
    try:
        added = read_object(directory / "tokenizer.json").get("added_tokens")
        return [token["content"] for token in added or [] if token.get("special")]
    except (AttributeError, KeyError, TypeError, ValueError):  # the checks of the tokenizer say what is wrong
        return []


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
