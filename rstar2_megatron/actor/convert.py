"""A training checkpoint to a Hugging Face directory, on one process, without a GPU, tensor by tensor.

    python -m rstar2_megatron.actor.convert CHECKPOINT/actor MODEL OUTPUT

MODEL is the Hugging Face directory that training started from: config and tokenizer come from it. Peak memory
is the largest parameter, all its layers together (14 GB for a 14B model in bf16), and one output shard of 2 GB;
the layout that saved the checkpoint does not matter.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rstar2_megatron.actor.hf_weights import LAYER_NAMES, OUTER_NAMES, Mapping, write_hf_directory
from rstar2_megatron.actor.model_config import ModelConfig

_LAYERS = "decoder.layers."


def checkpoint_weights(checkpoint: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, tensor) of a checkpoint that `MegatronActor.save_checkpoint` wrote.

    Parameters of all layers lie stacked in one tensor; one parameter is read at a time. Raises ValueError when
    the directory is no checkpoint or lacks a weight.
    """
    try:
        reader = torch_checkpoint.FileSystemReader(checkpoint)
        metadata = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} is not a complete checkpoint of the actor ({error})") from None

    def read(key: str) -> Tensor:
        entry = metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        wanted = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        torch_checkpoint.load(
            wanted, storage_reader=torch_checkpoint.FileSystemReader(checkpoint), no_dist=True
        )
        return wanted[key]

    found = 0
    for name in (*OUTER_NAMES, *(_LAYERS + inner for inner in LAYER_NAMES)):
        if name not in metadata or (name == "output_layer.weight" and config.tie_word_embeddings):
            continue
        stacked = read(name)
        in_layers = name.startswith(_LAYERS)
        for layer in range(config.num_layers) if in_layers else [None]:
            inner = name if layer is None else f"{_LAYERS}{layer}.{name.removeprefix(_LAYERS)}"
            mapping = Mapping.of(inner, layer)
            parameter = stacked if layer is None else stacked[layer]
            pieces = mapping.split(parameter, config.head_dim, config.num_kv_heads)
            for hf_name, piece in zip(mapping.hf_names, pieces):
                found += piece.numel()
                yield hf_name, piece
    if found != config.num_parameters:
        raise ValueError(
            f"{checkpoint} holds {found} weights, the model of the given config.json {config.num_parameters}: "
            "give the Hugging Face directory that training started from"
        )


def convert(checkpoint: Path, model: Path, output: Path) -> None:
    """Write the Hugging Face directory `output`, whole or not at all. Raises ValueError."""
    config = ModelConfig.from_directory(model)
    weights = checkpoint_weights(checkpoint, config)
    first = next(weights)
    dtype = str(first[1].dtype).removeprefix("torch.")
    write_hf_directory(itertools.chain([first], weights), output, model, dtype, write=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    convert(args.checkpoint, args.model, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
