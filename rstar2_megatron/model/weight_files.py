"""The weights of a Hugging Face directory: which files they are, their headers, and what is wrong with them.

Actor, engine and the checks before a start take the files of `weight_files`, which are those that transformers loads. No
torch; a fraction of a second for any size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from rstar2_megatron.model.config_json import AGAIN, TAKE, read_object
from rstar2_megatron.model.model_config import ModelConfig

NOT_FINITE = "NaN or infinity; the file was damaged or the model's training diverged: take an earlier checkpoint"
_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Floats of a header: their bits as numpy reads them, and those of the exponent, which are all set in NaN and infinity alone.
_FLOATS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "F16": ("<u2", 0x1F << 10), "BF16": ("<u2", 0xFF << 7)}
# Up to so many bytes, all values are read. Of more, the two ends of some tensors: a 14B model has 28 GB and 579 tensors.
_READ_WHOLE, _PIECE, _END, _SAMPLED = 2**29, 2**19, 2**14, 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, whose bytes begin there at `begin`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def bits(self, *, whole: bool) -> Iterator[np.ndarray]:
        """All values a piece at a time, or those at the two ends, as integers."""
        values = np.memmap(self.file, _FLOATS[self.dtype][0], "r", self.begin, (prod(self.shape),))
        pieces = (
            [slice(at, at + _PIECE) for at in range(0, len(values), _PIECE)] if whole else [slice(_END), slice(-_END, None)]
        )
        return (values[piece] for piece in pieces)


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers loads: `model.safetensors`, else those of the index.

    Raises ValueError where there are none or both, and for files of the index that are not there.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if not index.is_file():
        if os.path.lexists(single):  # a link to nowhere is told where it is opened
            return [single]
        others = sorted(file.name for file in directory.iterdir() if file.suffix in _OTHERS)
        if not others:
            raise ValueError(f"{directory} holds no *.safetensors file: export the model with safetensors")
        raise ValueError(
            f"{directory} holds {', '.join(others[:3])}, but neither {_SINGLE} nor {_INDEX}, by which transformers finds a "
            "model's weights; copy the missing one from where the model came, or write the model again by save_pretrained"
        )
    names = sorted(set(_index(index).values()))
    if single.is_file() and names != [_SINGLE]:
        raise ValueError(
            f"{directory} holds two sets of weights, {_SINGLE} and the files of {_INDEX} ({', '.join(names[:3])}); move the "
            "one that is not the model's out of the directory"
        )
    absent = [name for name in names if not (directory / name).is_file()]
    if absent or not names:
        raise ValueError(f"{index} names {', '.join(absent) or 'no file'}, which {directory} does not hold; {AGAIN}")
    return [directory / name for name in names]


def _index(path: Path) -> dict[str, str]:
    named = read_object(path).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(f"{path} has no weight_map from tensors to files; {AGAIN}")
    return named


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of `weight_files` by name.

    Raises ValueError for a damaged file, a tensor in two files, and an index that names another file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        for name, tensor in _header(file).items():
            if name in tensors:
                raise ValueError(f"{tensors[name].file} and {file.name} both hold {name}; remove that which is not the model's")
            tensors[name] = tensor
    index = directory / _INDEX
    for name, other in _index(index).items() if index.is_file() else ():
        if name not in tensors or tensors[name].file != directory / other:
            raise ValueError(f"{index} names {other} for {name}, which that file does not hold; {AGAIN}")
    return tensors


def _header(file: Path) -> dict[str, StoredTensor]:
    """Of a safetensors file, which safetensors checks: its tensors lie one behind the other up to the end."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            begin = opened.read(8)
            if begin == b"version ":
                raise ValueError(f"{file} is a pointer of Git LFS and no weights; git lfs pull in {file.parent} fetches them")
            with safe_open(file, framework="np"):  # raises for a header that does not fit the file
                start = 8 + int.from_bytes(begin, "little")
                stored = json.loads(opened.read(start - 8))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}; check that it is there and who may read it") from None
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged: {size} bytes, {error}; {AGAIN}") from None
    stored.pop("__metadata__", None)
    return {
        name: StoredTensor(name, file, part["dtype"], tuple(part["shape"]), start + part["data_offsets"][0])
        for name, part in stored.items()
    }


