"""Host memory of a node for the actor's ranks and the engines.

`actor.offload_*` copies are in pinned memory that is allocated once and kept (`actor/offload.py`). A save gathers masters
and moments, 12 bytes a parameter, on the first rank of each data-parallel group (`actor/optimizer_state.py`), one of the
three after the other. The peak is the larger of:
- while gathering, with gradient buckets of at most B parameters: all states, 4 B for joined shards on the gathering rank, and
  4 B / data-parallel ranks for the shard of each rank. Without overlapped communication a buffer is one bucket;
- while writing: all states and a copy of the weights.

A load takes less: every rank reads pieces of LOAD_PIECE_BYTES, or one parameter if it has more. tests/actor/test_checkpoint.py
counts these bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.memory import GB, WIDTH, RankParameters, rank_parameters
from rstar2_megatron.settings.schema import ActorSettings, Settings

PROCESS_GB = 8.0  # of a process with CUDA: libraries, pinned buffers
STATE_BYTES = 12  # a parameter: fp32 master and two moments
LOAD_PIECE_BYTES = 1 << 30
_BUCKET = 40_000_000  # parameters of a bucket with overlapped communication (megatron-core's default, up to 40 ranks)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """GB of one node's host memory."""

    optimizer: float
    """Masters and moments, with optimizer_cpu_offload or (pinned) with offload_optimizer."""
    weights: float
    """The pinned copy of actor.offload_weight; for a KL term the reference's, and the policy's own while that scores."""
    checkpoint: float
    """Peak of a save or a load: the whole state and temporary copies."""
    processes: float

    @property
    def total(self) -> float:
        return self.optimizer + self.weights + self.checkpoint + self.processes


def save_bytes(
    actor: ActorSettings, model: ModelConfig, world: int, *, ranks: int = 1, first: bool = True, bucket: int = _BUCKET
) -> float:
    """Peak host bytes of a save on `ranks` ranks of one node; `first`: they include the gathering ranks."""
    optim, bf16 = actor.optim, actor.model.precision == "bf16"
    width = WIDTH[actor.model.precision]
    shares = [share for share in rank_parameters(actor, model, world) if share.held]

    def gathering(share: RankParameters) -> int:
        return min(ranks, share.model_ranks) if first else 0

    held = sum(share.held * gathering(share) for share in shares)
    if not optim.use_distributed_optimizer:
        return (width + (STATE_BYTES if bf16 else 8)) * held
    peak = gathered = 0.0
    for share in shares:  # one optimizer after the other
        gathered += STATE_BYTES * share.held * gathering(share)
        size = share.held
        if optim.overlap_grad_reduce or optim.overlap_param_gather:  # the largest bucket has a vocabulary matrix
            matrix = model.vocab_size * model.hidden_size / actor.model.tensor_model_parallel_size
            size = min(bucket + matrix, share.held)
        on_their_way = gathering(share) + ranks * share.updated / share.held
        alone = share.updated == share.held
        peak = max(peak, gathered + (0 if alone else 4 * size * on_their_way))
    return max(peak, gathered + width * held)


def load_bytes(actor: ActorSettings, model: ModelConfig, *, ranks: int = 1, piece: int = LOAD_PIECE_BYTES) -> float:
    """Peak host bytes of a load on `ranks` ranks of one node, at most.

    A piece, or the state of the largest parameter, and stored tensors from which torch copies: two at once were counted
    with experts, one otherwise.
    """
    if not actor.optim.use_distributed_optimizer:
        return 0.0  # read into place
    width = model.expert_intermediate_size if model.is_moe else model.intermediate_size
    gated = 2 * width * model.hidden_size  # gate and up, which megatron-core joins into a second copy
    largest = max(model.vocab_size * model.hidden_size, 2 * gated) / actor.model.tensor_model_parallel_size
    return ranks * (max(piece, STATE_BYTES * largest) + (8 if model.is_moe else 4) * largest)


def host_memory(settings: Settings, model: ModelConfig, world: int) -> HostMemory:
    """Host memory of a node, counting every rank as the fullest one."""
    actor = settings.actor
    ranks = max(world // settings.cluster.num_nodes, 1)
    shares = rank_parameters(actor, model, world)
    state = STATE_BYTES if actor.model.precision == "bf16" or actor.optim.optimizer_cpu_offload else 8
    on_host = actor.optim.optimizer_cpu_offload or actor.offload_optimizer
    copies = actor.offload_weight + 2 * (settings.algorithm.kl_beta > 0)
    return HostMemory(
        optimizer=state * sum(s.updated for s in shares) * ranks / GB if on_host else 0.0,
        weights=copies * WIDTH[actor.model.precision] * sum(s.held for s in shares) * ranks / GB,
        checkpoint=max(save_bytes(actor, model, world, ranks=ranks), load_bytes(actor, model, ranks=ranks)) / GB,
        processes=2 * PROCESS_GB * ranks,  # an actor rank and an engine's rank
    )
