"""Bytes of one actor rank while it trains, and of a node's host.

N parameters, world = data x tensor x pipeline x context ranks, GB = 1e9 bytes:
- weights 2N/(TP PP) in bf16, gradients 4N/(TP PP) in fp32, optimizer 12N/world (fp32 master, two moments,
  sharded by the distributed optimizer); fp32 training: 4N, 4N and 8N; experts are divided by EP instead of TP;
- with optim.optimizer_cpu_offload the optimizer takes no GPU memory and 12N/world of the host for each rank;
- activations with full recompute: one input per layer, plus one layer at work; without: every layer's;
- vocabulary head: `log_prob_chunk_tokens` rows of vocab/TP, 12 bytes a logit (two in fp32, two in bf16), and the
  placeholder for its weight's gradient, which itself goes to the buffer that counts as gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import Settings

GB = 1e9
CUDA_OVERHEAD_GB = 5.0  # context, NCCL buffers, workspaces, fragmentation
PROCESS_GB = 8.0  # host memory of a process with CUDA: libraries, pinned buffers


@dataclass(frozen=True, slots=True)
class Memory:
    """GB of one rank while it trains."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    overhead: float = 0.0

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.static + self.activations + self.head + self.overhead


def parameters_of_largest_stage(model: ModelConfig, pipeline: int) -> float:
    """Parameters (but for experts) of the pipeline stage that holds most: its layers, an embedding or head."""
    matrix = model.vocab_size * model.hidden_size
    matrices = 1 if model.tie_word_embeddings else 2
    layers = model.num_parameters - model.expert_parameters - matrices * matrix
    return layers + matrices * matrix if pipeline == 1 else layers / pipeline + matrix


def parameters_of_rank(settings: Settings, model: ModelConfig, world: int) -> tuple[float, float]:
    """(held, updated by its shard of the optimizer): parameters of the fullest actor rank of `world`."""
    parallel = settings.actor.model
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    dense, experts = parameters_of_largest_stage(model, pp) / tp, model.expert_parameters / (ep * pp)
    held = dense + experts
    if not settings.actor.optim.use_distributed_optimizer:
        return held, held
    return held, dense / max(world // (tp * pp), 1) + experts / max(world // (ep * pp), 1)


def training_memory(settings: Settings, model: ModelConfig, world: int, *, cpu: bool) -> Memory:
    """Memory of the fullest actor rank of `world`."""
    parallel, optim = settings.actor.model, settings.actor.optim
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    bf16 = parallel.precision == "bf16"
    width = 2 if bf16 else 4
    per_rank, sharded = parameters_of_rank(settings, model, world)
    state = 0 if optim.optimizer_cpu_offload else 12 if bf16 else 8

    tokens = settings.runner.max_tokens_per_mbs
    if not settings.runner.enable_dynamic_batch_size:
        tokens = settings.algorithm.training_batch_size_per_gpu * settings.runner.seq_length
    tokens = -(-tokens // cp)
    split = tp if parallel.sequence_parallel else 1
    hidden = width * tokens * model.hidden_size / split
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    mlp = 3 * model.intermediate_size
    if model.is_moe:  # a token's copies for its experts, where experts are chosen evenly
        mlp = model.experts_per_token * (3 * model.expert_intermediate_size + 2 * model.hidden_size)
    layer = 6 * hidden + width * tokens * (2 * q + 2 * kv + mlp) / tp
    layers = -(-model.num_layers // pp)
    in_flight = pp  # micro-batches that the first stage holds under 1F1B
    if parallel.recompute_granularity == "full":
        every = parallel.recompute_num_layers or 1
        if parallel.recompute_method == "block":
            recomputed = min(every, layers)
            activations = in_flight * (recomputed * hidden + (layers - recomputed) * layer) + layer
        else:
            activations = in_flight * (-(-layers // every)) * hidden + every * layer
    else:
        activations = in_flight * layers * layer
    head = 3 * 4 * settings.actor.log_prob_chunk_tokens * model.vocab_size / tp
    head += width * model.vocab_size * model.hidden_size / tp
    return Memory(
        weights=width * per_rank / GB,
        gradients=4 * per_rank / GB,
        optimizer=state * sharded / GB,
        activations=activations / GB,
        head=head / GB,
        overhead=0.0 if cpu else CUDA_OVERHEAD_GB,
    )


@dataclass(frozen=True, slots=True)
class HostMemory:
    """GB of one node's host that the actor's ranks there take."""

    optimizer: float
    """Masters and moments: always there with optimizer_cpu_offload, while engines generate with offload_optimizer."""
    weights: float
    """The copy that actor.offload_weight keeps, pinned."""
    checkpoint: float
    """While one is written: this rank's shard of the state and the state that is gathered from them."""
    processes: float

    @property
    def total(self) -> float:
        return self.optimizer + self.weights + self.checkpoint + self.processes


def host_memory(settings: Settings, model: ModelConfig, world: int) -> HostMemory:
    """Host memory of a node whose ranks are all as full as the fullest."""
    actor = settings.actor
    bf16 = actor.model.precision == "bf16"
    ranks = max(world // settings.cluster.num_nodes, 1)
    held, updated = parameters_of_rank(settings, model, world)
    state = 12 if bf16 or actor.optim.optimizer_cpu_offload else 8
    on_host = actor.optim.optimizer_cpu_offload or actor.offload_optimizer
    return HostMemory(
        optimizer=state * updated * ranks / GB if on_host else 0.0,
        weights=(2 if bf16 else 4) * held * ranks / GB if actor.offload_weight else 0.0,
        checkpoint=12 * (updated + held) * ranks / GB,
        processes=2 * PROCESS_GB * ranks,  # an actor rank and an engine's
    )
