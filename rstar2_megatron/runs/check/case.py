"""Settings, batches and comparisons of the checks that run the actor: the YAML's, cut to a thin model and short sequences."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.settings.planning.advice import changed
from rstar2_megatron.settings.schema import LrSchedSettings, Settings

if TYPE_CHECKING:
    from rstar2_megatron.actor.megatron_actor import MegatronActor

Batch = list[TrainSequence]
SMOOTH: dict[str, Any] = {
    "algorithm.n_minibatches": 1,
    "algorithm.recompute_logprobs": False,
    "algorithm.importance_sampling_fix": False,
    "algorithm.decoupled_loss": False,
    **dict.fromkeys(("algorithm.mis_sequence", "algorithm.mis_geometric", "algorithm.icepop")),
    "algorithm.kl_beta": 0.0,
    "algorithm.clip_ratio_low": 0.999,
    "algorithm.clip_ratio_high": 1e6,
    "algorithm.clip_ratio_c": None,
    "algorithm.sampling_params.temperature": 1.0,
}
"""A loss without jumps: where a ratio is next to a clip bound, rounding alone would change the gradient."""


def make_case(
    context: Context,
    *,
    model: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    max_tokens: int | None = None,
    **actor: Any,
) -> Settings:
    """The YAML's actor on one rank and the thin model; `model`, `optim` and `actor` change its sections."""
    settings, longest = context.settings, longest_sequence(context)
    changes: dict[str, Any] = {
        "actor.model.tensor_model_parallel_size": 1,
        "actor.model.pipeline_model_parallel_size": 1,
        "actor.model.virtual_pipeline_model_parallel_size": None,
        "actor.model.context_parallel_size": 1,
        "actor.model.expert_model_parallel_size": 1,
        "actor.model.sequence_parallel": False,
        "actor.model.recompute_num_layers": 1 if settings.actor.model.recompute_granularity == "full" else None,
        "actor.lr_sched": LrSchedSettings(lr_warmup_iters=0),  # constant
        # On a GPU the first steps compile kernels, each rank in its own time.
        "actor.distributed_timeout_minutes": 1.0 if context.device == "cpu" else 5.0,
        "runner.max_steps": 5,
        "runner.seq_length": longest,
        "runner.max_tokens_per_mbs": max_tokens or 4 * longest,
        "rollout.model.model_path": str(context.thin),
        **SMOOTH,
        **{f"actor.model.{name}": value for name, value in (model or {}).items()},
        **{f"actor.optim.{name}": value for name, value in (optim or {}).items()},
        **{f"actor.{name}": value for name, value in actor.items()},
    }
    return changed(settings, changes)


def longest_sequence(context: Context) -> int:
    """Tokens of the longest sequence that a batch may have."""
    return 64 if context.device == "cpu" else 1024


def make_batch(context: Context) -> Batch:
    """Ragged trajectories with masked spans and advantages of both signs; no two fit a micro-batch of the longest's size."""
    longest = longest_sequence(context)
    return random_batch(context.thin_config, 12, longest // 2 + 1, longest)


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


@contextlib.contextmanager
def started_actor(job: Job, case: Settings) -> Iterator[MegatronActor]:
    """The actor of this rank, initialised; collective. What a program that fails leaves behind, its process removes."""
    from rstar2_megatron.actor.megatron_actor import MegatronActor  # here: the driver reads this file and does no torch work

    actor = MegatronActor(
        case.actor,
        case.runner,
        case.algorithm,
        model_path=case.rollout.model.model_path,
        rank=job.rank,
        world_size=job.world_size,
        init_method=job.init_method,
        device=job.device,
    )
    actor.initialize()
    yield actor
    actor.close()


def tolerance(precision: str) -> float:
    """Relative error of a gradient tensor that rounding explains; a wrong layout is off by its whole size."""
    return 1e-3 if precision == "fp32" else 0.06


def logprob_tolerance(precision: str) -> float:
    """Mean |difference| of log-probs that rounding explains."""
    return 1e-4 if precision == "fp32" else 0.03


def mean_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / max(len(pairs), 1)
