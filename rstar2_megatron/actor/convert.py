"""Convert a training checkpoint to a Hugging Face directory: one process, no GPU, one tensor at a time.

    python -m rstar2_megatron.actor.convert CHECKPOINT/actor MODEL OUTPUT

MODEL is the Hugging Face directory that training started from; config and tokenizer are copied from it. A checkpoint of any
parallel layout can be converted. Parameters are read one layer at a time, so peak memory does not grow with the number of
layers. It is three times the embedding (stored tensor, read tensor, output shard): 4.7 GB for a 14B model in bf16
(`benchmarks.actor.conversion`).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rstar2_megatron.actor.checkpoint import read_counters
from rstar2_megatron.actor.hf_weights import EXPERT_NAMES, LAYER_NAMES, OUTER_NAMES, Mapping, write_hf_directory
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.records.disk import writing
from rstar2_megatron.weights.checksum import check_same_weights, tensor_checksum

_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."  # megatron-core's checkpoint key of all experts, stacked in one tensor


class _Slice(DefaultLoadPlanner):
    """Reads one slice of a stored tensor: `leading` indexes its first dimensions, the other dimensions are read whole."""

    def __init__(self, entry: TensorStorageMetadata, leading: tuple[int, ...]) -> None:
        super().__init__()
        self._entry = entry
        self._offsets = torch.Size([*leading, *[0] * (len(entry.size) - len(leading))])
        self._sizes = torch.Size([*[1] * len(leading), *entry.size[len(leading) :]])
        self.target = torch.empty(self._sizes, dtype=entry.properties.dtype)

    def create_local_plan(self) -> LoadPlan:
        (key,) = self.state_dict
        chunk = ChunkStorageMetadata(self._offsets, self._sizes)
        return LoadPlan(create_read_items_for_chunk_list(key, self._entry, [chunk]))

    def lookup_tensor(self, index: Any) -> Tensor:
        return self.target


def _metadata(checkpoint: Path) -> dict[str, Any]:
    """What each key of the checkpoint holds. Raises ValueError when the directory is no checkpoint."""
    try:
        return torch_checkpoint.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} is not a complete checkpoint of the actor ({error})") from None


def holds_reward_model(checkpoint: Path) -> bool:
    """Whether the checkpoint has a score head. Raises ValueError when the directory is no checkpoint."""
    return "score.weight" in _metadata(checkpoint)


def checkpoint_weights(checkpoint: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, tensor) from a checkpoint written by `MegatronActor.save_checkpoint`.

    Raises ValueError when the directory is no checkpoint, a weight is missing, or a checksum differs from the saved one.
    """
    metadata = _metadata(checkpoint)

    def read(key: str, *leading: int) -> Tensor:
        entry = metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        planner = _Slice(entry, leading)
        torch_checkpoint.load(
            {key: planner.target}, storage_reader=torch_checkpoint.FileSystemReader(checkpoint), planner=planner, no_dist=True
        )
        return planner.target.view(planner.target.shape[len(leading) :])

    found = 0
    checksums: dict[str, int] = {}
    for parameter, mapping, first_expert in _parameters(config, metadata, read):
        pieces = mapping.split(parameter, config.head_dim, config.num_kv_heads)
        for hf_name, piece in zip(mapping.names(first_expert), pieces):
            found += piece.numel()
            checksums[hf_name] = tensor_checksum(piece)
            yield hf_name, piece
        del parameter, pieces, piece  # free the memory before the next read
    if found != config.num_parameters:
        raise ValueError(
            f"{checkpoint} holds {found} weights, the model of the given config.json {config.num_parameters}: "
            "give the Hugging Face directory that training started from"
        )
    check_same_weights(str(checkpoint), read_counters(checkpoint)["weights_checksum"], checksums)


def _parameters(config: ModelConfig, metadata: Any, read: Any) -> Iterator[tuple[Tensor, Mapping, int]]:
    """(parameter, mapping, expert index) of every weight, layer by layer."""
    for name in OUTER_NAMES:
        if name in metadata and not (name == "output_layer.weight" and config.tie_word_embeddings):
            yield read(name), Mapping.of(name, None), 0
    for layer in range(config.num_layers):
        for inner in LAYER_NAMES:
            if _LAYERS + inner in metadata:
                yield read(_LAYERS + inner, layer), Mapping.of(f"{_LAYERS}{layer}.{inner}", layer), 0
        for part, expert in itertools.product(EXPERT_NAMES, range(config.num_experts)):
            mapping = Mapping.of(f"{_LAYERS}{layer}.mlp.experts.local_experts.0.{part}.weight", layer)
            yield read(f"{_LAYERS}{_EXPERTS}{part}.weight", layer, expert), mapping, expert


def convert(checkpoint: Path, model: Path, output: Path) -> None:
    """Write the Hugging Face directory `output` atomically. Raises ValueError as `checkpoint_weights` does."""
    config = ModelConfig.from_directory(model, scores=holds_reward_model(checkpoint))
    weights = checkpoint_weights(checkpoint, config)
    write_hf_directory(weights, output, model, dtype=None, write=True, keys=config.exported_keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    try:
        with writing(args.output):
            convert(args.checkpoint, args.model, args.output)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        raise SystemExit(f"convert: {error}") from None
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
