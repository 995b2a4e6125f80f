"""Hugging Face safetensors to megatron-core parameters and back, one tensor at a time.

Both layer specs (local, TransformerEngine) and all tensor, pipeline and expert parallel sizes are supported. A rank reads
only its own rows, columns or experts and never holds the whole model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rstar2_megatron.actor.checkpoint import replace_directory
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.tokenizer_files import turn_end_id
from rstar2_megatron.model.weight_files import NOT_FINITE, stored_tensors, weight_problems
from rstar2_megatron.records.whole_file import write_json

Kind = Literal["rows", "columns", "whole"]
MAX_SHARD_BYTES = 2 * 1024**3
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")  # tokenizer and generation config
_NOT_COPIED = ("config.json", "model.safetensors.index.json")

# megatron-core name inside a layer -> (names in a Hugging Face layer, how tensor parallelism splits the weight)
LAYER_NAMES: dict[str, tuple[tuple[str, ...], Kind]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "rows"),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "rows"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": (("mlp.gate.weight",), "whole"),
}
# The same for the weights of one expert. Tensor parallelism does not split experts. {} is the expert's index.
EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "linear_fc1": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "linear_fc2": ("mlp.experts.{}.down_proj.weight",),
}
# Expert 3 is experts.local_experts.3.linear_fc1.weight in the local spec, experts.linear_fc1.weight3 in TransformerEngine's.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)")
OUTER_NAMES: dict[str, tuple[str, Kind]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", "rows"),
    "decoder.final_layernorm.weight": ("model.norm.weight", "whole"),
    "output_layer.weight": ("lm_head.weight", "rows"),
    "score.weight": ("score.weight", "whole"),
}


@dataclass(frozen=True, slots=True)
class Mapping:
    """One megatron-core parameter and the Hugging Face tensors that it holds."""

    hf_names: tuple[str, ...]
    kind: Kind
    is_qkv: bool = False
    expert: int | None = None
    """Index among this rank's experts. `hf_names` then contain {} for the expert's index in the layer."""

    @classmethod
    def of(cls, name: str, layer: int | None) -> Mapping:
        """Mapping of parameter `name`; `layer` is the index of its layer in the whole model, from 0."""
        if layer is None:
            hf_name, kind = OUTER_NAMES[name]
            return cls((hf_name,), kind)
        inner = re.sub(r"^decoder\.layers\.\d+\.", "", name)
        expert = _EXPERT.fullmatch(inner)
        if expert:
            names = tuple(f"model.layers.{layer}.{x}" for x in EXPERT_NAMES[expert[2]])
            return cls(names, "whole", expert=int(expert[1] or expert[3]))
        names, kind = LAYER_NAMES[inner]
        is_qkv = "linear_qkv" in inner and len(names) == 3
        return cls(tuple(f"model.layers.{layer}.{x}" for x in names), kind, is_qkv)

    def names(self, first_expert: int) -> tuple[str, ...]:
        """`hf_names` on a rank whose first expert has index `first_expert` in the layer."""
        if self.expert is None:
            return self.hf_names
        return tuple(name.format(first_expert + self.expert) for name in self.hf_names)

    def fuse(self, parts: list[Tensor], head_dim: int, local_groups: int) -> Tensor:
        """Join this rank's parts of the Hugging Face tensors into the parameter.

        Queries, keys and values are interleaved by KV group, as megatron-core expects: [q..q k v] in each group.
        """
        if self.is_qkv:
            grouped = [x.reshape(local_groups, -1, head_dim, *x.shape[1:]) for x in parts]
            return torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, parameter: Tensor, head_dim: int, local_groups: int) -> list[Tensor]:
        """Inverse of `fuse`."""
        if self.is_qkv:
            rest = parameter.shape[1:]
            grouped = parameter.reshape(local_groups, -1, head_dim, *rest)
            queries = grouped.size(1) - 2
            return [x.reshape(-1, *rest) for x in grouped.split([queries, 1, 1], 1)]
        return list(parameter.chunk(len(self.hf_names))) if len(self.hf_names) > 1 else [parameter]


class HFReader:
    """Reads tensors, or parts of them, by name from the safetensors files of a Hugging Face directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._file_of = {name: tensor.file for name, tensor in stored_tensors(self.directory).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, kind: Kind, part: int, parts: int) -> Tensor:
        """Part `part` of `parts` of tensor `name`, split by `kind`: rows, columns, or not split.

        Raises ValueError for NaN and infinity in it.
        """
        if name not in self._file_of:
            raise ValueError(f"{self.directory} has no tensor {name}: the checkpoint does not fit its config.json")
        piece = self._piece(name, kind, part, parts)
        if not all(bound.isfinite() for bound in piece.aminmax()):  # 12 GB/s on one core, where isfinite() has 0.4
            raise ValueError(f"{self._file_of[name]}: {name} holds {NOT_FINITE}")
        return piece

    def _piece(self, name: str, kind: Kind, part: int, parts: int) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as handle:
            if kind == "whole" or parts == 1:
                return handle.get_tensor(name)
            lazy = handle.get_slice(name)
            shape = lazy.get_shape()
            size = shape[0 if kind == "rows" else 1] // parts
            cut = slice(part * size, (part + 1) * size)
            return lazy[cut] if kind == "rows" else lazy[:, cut]


