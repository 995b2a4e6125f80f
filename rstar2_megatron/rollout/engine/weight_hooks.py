"""Runs inside SGLang's scheduler process: loads weights from shared memory and computes their checksums.

`load_shared` is SGLang's `custom_weight_loader`: it runs in the regular tensor update, between `begin_weight_update` and
`end_weight_update`. Only the location of the data passes through SGLang's own channel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from rstar2_megatron.model.weight_files import weight_files
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.cuda_ipc import open_device_bucket

LOADER = f"{__name__}.load_shared"
CHECKSUM_METHOD = "rstar2_write_checksums"

# SGLang's fused parameters and the Hugging Face tensors inside them
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_shared(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load weights from the locations that the uint8 tensors encode: paths of safetensors files, or device handles."""
    for kind, content in named_tensors:
        spelled = bytes(content.cpu().numpy())
        if kind == "handle":
            model.load_weights(open_device_bucket(spelled))
            continue
        with safe_open(spelled.decode(), framework="pt") as file:
            model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def install() -> None:
    """Add the checksum call to the scheduler class, make a tensor that cannot be loaded an error reply, repair a wake-up.

    SGLang does not catch a loader's exception in a tensor update, so the scheduler would die of it. Without an index it loads
    every *.safetensors of a directory, one over the other, and with one those that lie beside it; here it loads the actor's.
    """
    # Imported here: other processes import this module without SGLang.
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    setattr(Scheduler, CHECKSUM_METHOD, _write_checksums)
    update = WeightUpdater.update_weights_from_tensor
    resume = SchedulerWeightUpdaterManager.resume_memory_occupation

    def same_files(self: Any, model_path: str, *args: Any, **kwargs: Any) -> tuple[str, list[str], bool]:
        return model_path, [str(file) for file in weight_files(Path(model_path))], True

    def update_or_refuse(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        try:
            result: tuple[bool, str] = update(self, *args, **kwargs)
        except Exception as error:
            result = False, f"a tensor could not be loaded: {error}"
        return first_failure(result, get_tp_group())

    def resume_with_padding(self: Any, request: Any) -> Any:
        answer = resume(self, request)
        if not request.tags or GPU_MEMORY_TYPE_KV_CACHE in request.tags:
            clear_padding(self.scheduler.req_to_token_pool)
        return answer

    DefaultModelLoader._prepare_weights = same_files
    WeightUpdater.update_weights_from_tensor = update_or_refuse
    SchedulerWeightUpdaterManager.resume_memory_occupation = resume_with_padding


def first_failure(result: tuple[bool, str], group: Any) -> tuple[bool, str]:
    """The result of all tensor-parallel ranks. SGLang answers with that of rank 0, and another rank would serve old weights."""
    if group.world_size == 1:
        return result
    results: list[Any] = [None] * group.world_size
    dist.all_gather_object(results, result, group=group.cpu_group)
    failures = [f"tensor-parallel rank {rank}: {words}" for rank, (ok, words) in enumerate(results) if not ok]
    return (False, failures[0]) if failures else result


def clear_padding(pool: Any) -> None:
    """Zero the padding row of SGLang's request table, as at the start.

    It is in memory that a sleeping engine releases, and nothing writes it again. CUDA graphs read the KV page that it names for
    the unused places of a batch.
    """
    pool.req_to_token[0].zero_()


def _write_checksums(scheduler: Any, path: str) -> None:
    """Write {Hugging Face name: checksum} of the whole model as JSON to `path`, on tensor-parallel rank 0."""
    runner = scheduler.tp_worker.model_runner
    sums = weights_checksum(hf_tensors(runner.model, runner.tp_size, runner.tp_group.device_group))
    if runner.tp_rank == 0:
        with open(path, "w") as file:
            json.dump(sums, file)


@torch.no_grad()
def hf_tensors(model: Any, tp_size: int, group: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters by Hugging Face name and in Hugging Face shape, gathered one tensor at a time.

    A tied output head is left out, as in a Hugging Face state dict.
    """
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    # rows per rank: with more ranks than KV heads, each rank holds a copy of one head
    q_rows = config.num_attention_heads // tp_size * head_size
    kv_rows = max(1, kv_heads // tp_size) * head_size
    kv_copies = max(1, tp_size // kv_heads)
    for name, parameter in model.named_parameters():
        if config.tie_word_embeddings and name.startswith("lm_head"):
            continue
        if ".experts.w13_weight" in name or ".experts.w2_weight" in name:
            yield from _experts(name, parameter, tp_size, group)
            continue
        module = next((fused for fused in _FUSED if f".{fused}." in name), None)
        if module is None:
            whole = _gather(parameter, _sharded_dim(name), tp_size, group)
            if "embed_tokens" in name or name.startswith("lm_head"):
                whole = whole[: config.vocab_size]  # SGLang pads the vocabulary
            yield name, whole
            continue
        if module == "qkv_proj":
            pieces = parameter.split([q_rows, kv_rows, kv_rows])
        else:
            pieces = parameter.chunk(2)
        for part, piece in zip(_FUSED[module], pieces, strict=True):
            copies = kv_copies if part in ("k_proj", "v_proj") else 1
            yield name.replace(module, part), _gather(piece, 0, tp_size, group, copies)


def _experts(name: str, stacked: Tensor, tp_size: int, group: Any) -> Iterator[tuple[str, Tensor]]:
    """Unstack SGLang's experts: w13 [experts, gate and up, hidden], w2 [experts, hidden, width].

    This is the layout of SGLang's default (Triton) kernels. It is untested here, because SGLang has no experts on a CPU.
    """
    prefix, _, kind = name.partition(".experts.")
    if kind == "w13_weight":
        parts = zip(("gate_proj", "up_proj"), stacked.chunk(2, 1))
        wholes = [(part, _gather(piece, 1, tp_size, group)) for part, piece in parts]
    else:
        wholes = [("down_proj", _gather(stacked, 2, tp_size, group))]
    for part, whole in wholes:
        for expert, weight in enumerate(whole):
            yield f"{prefix}.experts.{expert}.{part}.weight", weight


def _sharded_dim(name: str) -> int | None:
    """Dimension that tensor parallelism splits, for a parameter that is not fused."""
    if ".o_proj.weight" in name or ".down_proj.weight" in name:
        return 1
    if "embed_tokens" in name or name.startswith("lm_head"):
        return 0
    return None


def _gather(piece: Tensor, dim: int | None, tp_size: int, group: Any, copies: int = 1) -> Tensor:
    if dim is None or tp_size == 1:
        return piece
    shards = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(tp_size)]
    dist.all_gather(shards, piece.contiguous(), group=group)
    return torch.cat(shards[::copies], dim=dim)
