"""GPU memory of one actor rank in training (`host_memory.py` has the host's).

N parameters, world = data x tensor x pipeline x context ranks, GB = 1e9 bytes:
- weights 2N/(TP PP) in bf16, gradients 4N/(TP PP) in fp32, optimizer 12N/world (fp32 master, two moments,
  sharded by the distributed optimizer); fp32 training: 4N, 4N and 8N; experts are divided by EP instead of TP;
- with optim.optimizer_cpu_offload the optimizer takes no GPU memory;
- activations: with full recompute the input of each layer and all activations of one; without, those of every layer;
- vocabulary head: `log_prob_chunk_tokens` rows of vocab/TP in fp32, two blocks of 256 rows, and a placeholder for the
  weight's gradient. The gradient itself is in the gradient buffer.

Neither a save nor a load takes GPU memory: the distributed optimizer's state is gathered in host memory, and read into place.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import ActorSettings, Settings

GB = 1e9
WIDTH = {"bf16": 2, "fp32": 4}  # bytes of a weight
CUDA_OVERHEAD_GB = 5.0  # context, NCCL buffers, workspaces, fragmentation
HEAD_BLOCK_ROWS = 256  # actor/network/logprob.py
# Memory of an engine outside its static share, which it also keeps while it sleeps. An estimate: context and workspaces of
# libraries 1.5, CUDA graphs of the decoding batch sizes 2, NCCL and its all-reduce buffers 1.5 at TP > 1. SGLang's memory
# saver releases none of them. Reports of SGLang on H100 range from 3 to 6.
ENGINE_RESIDUE_GB, ENGINE_NCCL_GB = 3.5, 1.5
ENGINE_WORK_GB = 2.0  # activations and logits of a generating engine, outside its static share


@dataclass(frozen=True, slots=True)
class Memory:
    """GB of one rank in training."""

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
    """Parameters (without experts) of the largest pipeline stage: its layers and an embedding or head."""
    matrix = model.vocab_size * model.hidden_size
    matrices = 1 if model.tie_word_embeddings else 2
    layers = model.num_parameters - model.expert_parameters - matrices * matrix
    return layers + matrices * matrix if pipeline == 1 else layers / pipeline + matrix


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank under one distributed optimizer: the dense ones or the experts."""

    held: float
    updated: float
    """The rank's shard: held / data-parallel ranks."""
    model_ranks: int
    """Ranks that together hold all these parameters."""


def rank_parameters(actor: ActorSettings, model: ModelConfig, world: int) -> tuple[RankParameters, RankParameters]:
    """(dense, experts) of the fullest actor rank of `world`."""
    parallel = actor.model
    pp = parallel.pipeline_model_parallel_size
    shares = []
    for parameters, split in (
        (parameters_of_largest_stage(model, pp), parallel.tensor_model_parallel_size),
        (model.expert_parameters / pp, parallel.expert_model_parallel_size),
    ):
        held, ranks = parameters / split, split * pp
        data = max(world // ranks, 1) if actor.optim.use_distributed_optimizer else 1
        shares.append(RankParameters(held, held / data, ranks))
    return shares[0], shares[1]


def engine_residue_gb(settings: Settings) -> float:
    """GB of an engine on each of its GPUs outside its static share, awake or asleep."""
    return ENGINE_RESIDUE_GB + (ENGINE_NCCL_GB if settings.rollout.tensor_parallel_size > 1 else 0.0)


def layer_activations(model: ModelConfig, tp: int, split: int) -> float:
    """Numbers a token that a layer of TransformerEngine keeps for its backward pass on a rank.

    split: TP with sequence parallelism. Kept are both norms' inputs and results, queries, keys, values, the attention's result
    twice, and gate, up and their product. tests/actor/test_transformer_engine.py counts them; statistics are left out.
    """
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * q + 2 * kv + (q + kv if model.qk_norm else 0)
    mlp = 3 * model.intermediate_size
    if model.is_moe:  # a token is copied for each of its experts; a balanced load is assumed
        mlp = model.experts_per_token * (3 * model.expert_intermediate_size + model.hidden_size)
    return 4 * model.hidden_size / split + (attention + mlp) / tp


def training_memory(settings: Settings, model: ModelConfig, world: int, *, cpu: bool) -> Memory:
    """Memory of the fullest actor rank of `world`."""
    parallel, optim = settings.actor.model, settings.actor.optim
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    width = WIDTH[parallel.precision]
    dense, experts = rank_parameters(settings.actor, model, world)
    per_rank, sharded = dense.held + experts.held, dense.updated + experts.updated
    state = 0 if optim.optimizer_cpu_offload else 12 if parallel.precision == "bf16" else 8

    tokens = -(-settings.runner.max_tokens_per_mbs // cp)
    split = tp if parallel.sequence_parallel else 1
    hidden = width * tokens * model.hidden_size / split
    layer = width * tokens * layer_activations(model, tp, split)
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
    rows = settings.actor.head_chunk_tokens(cpu=cpu)
    head = 4 * (rows + 2 * HEAD_BLOCK_ROWS if not cpu else 3 * rows) * model.vocab_size / tp
    head += width * model.vocab_size * model.hidden_size / tp
    return Memory(
        weights=width * per_rank / GB,
        gradients=4 * per_rank / GB,
        optimizer=state * sharded / GB,
        activations=activations / GB,
        head=head / GB,
        overhead=0.0 if cpu else CUDA_OVERHEAD_GB,
    )