def _parameters(model: Any) -> Iterator[tuple[Mapping, torch.nn.Parameter]]:
    """(mapping, parameter) of one model chunk; layer indices count over the whole model."""
    for name, parameter in model.named_parameters():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        layer = model.decoder.layers[int(match.group(1))].layer_number - 1 if match else None
        yield Mapping.of(name, layer), parameter


@torch.no_grad()
def load_hf_weights(chunks: list[Any], config: ModelConfig, directory: str | Path) -> None:
    """Copy this rank's share of the weights in `directory` into the model chunks, in place.

    Raises ValueError for weights that are not the model's.
    """
    for problem in weight_problems(Path(directory), config, values=False):
        raise ValueError(problem)
    reader = HFReader(directory)
    parts = parallel_state.get_tensor_model_parallel_world_size()
    part = parallel_state.get_tensor_model_parallel_rank()
    expert_group = parallel_state.get_expert_model_parallel_group()
    first_expert = expert_group.rank() * (config.num_experts // expert_group.size())
    for chunk in chunks:
        for mapping, parameter in _parameters(chunk):
            names = mapping.names(first_expert)
            if names == ("score.weight",) and names[0] not in reader:
                parameter.zero_()  # a reward model begins at a policy, without an opinion: its loss is ln 2
                continue
            if names == ("lm_head.weight",) and config.tie_word_embeddings:
                names = ("model.embed_tokens.weight",)
            pieces = [reader.read(name, mapping.kind, part, parts) for name in names]
            fused = mapping.fuse(pieces, config.head_dim, config.num_kv_heads // parts)
            parameter.copy_(fused)


@torch.no_grad()
def iter_hf_weights(chunks: list[Any], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) of every weight. Collective: every rank must exhaust it.

    Every rank receives every tensor; one parameter is gathered at a time. A tensor may share memory with the model: copy
    it to keep it beyond the next weight update. A tied head is not streamed again.
    """
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    pp_ranks = dist.get_process_group_ranks(pp_group)
    ep_group = parallel_state.get_expert_model_parallel_group()
    experts = config.num_experts // ep_group.size()  # per rank
    groups = config.num_kv_heads // tp_group.size()
    own = [
        (mapping, parameter)
        for chunk in chunks
        for mapping, parameter in _parameters(chunk)
        if not (config.tie_word_embeddings and mapping.hf_names == ("lm_head.weight",))
    ]
    plans = [[(mapping, tuple(p.shape), p.dtype) for mapping, p in own]]
    if len(pp_ranks) > 1:
        plans = [[] for _ in pp_ranks]
        dist.all_gather_object(plans, [(mapping, tuple(p.shape), p.dtype) for mapping, p in own], group=pp_group)
    for stage, plan in enumerate(plans):
        mine = pp_ranks[stage] == dist.get_rank()
        for place, (mapping, shape, dtype) in enumerate(plan):
            if mine:
                local = own[place][1].data
            else:
                local = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            if len(pp_ranks) > 1:
                local = local.contiguous()
                dist.broadcast(local, pp_ranks[stage], group=pp_group)
            if mapping.expert is not None:
                for rank, theirs in enumerate(_all_gathered(local, ep_group)):
                    yield from zip(mapping.names(rank * experts), mapping.split(theirs, config.head_dim, groups))
                continue
            for name, piece in zip(mapping.hf_names, mapping.split(local, config.head_dim, groups)):
                if mapping.kind == "whole" or tp_group.size() == 1:
                    yield name, piece
                else:
                    dim = 0 if mapping.kind == "rows" else 1
                    yield name, torch.cat(_all_gathered(piece, tp_group), dim)


def _all_gathered(piece: Tensor, group: Any) -> list[Tensor]:
    """The tensors of all ranks of `group`; all have the same shape."""
    if group.size() == 1:
        return [piece]
    pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, piece.contiguous(), group=group)
    return pieces


def write_hf_directory(
    weights: Iterator[tuple[str, Tensor]],
    directory: str | Path,
    source: str | Path,
    dtype: str | None,
    write: bool,
    keys: dict[str, Any] | None = None,
) -> None:
    """Write a Hugging Face directory: safetensors shards of at most 2 GB, config and tokenizer of `source`.

    Its eos_token_id begin with the token that ends a turn in training, which those of a base model lack.
    Collective, because reading `weights` is; only the rank with `write` writes files. The directory appears by a rename.
    `dtype` ("float32", "bfloat16"; None: that of the first weight) is written to config.json, and `keys` over its own.
    """
    final, source = Path(directory), Path(source)
    partial = final.with_name(final.name + ".tmp")
    if not write:
        for _ in weights:
            pass
        return
    shutil.rmtree(partial, ignore_errors=True)
    shards: list[Path] = []
    weight_map: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal held, held_bytes
        if held:
            partial.mkdir(parents=True, exist_ok=True)
            shards.append(partial / f"shard-{len(shards)}")
            save_file(held, shards[-1], metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(held, shards[-1].name))
        held, held_bytes = {}, 0

    for name, tensor in weights:
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
        if held_bytes + size > MAX_SHARD_BYTES:
            flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held_bytes += size
        total_bytes += size
        del tensor  # free the memory before the next tensor
    flush()
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        final_name = {shard.name: name for shard, name in zip(shards, names)}
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {name: final_name[shard] for name, shard in weight_map.items()},
        }
        write_json(partial / "model.safetensors.index.json", index)
    for shard, name in zip(shards, names):
        shard.rename(partial / name)
    if dtype is None:
        raise ValueError(f"there is no weight to write to {final}")
    _copy_config(source, partial, {**(keys or {}), "dtype": dtype})
    for name in names:  # safetensors gives its files to their owner alone, whatever the umask is
        shutil.copymode(partial / "config.json", partial / name)
    replace_directory(partial, final)


def _copy_config(source: Path, target: Path, keys: dict[str, Any]) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    if "torch_dtype" in config:  # the name that older versions of transformers read
        config["torch_dtype"] = keys["dtype"]
    config.update(keys)
    write_json(target / "config.json", _ending(config, end := turn_end_id(source)))
    if (generation := target / "generation_config.json").is_file():
        write_json(generation, _ending(json.loads(generation.read_text()), end))


def _ending(config: dict[str, Any], end: int | None) -> dict[str, Any]:
    """The configuration with the token `end` first in its eos_token_id."""
    given = config.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if end is None or ids[:1] == [end]:
        return config
    return {**config, "eos_token_id": [end, *(i for i in ids if i != end)]}
