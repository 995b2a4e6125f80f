"""GPTModel with TransformerEngine's layers, built by the project's own code in one process on a machine without a GPU.

`python -m tests.install.engine_models OUT.json` builds the shipped sizes at their real shapes, on torch's "meta" device, for
the first and the last rank of the YAML's layout over torch's fake process groups; makes their sharded state dicts and takes
weights of the shapes of a Hugging Face model through the project's converter in and out. A thin model of each kind does the
same in host memory with real numbers. TransformerEngine asks for a CUDA device at few places: those get an answer, and nothing
is computed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.settings.load import load
from tests.actor.tiny import LLAMA3_ROPE

WORLD = 8
SHAPES = {
    "7B": "rstar2-qwen2.5-7b-megatron",
    "14B": "rstar2-qwen2.5-14b-megatron",
    "Qwen3-14B": "rstar2-qwen3-14b-megatron",
    "30B-A3B": "rstar2-qwen3-30b-a3b-megatron",
}
THIN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2-tied": {"tie": True},
    "qwen3": {"qwen3": True},
    "llama": {"llama": LLAMA3_ROPE},
    "moe": {"experts": {}},
}


class _Stream:
    """What megatron-core keeps for CUDA streams and never uses here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


@contextlib.contextmanager
def pretended_cuda(device: str) -> Iterator[None]:
    """Answer "there is a GPU" where layers are made, and lay their parameters on `device`."""
    from megatron.core.tensor_parallel import random as tracker

    from rstar2_megatron.actor.network.model import PolicyModel
    from rstar2_megatron.cpu import megatron as cpu_megatron

    def placed(factory: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"  # small ones with contents: indices, flags
            return factory(*args, **kwargs)

        return make

    plain_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        return answer.replace("meta.", "") if isinstance(answer, str) else answer

    answers: list[tuple[Any, str, Any]] = [
        *((torch, name, placed(getattr(torch, name))) for name in ("arange", "tensor", "zeros", "ones", "empty")),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: device),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (tracker.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
        (torch.Tensor, "type", type_name),  # replaced again below
        (PolicyModel, "to", lambda self, _: torch.nn.Module.to(self, device)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in answers]
    for owner, name, value in answers:
        setattr(owner, name, value)
    cpu_megatron._answer_cuda_type_names()
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def fake_groups(layout: Any, rank: int, world: int) -> Iterator[None]:
    """Megatron's process groups of one rank; collectives return at once and move nothing."""
    from megatron.core import parallel_state

    new_group = dist.new_group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})  # gloo's too
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
        )
        yield
    finally:
        dist.new_group = new_group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class ShapesOnly:
    """Stands for HFReader: tensors of a Hugging Face model's shapes without contents."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str, kind: str, part: int, parts: int) -> torch.Tensor:
        self.asked.add(name)
        shape = list(self._shapes[name])
        if kind != "whole":
            dim = 0 if kind == "rows" else 1
            assert shape[dim] % parts == 0, name
            shape[dim] //= parts
        return torch.empty(shape, device="meta")


def hf_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of such a checkpoint's tensors, from transformers' own model; experts one by one, as files have them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if model.is_moe:
        sizes |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_intermediate_size,
        }
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind[model.architecture], **sizes)
        ).named_parameters()
    shapes = {name: tuple(p.shape) for name, p in parameters if ".experts." not in name}
    wide, hidden = model.expert_intermediate_size, model.hidden_size
    for layer in range(model.num_layers):
        for expert in range(model.num_experts):
            for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
                shapes[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = shape
    return shapes


def build_shape(config_name: str, rank: int) -> dict[str, Any]:
    """One rank of a shipped YAML at its real shape."""
    from rstar2_megatron.actor import hf_weights
    from rstar2_megatron.actor.layout import check_layout
    from rstar2_megatron.actor.network.model import build_chunks, unwrap

    settings = load(config_name).settings
    model = known_model(settings.rollout.model.model_path)
    assert model is not None
    layout = check_layout(settings.actor, model, WORLD, settings.runner)
    shapes = hf_shapes(model)
    reader = ShapesOnly(shapes)
    began = time.monotonic()
    with pretended_cuda("meta"), fake_groups(layout, rank, WORLD):
        _, chunks = build_chunks(model, settings.actor.model, "transformer_engine", "cuda")
        models = [unwrap(chunk) for chunk in chunks]
        sharded = [chunk.sharded_state_dict(metadata=_sharding()) for chunk in models]
        saved, hf_weights.HFReader = hf_weights.HFReader, lambda _: reader  # type: ignore[misc, assignment]
        try:
            hf_weights.load_hf_weights(models, model, "")
        finally:
            hf_weights.HFReader = saved  # type: ignore[misc]
        out = {name: tuple(tensor.shape) for name, tensor in hf_weights.iter_hf_weights(models, model)}
    experts = model.num_experts // layout.expert
    parameters = {name for chunk in models for name, _ in chunk.named_parameters()}
    held = {key for part in sharded for key in part if not key.endswith("_extra_state")}
    return {
        "rank": rank,
        "layout": {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "data", "expert")},
        "layers": sorted({type(m).__name__ for chunk in models for m in chunk.modules() if _is_engine(m)}),
        "parameters": sum(p.numel() for chunk in models for p in chunk.parameters()),
        "whole_model": model.num_parameters,
        "experts_on_this_rank": experts,
        "sharded_entries": sum(map(len, sharded)),
        "parameters_without_sharded_entry": _unsaved(parameters, held),
        "hf_names": len(shapes),
        "hf_names_read": len(reader.asked),
        "hf_names_wrong_out": sorted(name for name in shapes.keys() | out.keys() if shapes.get(name) != out.get(name))[:5],
        "seconds": round(time.monotonic() - began, 1),
    }


def _unsaved(parameters: set[str], held: set[str]) -> list[str]:
    """Parameters that no entry of the sharded state dict represents; a grouped expert weight has an entry a number."""
    return sorted(p for p in parameters if p not in held and not any(k.startswith(p) for k in held))[:5]


def _sharding() -> dict[str, Any]:
    from rstar2_megatron.actor import checkpoint

    return dict(checkpoint._METADATA)


def _is_engine(module: Any) -> bool:
    return any(base.__module__.startswith("transformer_engine") for base in type(module).__mro__)


def round_trip_thin(kind: str, directory: Path) -> dict[str, Any]:
    """Real numbers through TransformerEngine's parameters: out as they went in, bit by bit."""
    from safetensors.torch import load_file

    from rstar2_megatron.actor import hf_weights
    from rstar2_megatron.actor.layout import Layout
    from rstar2_megatron.actor.network.model import build_chunks, unwrap
    from rstar2_megatron.model.model_config import ModelConfig
    from rstar2_megatron.settings.schema import ActorModelSettings
    from tests.actor.tiny import write_model

    write_model(directory, **THIN[kind])  # type: ignore[arg-type]
    source = load_file(directory / "model.safetensors")
    model = ModelConfig.from_directory(directory)
    with pretended_cuda("cpu"), fake_groups(Layout(1, 1, 1, 1), 0, 1):
        _, chunks = build_chunks(model, ActorModelSettings(precision="fp32"), "transformer_engine", "cuda")
        models = [unwrap(chunk) for chunk in chunks]
        with torch.no_grad():
            for chunk in models:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))
        hf_weights.load_hf_weights(models, model, directory)
        out = dict(hf_weights.iter_hf_weights(models, model))
        wrong = [
            name
            for name in source.keys() | out.keys()
            if name not in source or name not in out or not torch.equal(source[name], out[name])
        ]
    return {"tensors": len(source), "wrong": sorted(wrong)[:5]}


