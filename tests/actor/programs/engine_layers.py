"""What the ranks of the tests of TransformerEngine's layers run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from rstar2_megatron.actor.network.model import unwrap
from tests.actor.programs.training import Batch, open_actor
from tests.actor.transformer_engine import kernels


@dataclass
class Run:
    """What one rank has seen."""

    logprobs: np.ndarray
    grad_norms: list[float]
    after_save: float
    after_load: float
    restored: bool
    kernels: dict[str, int]


def run(rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batch: Batch) -> Run:
    """Log-probs, two steps, a checkpoint, a step; the checkpoint again, and the same step."""
    kernels.CALLS.clear()
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        logprobs = np.concatenate(actor.compute_logprobs(batch))
        norms = [actor.train_step(batch)["actor/grad_norm"] for _ in range(2)]
        actor.save_checkpoint(directory)
        saved = actor.weights_checksum()
        after_save = actor.train_step(batch)["actor/grad_norm"]
        actor.load_checkpoint(directory)
        restored = actor.weights_checksum() == saved
        after_load = actor.train_step(batch)["actor/grad_norm"]
    return Run(logprobs, norms, after_save, after_load, restored, dict(kernels.CALLS))


def kept_by_a_layer(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch
) -> list[tuple[int, int]]:
    """(tokens, bf16 numbers that the second layer keeps for its backward pass, without weights) of each micro-batch."""
    found: list[tuple[int, int]] = []
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        (chunk,) = actor.policy.chunks
        layer = unwrap(chunk).decoder.layers[1]
        weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
        plain = layer.forward

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            kept: dict[int, int] = {}

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if tensor.dtype == torch.bfloat16 and storage.data_ptr() not in weights:
                    kept[storage.data_ptr()] = storage.nbytes() // 2
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = plain(hidden_states, *args, **kwargs)
            found.append((world_size * hidden_states.shape[0], sum(kept.values())))
            return result

        with mock.patch.object(layer, "forward", forward):
            actor.train_step(batch)
    return found


def train_and_save(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batch: Batch
) -> list[float]:
    """Two steps, a checkpoint, and the gradient norms of two more."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        for _ in range(2):
            actor.train_step(batch)
        actor.save_checkpoint(directory)
        return [actor.train_step(batch)["actor/grad_norm"] for _ in range(2)]


def load_and_train(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batch: Batch
) -> list[float]:
    """Gradient norms of the two steps that follow the checkpoint of `train_and_save`."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        actor.load_checkpoint(directory)
        return [actor.train_step(batch)["actor/grad_norm"] for _ in range(2)]
