"""Checks of a Hugging Face directory by its headers and JSON alone: milliseconds, no torch, no tokenizer is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.sections.environment import OWN_TEMPLATE

_INDEX = "model.safetensors.index.json"
_AGAIN = "copy the file again from where the model came"
_SMALLEST_SHARE = 0.5  # of the embedding that a tokenizer of the same model names; the rest of an embedding is padding
_TURN_TOKENS = {"<|im_start|>", "<|im_end|>"}


def weight_problems(directory: Path, model: ModelConfig) -> Iterator[str]:
    """Missing or truncated shards, missing tensors, an embedding of another size."""
    tensors: dict[str, dict[str, Any]] = {}
    try:
        for file in _shards(directory):
            tensors.update(_header(file))
    except ValueError as error:
        yield str(error)
        return
    missing = [name for name in _names(model) if name not in tensors]
    if missing:
        yield (
            f"{directory} has no tensor {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, which its "
            "config.json asks for; the checkpoint is of another model or incomplete"
        )
        return
    rows = tensors["model.embed_tokens.weight"]["shape"][0]
    if rows != model.vocab_size:
        yield (
            f"{directory / 'config.json'}: vocab_size={model.vocab_size}, but model.embed_tokens.weight has {rows} rows; set "
            f"vocab_size={rows} or take the config.json of this model"
        )


def precision_notes(directory: Path, precision: str) -> Iterator[str]:
    """Weights that this run rounds when it loads them."""
    try:
        kinds = {entry["dtype"] for file in _shards(directory) for entry in _header(file).values()}
    except ValueError:
        return  # told by `weight_problems`
    if precision == "bf16" and "F32" in kinds:
        yield (
            f"the weights of {directory} are float32 and are rounded to bfloat16; set actor.model.precision=fp32 and "
            "rollout.model.precision=fp32 to keep them"
        )


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    names = sorted(set(_json(index).get("weight_map", {}).values()))
    absent = [name for name in names if not (directory / name).is_file()]
    if absent or not names:
        raise ValueError(f"{index} names {', '.join(absent) or 'no file'}, which {directory} does not hold; {_AGAIN}")
    return [directory / name for name in names]


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """{tensor: dtype, shape, data_offsets} of a safetensors file: 8 bytes of header length, the header, the data."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file} is truncated: {size} bytes end inside its header; {_AGAIN}")
        try:
            header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
        except ValueError:
            raise ValueError(f"{file} is no safetensors file: its header is not JSON; {_AGAIN}") from None
    header.pop("__metadata__", None)
    whole = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != whole:
        raise ValueError(f"{file} is truncated or damaged: {size} bytes, its header says {whole}; {_AGAIN}")
    return header


def _names(model: ModelConfig) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    norms = ("input_layernorm", "post_attention_layernorm")
    projections = [f"self_attn.{x}_proj" for x in "qkvo"]
    projections += ["mlp.gate"] if model.is_moe else [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    for layer in range(model.num_layers):
        yield from (f"model.layers.{layer}.{part}.weight" for part in (*norms, *projections))
        if model.qkv_bias:
            yield from (f"model.layers.{layer}.self_attn.{x}_proj.bias" for x in "qkv")


def tokenizer_problems(directory: Path, model: ModelConfig, chat_template: str | None) -> Iterator[str]:
    """A tokenizer of another vocabulary than the model's, or without the turns that a conversation needs."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return  # an older form of tokenizer: transformers reads it
    try:
        raw, config = _json(path), _json(directory / "tokenizer_config.json", optional=True)
        model_config = _json(directory / "config.json")
    except ValueError as error:
        yield str(error)
        return
    words = (raw.get("model") or {}).get("vocab") or {}
    names = list(words) if isinstance(words, dict) else [word[0] for word in words]
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    added = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    added |= {entry["content"]: int(i) for i, entry in (config.get("added_tokens_decoder") or {}).items()}
    if not ids and not added:
        yield f"{path} has neither a vocabulary nor added tokens; {_AGAIN}"
        return
    size = max([*ids, *added.values()]) + 1
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
    known = set(added.values())
    wrong = [i for i in (of_model if isinstance(of_model, list) else [of_model]) if i is not None and i not in known]
    if wrong and added:
        yield (
            f"{directory / 'config.json'}: eos_token_id={wrong[0]} is no special token of {path.name}: model and tokenizer are "
            "of different vocabularies; copy the model's own tokenizer beside it"
        )
    if eos is None and of_model is None:
        yield (f"{directory} names no end-of-text token: set eos_token in tokenizer_config.json or eos_token_id in config.json")
    elif eos is not None and eos not in added and eos not in names:
        yield f"{directory / 'tokenizer_config.json'}: eos_token {eos!r} is not in tokenizer.json; {_AGAIN}"
    yield from _template_problems(directory, config, chat_template, chatml=added.keys() >= _TURN_TOKENS)


def _template_problems(directory: Path, config: dict[str, Any], chat_template: str | None, *, chatml: bool) -> Iterator[str]:
    file = directory / "chat_template.jinja"
    own = file.read_text(encoding="utf-8") if file.is_file() else json.dumps(config.get("chat_template") or "")
    if chat_template == OWN_TEMPLATE and not ("tools" in own and "<tool_call>" in own):
        yield (
            f"agentloop.chat_template=tokenizer, but the chat template of {directory} has no tools called between <tool_call> "
            "tags; set it to null: then the system message describes them"
        )
    elif chat_template is None and not chatml and own in ("", '""'):
        yield (
            f"the tokenizer of {directory} has neither <|im_start|> and <|im_end|> nor a chat template; take the tokenizer of "
            "an instruct model, or write chat_template.jinja beside it"
        )


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {_AGAIN}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a JSON object; {_AGAIN}")
    return raw