def model_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model by its Hugging Face name."""
    hidden, wide = model.hidden_size, model.intermediate_size
    rows = {"q": model.num_heads * model.head_dim} | dict.fromkeys("kv", model.num_kv_heads * model.head_dim)
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {f"self_attn.{part}_proj.weight": (count, hidden) for part, count in rows.items()}
    layer["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if model.qkv_bias:
        layer |= {f"self_attn.{part}_proj.bias": (count,) for part, count in rows.items()}
    if model.qk_norm:
        layer |= {f"self_attn.{part}_norm.weight": (model.head_dim,) for part in "qk"}
    mlps = ["mlp"]
    if model.is_moe:
        wide, mlps = model.expert_intermediate_size, [f"mlp.experts.{expert}" for expert in range(model.num_experts)]
        layer["mlp.gate.weight"] = (model.num_experts, hidden)
    for mlp in mlps:
        layer |= {f"{mlp}.{part}_proj.weight": (wide, hidden) for part in ("gate", "up")}
        layer[f"{mlp}.down_proj.weight"] = (hidden, wide)
    tensors = {"model.embed_tokens.weight": (model.vocab_size, hidden), "model.norm.weight": (hidden,)}
    tensors |= {f"model.layers.{i}.{name}": shape for i in range(model.num_layers) for name, shape in layer.items()}
    if model.scores:
        tensors["score.weight"] = (1, hidden)
    elif not model.tie_word_embeddings:
        tensors["lm_head.weight"] = (model.vocab_size, hidden)
    return tensors


def weight_problems(directory: Path, model: ModelConfig, *, values: bool = True) -> Iterator[str]:
    """Why the weights are not those of `model`, in at most one sentence.

    values: look for NaN, infinity and matrices of zeros alone, in all values of a small model and in some of a large one.
    """
    try:
        yield from islice(_problems(directory, model, values), 1)
    except ValueError as error:
        yield str(error)


def _problems(directory: Path, model: ModelConfig, values: bool) -> Iterator[str]:
    """A problem takes it that those before it are not there. Raises ValueError as `stored_tensors`."""
    tensors = stored_tensors(directory)
    if model.num_layers * max(1, model.num_experts) > len(tensors):  # a mistyped number would take all memory below
        yield (
            f"{directory / 'config.json'}: num_hidden_layers={model.num_layers}, num_experts={model.num_experts}, but the "
            f"files hold {len(tensors)} tensors; {TAKE}"
        )
    wanted = model_tensors(model)
    missing = [name for name in wanted if name not in tensors and (name != "score.weight" or model.score_head)]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        tie = "; set tie_word_embeddings=true if its head is the embedding" if missing == ["lm_head.weight"] else ""
        yield (
            f"{directory} has no tensor {missing[0]}{more}, which its config.json asks for; the checkpoint is of another model "
            f"or incomplete{tie}"
        )
    if (rows := tensors["model.embed_tokens.weight"].shape[:1]) not in ((), (model.vocab_size,)):
        yield (
            f"{directory / 'config.json'}: vocab_size={model.vocab_size}, but model.embed_tokens.weight has {rows[0]} rows; "
            f"set vocab_size={rows[0]} or take the config.json of this model"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted.get(name) and not _ignored(name, wanted):
            asked = list(wanted[name]) if name in wanted else "no such tensor"
            yield (
                f"{tensor.file}: {name} has the shape {list(tensor.shape)}, config.json asks for {asked}; weights and "
                "config.json are of different models, take both from one"
            )
        if name in wanted and tensor.dtype not in _FLOATS:
            yield (
                f"{tensor.file}: {name} is stored as {tensor.dtype}, expected {', '.join(_FLOATS)}: quantized weights "
                "cannot be trained; take the model in bfloat16"
            )
    if values:
        yield from _bad_values([tensors[name] for name in wanted if name in tensors])


def _bad_values(tensors: list[StoredTensor]) -> Iterator[str]:
    whole = sum(file.stat().st_size for file in {tensor.file for tensor in tensors}) <= _READ_WHOLE
    some = [*tensors[:: -(-len(tensors) // _SAMPLED)], tensors[-1]]  # embedding and head are the first and the last
    looked, zeros = 0, []
    for tensor in tensors if whole else some:
        exponent, filled = _FLOATS[tensor.dtype][1], False
        for bits in tensor.bits(whole=whole):
            if ((bits & exponent) == exponent).any():
                yield f"{tensor.file}: {tensor.name} holds {NOT_FINITE}"
            filled = filled or bool(bits.any())
        looked += len(tensor.shape) == 2
        zeros += [tensor] if len(tensor.shape) == 2 and not filled else []
    if 2 * len(zeros) > looked:  # some methods add a few such matrices
        yield f"{zeros[0].file}: {zeros[0].name} and {len(zeros) - 1} more of {looked} matrices are zeros alone; fetch it again"


def _ignored(name: str, wanted: dict[str, tuple[int, ...]]) -> bool:
    """Whether it is no part of the decoder: another head, a statistic of training, frequencies that are computed."""
    return name not in wanted and (not name.startswith("model.") or "rotary_emb" in name)


def weight_notes(directory: Path, model: ModelConfig, precision: str) -> Iterator[str]:
    """What is rounded or left out of weights that have no `weight_problems`."""
    tensors, wanted = stored_tensors(directory), model_tensors(model)
    kinds = {tensor.dtype for name, tensor in tensors.items() if name in wanted}
    rounded = [f"float{kind[1:]}" for kind in sorted(kinds - {"BF16"})]
    if precision == "bf16" and rounded:
        yield (
            f"{'some of the' if 'BF16' in kinds else 'the'} weights of {directory} are {' and '.join(rounded)} and are rounded "
            "to bfloat16; set actor.model.precision=fp32 and rollout.model.precision=fp32 to keep them"
        )
    head, embedding = tensors.get("lm_head.weight"), tensors["model.embed_tokens.weight"]
    if head is not None and model.tie_word_embeddings and not model.scores and not _same_ends(head, embedding):
        yield (
            f"{head.file}: lm_head.weight is another head than the embedding and is ignored, because config.json ties the two; "
            "set tie_word_embeddings=false there to use it"
        )
    others = [name for name in tensors if _ignored(name, wanted) and name != "lm_head.weight" and "rotary_emb" not in name]
    if others:
        yield f"{tensors[others[0]].file}: {', '.join(others[:3])} ({len(others)} tensors) is no part of the model, and ignored"
    unread = {file.name for file in directory.glob("*.safetensors")} - {file.name for file in weight_files(directory)}
    if unread:
        yield f"{directory}: {', '.join(sorted(unread)[:3])} ({len(unread)} files) is not loaded, as by transformers"


def _same_ends(one: StoredTensor, other: StoredTensor) -> bool:
    ends = (tensor.bits(whole=False) for tensor in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(map(np.array_equal, *ends))