def optimizer_of_thin(kind: str, directory: Path) -> dict[str, Any]:
    """DDP and the distributed optimizer around a thin model, as one of two data-parallel ranks; nothing is stepped.

    The optimizer's sharded state is made as for a load.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from torch.utils._pytree import tree_leaves

    from rstar2_megatron.actor import checkpoint
    from rstar2_megatron.actor.layout import Layout
    from rstar2_megatron.actor.network.model import build_chunks, unwrap
    from rstar2_megatron.actor.optimizer import build_optimizer, wrap_ddp
    from rstar2_megatron.model.model_config import ModelConfig
    from rstar2_megatron.settings.schema import ActorModelSettings, OptimSettings

    model = ModelConfig.from_directory(directory)
    with pretended_cuda("cpu"), fake_groups(Layout(1, 1, 1, 2), 0, 2):
        config, chunks = build_chunks(model, ActorModelSettings(precision="bf16"), "transformer_engine", "cuda")
        chunks = wrap_ddp(config, chunks, OptimSettings())
        optimizer = build_optimizer(chunks, OptimSettings(), "bf16")
        parts = optimizer.chained_optimizers
        state = checkpoint._sharded_state(chunks, optimizer, loading=True)["optimizer"]
        return {
            "weights": sum(1 for chunk in chunks for _ in unwrap(chunk).parameters()),
            "sharded_states": sum(isinstance(x, ShardedBase) for x in tree_leaves(state)),
            "adam": sorted({f"{type(p.optimizer).__module__}.{type(p.optimizer).__name__}" for p in parts}),
            "main_gradients": all(hasattr(p, "main_grad") for c in chunks for p in unwrap(c).parameters()),
            "masters": sum(x.numel() for part in parts for x in part.get_parameters()),
        }


def optimizer_of_shape(config_name: str, rank: int, implementation: Any) -> dict[str, Any]:
    """DDP and the distributed optimizer of one rank of a shipped YAML at its real shape, without memory.

    The optimizer's sharded state is made as for a load; `read` are elements that this rank would read.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    from rstar2_megatron.actor import checkpoint
    from rstar2_megatron.actor.layout import check_layout
    from rstar2_megatron.actor.network.model import build_chunks, unwrap
    from rstar2_megatron.actor.optimizer import build_optimizer, wrap_ddp
    from rstar2_megatron.actor.optimizer_state import take_held_states
    from rstar2_megatron.cpu.megatron import repair_router_without_engine

    repair_router_without_engine()  # does nothing beside TransformerEngine
    settings = load(config_name).settings
    model = known_model(settings.rollout.model.model_path)
    assert model is not None
    layout = check_layout(settings.actor, model, WORLD, settings.runner)
    optim = settings.actor.optim.model_copy(update={"optimizer_cpu_offload": False})  # host memory is real
    began = time.monotonic()
    with pretended_cuda("meta"), fake_groups(layout, rank, WORLD):
        config, chunks = build_chunks(model, settings.actor.model, implementation, "cuda")
        chunks = wrap_ddp(config, chunks, optim)
        optimizer = build_optimizer(chunks, optim, settings.actor.model.precision)
        state = checkpoint._sharded_state(chunks, optimizer, loading=True)["optimizer"]
        sharded = [x for x in nested_values(state) if isinstance(x, ShardedBase)]
        held = take_held_states(optimizer, state)
        weights = [p for chunk in chunks for p in unwrap(chunk).parameters()]
        return {
            "weights": len(weights),
            "experts": model.num_experts,
            "elements": sum(p.numel() for p in weights),
            "sharded_states": len(sharded),
            "state_elements": sum(x.data.numel() for x in sharded),
            "adam": sorted({type(p.optimizer).__name__ for p in optimizer.chained_optimizers}),
            "masters": sum(x.numel() for p in optimizer.chained_optimizers for x in p.get_parameters()),
            "read": sum(x.data.numel() for _, tensors in held for x in nested_values(tensors)),
            "ranks_of_dense": layout.data * layout.context,
            "real_memory": sum(not p.is_meta for p in weights),
            "seconds": round(time.monotonic() - began, 1),
        }


def main() -> None:
    results: dict[str, Any] = {"shapes": {}, "thin": {}, "optimizers": {}, "optimizer_shapes": {}}
    engine = sys.argv[2:] != ["--local"]

    def attempt(where: dict[str, Any], key: str, function: Any, *arguments: Any) -> None:
        try:
            where[key] = function(*arguments)
        except Exception:
            where[key] = {"error": traceback.format_exc()}
        print(key, str(where[key])[:300], file=sys.stderr, flush=True)

    implementation = "transformer_engine" if engine else "local"
    for size, name in SHAPES.items():
        for rank in (0, WORLD - 1):
            where = results["optimizer_shapes"]
            attempt(where, f"{size} rank {rank}", optimizer_of_shape, name, rank, implementation)
    for size, name in SHAPES.items() if engine else ():
        for rank in (0, WORLD - 1):
            attempt(results["shapes"], f"{size} rank {rank}", build_shape, name, rank)
    with tempfile.TemporaryDirectory() as folder:
        for kind in THIN if engine else ():
            attempt(results["thin"], kind, round_trip_thin, kind, Path(folder) / kind)
            attempt(results["optimizers"], kind, optimizer_of_thin, kind, Path(folder) / kind)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
