"""Creates and destroys the process groups of torch.distributed and Megatron."""

from __future__ import annotations

import math
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from rstar2_megatron.actor.layout import Layout
from rstar2_megatron.cpu import megatron as cpu_megatron
from rstar2_megatron.cpu import products
from rstar2_megatron.settings.schema import ActorSettings

# megatron-core is imported inside functions: without a GPU `join` must install stand-ins for CUDA before the import.


def join(actor: ActorSettings, layout: Layout, *, rank: int, world_size: int, init_method: str, device: str) -> None:
    """Initialise torch.distributed for the actor's ranks and create the groups of `layout`; collective."""
    if device == "cpu":
        torch.set_num_threads(actor.cpu_threads)
        cpu_megatron.install()
        products.install(kernels=16)  # few: batches are large, and rarely of one size
        # Every rank would warn at every call that Apex and TransformerEngine are absent.
        warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    order_collectives()
    minutes = actor.distributed_timeout_minutes
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=minutes),
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(minutes)),
    )
    set_seed(actor.seed)


def order_collectives() -> None:
    """Start TP and SP collectives before the GEMMs that they overlap. CUDA reads this when it creates its context."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_seed(seed: int) -> None:
    """Seed the generators. Megatron's tracker gives tensor-parallel ranks different streams."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave() -> None:
    """Undo `join`; collective. Safe to call twice."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
