"""Settings, batches and comparisons of the checks that run the actor: the YAML's, cut to a thin model and short sequences."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.settings.schema import ActorSettings, AlgorithmSettings, RunnerSettings, Settings

if TYPE_CHECKING:
    from rstar2_megatron.actor.megatron_actor import MegatronActor

Batch = list[TrainSequence]


@dataclass(frozen=True)
class Case:
    """Settings and model directory of an actor in a check."""

    actor: ActorSettings
    runner: RunnerSettings
    algorithm: AlgorithmSettings
    model_path: str


def make_case(
    context: Context,
    *,
    model: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    packed: bool = True,
    max_tokens: int | None = None,
    **actor: Any,
) -> Case:
    """The YAML's actor on one rank; `model`, `optim` and `actor` change its sections."""
    settings = context.settings
    longest = lengths(context)[1]
    one_rank = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "recompute_num_layers": 1 if settings.actor.model.recompute_granularity == "full" else None,
    }
    return Case(
        settings.actor.model_copy(
            update={
                "model": settings.actor.model.model_copy(update={**one_rank, **(model or {})}),
                "optim": settings.actor.optim.model_copy(update=optim or {}),
                "lr_sched": settings.actor.lr_sched.model_copy(update={"lr_warmup_iters": 0, "lr_decay_style": "constant"}),
                # On a GPU the first steps compile kernels, each rank in its own time.
                "distributed_timeout_minutes": 1.0 if context.device == "cpu" else 5.0,
                **actor,
            }
        ),
        settings.runner.model_copy(
            update={
                "max_steps": 5,
                "seq_length": longest,
                "max_tokens_per_mbs": max_tokens or 4 * longest,
                "enable_dynamic_batch_size": packed,
            }
        ),
        smooth(settings),
        str(context.thin),
    )


def smooth(settings: Settings) -> AlgorithmSettings:
    """The YAML's loss without jumps: where a ratio is next to a clip bound, rounding alone would change the gradient."""
    return settings.algorithm.model_copy(
        update={
            "n_minibatches": 1,
            "training_batch_size_per_gpu": 1,
            "recompute_logprobs": False,
            "importance_sampling_fix": False,
            "decoupled_loss": False,
            **dict.fromkeys(("mis_sequence", "mis_geometric", "icepop")),
            "kl_beta": 0.0,
            "clip_ratio_low": 0.999,
            "clip_ratio_high": 1e6,
            "clip_ratio_c": None,
            "sampling_params": settings.algorithm.sampling_params.model_copy(update={"temperature": 1.0}),
        }
    )


def lengths(context: Context) -> tuple[int, int]:
    """Shortest and longest sequence of a batch."""
    return (20, 64) if context.device == "cpu" else (128, 1024)


def make_batch(context: Context) -> Batch:
    """Ragged trajectories with masked spans and advantages of both signs."""
    return random_batch(context.thin_config, 12, *lengths(context))


def random_batch(model: ModelConfig, count: int, low: int, high: int, seed: int = 0) -> Batch:
    rng = random.Random(seed)
    uniform = -math.log(model.vocab_size)
    batch = []
    for number in range(count):
        n = rng.randint(low, high)
        prompt = max(1, n // 4)
        mask = [0] * prompt + [int(rng.random() < 0.8) for _ in range(n - prompt)]
        batch.append(
            TrainSequence(
                input_ids=np.array([rng.randrange(model.vocab_size) for _ in range(n)]),
                loss_mask=np.array(mask),
                rollout_logprobs=np.array([uniform + rng.gauss(0, 0.1) if m else 0.0 for m in mask]),
                advantage=(-1.0, -0.4, 0.7, 1.3)[number % 4],
            )
        )
    return batch


def start(job: Job, case: Case) -> MegatronActor:
    """The actor of this rank, initialised; collective."""
    from rstar2_megatron.actor.megatron_actor import MegatronActor  # here: the driver reads this file and does no torch work

    actor = MegatronActor(
        case.actor,
        case.runner,
        case.algorithm,
        model_path=case.model_path,
        rank=job.rank,
        world_size=job.world_size,
        init_method=job.init_method,
        device=job.device,
    )
    actor.initialize()
    return actor


def tolerance(precision: str) -> float:
    """Relative error of a gradient tensor that rounding explains; a wrong layout is off by its whole size."""
    return 1e-3 if precision == "fp32" else 0.06


def logprob_tolerance(precision: str) -> float:
    """Mean |difference| of log-probs that rounding explains."""
    return 1e-4 if precision == "fp32" else 0.03


def mean_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / max(len(pairs), 1)
