"""Checks of an engine: it starts, its greedy tokens have the actor's log-probs, it gives its memory back, it is fast."""

from __future__ import annotations

from typing import Any

import numpy as np

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.runs.check.case import make_case
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.result import Check, CheckFailed, Finding
from rstar2_megatron.settings.placement import first_engine
from rstar2_megatron.settings.planning.estimates import DECODE_SHARE, PEAK_BYTES_PER_S
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token
from rstar2_megatron.settings.planning.memory import engine_residue_gb
from rstar2_megatron.settings.schema import RolloutSettings
from rstar2_megatron.training.gates import MAX_LOGPROB_DIFF_FP32, MAX_MEAN_LOGPROB_DIFF_BF16

TOKENS = 64
_START_S = 600.0  # a first start compiles kernels and captures CUDA graphs
_LEAST_DECODING = 0.02  # of what bandwidth would give: two layers take less time than launching them
_MOST_KEPT = 2.0  # times what the plan counts for context, NCCL and graphs, which stay


def engine_settings(context: Context) -> RolloutSettings:
    """The YAML's engine on the thin model."""
    rollout = context.settings.rollout
    model = rollout.model.model_copy(update={"model_path": str(context.thin)})
    changes: dict[str, Any] = {"model": model, "engine_start_timeout_s": _START_S}
    if context.device == "cpu":
        changes |= {"max_total_tokens": 8192, "max_running_requests": 16}
    return rollout.model_copy(update=changes)


def start(context: Context) -> Finding:
    gpu = context.device == "cuda"
    settings = engine_settings(context)
    model = context.thin_config
    requests = min(settings.max_running_requests, 128) if gpu else 8
    context.nodes.free()  # the engine sizes its KV cache by the memory that it finds free
    figures = context.nodes.engine(
        "rstar2_megatron.runs.check.programs.one_engine:engine_run",
        first_engine(context.settings, context.slots),
        _START_S + 120.0,
        settings=settings,
        vocab_size=model.vocab_size,
        context_length=min(model.max_position_embeddings, 1024),
        tokens=TOKENS,
        requests=requests,
        speed_tokens=256 if gpu else 32,
    )
    context.found["engine"] = {**figures, "requests": requests}
    what = "JIT and CUDA graphs included" if gpu else "no CUDA graphs on a CPU"
    words = f"{figures['start_seconds']:.1f} s, {what}; {figures['kv_tokens']} KV tokens"
    shown = {k: figures[k] for k in ("start_seconds", "kv_tokens", "used_bytes")}
    limit = context.settings.rollout.engine_start_timeout_s
    if figures["start_seconds"] > limit:
        raise CheckFailed(
            f"{words}; rollout.engine_start_timeout_s={limit:.0f} would have ended it",
            remedy=f"rollout.engine_start_timeout_s={2 * figures['start_seconds']:.0f}",
            figures=shown,
        )
    return Finding(words, shown)


def greedy(context: Context) -> Finding:
    """64 greedy tokens: the actor must give each the log-prob that the engine reported."""
    told = context.found["engine"]
    length = len(told["prompt"])
    sequence = TrainSequence(
        input_ids=np.array([*told["prompt"], *told["token_ids"]]),
        loss_mask=np.array([0] * length + [1] * len(told["token_ids"])),
        rollout_logprobs=np.array([0.0] * length + told["logprobs"]),
        advantage=0.0,
    )
    case = make_case(context, optim={"optimizer_cpu_offload": False})
    rows = context.nodes.one("rstar2_megatron.runs.check.programs.actor_state:score", 110.0, case=case, batch=[sequence])
    return judge_logprobs(rows[0][length:], told["logprobs"], context.settings.actor.model.precision)


def judge_logprobs(ours: list[float], theirs: list[float], precision: str) -> Finding:
    """The step-0 gate's bounds, on tokens of one sequence."""
    if len(ours) != len(theirs) or len(theirs) < TOKENS:
        raise CheckFailed(f"the engine generated {len(theirs)} tokens of {TOKENS}, the actor scored {len(ours)}")
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    mean, largest = sum(differences) / len(differences), max(differences)
    figures = {"mean": mean, "max": largest}
    words = f"{len(theirs)} tokens, |log-prob difference| mean {mean:.1e}, max {largest:.1e}"
    good = largest <= MAX_LOGPROB_DIFF_FP32 if precision == "fp32" else mean <= MAX_MEAN_LOGPROB_DIFF_BF16
    if not good:
        allowed = f"max {MAX_LOGPROB_DIFF_FP32:g}" if precision == "fp32" else f"mean {MAX_MEAN_LOGPROB_DIFF_BF16:g}"
        raise CheckFailed(f"{words}; allowed {allowed} in {precision}", figures)
    return Finding(words, figures)


def sleep(context: Context) -> Finding:
    """Bytes that the engine gives back while the actor trains."""
    told = context.found["engine"]
    names = (
        "used_bytes",
        "freed_bytes",
        "taken_again_bytes",
        "sleep_seconds",
        "wake_seconds",
        "refused_asleep",
        "awake_difference",
    )
    figures = {name: told[name] for name in names}
    times = f"asleep in {told['sleep_seconds']:.2f} s, awake in {told['wake_seconds']:.2f} s"
    if not told["refused_asleep"]:
        raise CheckFailed(f"{times}; but the engine generated without its memory", figures)
    fp32 = context.settings.rollout.model.precision == "fp32"
    allowed = MAX_LOGPROB_DIFF_FP32 if fp32 else MAX_MEAN_LOGPROB_DIFF_BF16
    if not told["awake_difference"] <= allowed:
        raise CheckFailed(
            f"{times}; after it the same weights gave other log-probs: difference {told['awake_difference']:.1e}, allowed "
            f"{allowed:g}",
            figures,
        )
    if context.device == "cpu":
        return Finding(f"{times}; an engine on a CPU has nothing to free", figures)
    ranks = context.settings.rollout.tensor_parallel_size
    kept = (told["used_bytes"] - told["freed_bytes"]) / 1e9 / ranks
    planned = engine_residue_gb(context.settings)
    figures |= {"kept_gb": kept, "planned_kept_gb": planned}
    words = f"{told['freed_bytes'] / 1e9:.1f} GB freed, {kept:.1f} GB stay on each GPU, planned {planned:.1f}; {times}"
    if kept > _MOST_KEPT * planned:
        raise CheckFailed(f"{words}; at most {_MOST_KEPT * planned:.1f} may stay", figures)
    return Finding(words, figures)


def decode(context: Context) -> Finding:
    """Tokens a second against the plan's share of memory bandwidth, for the thin model."""
    told, model = context.found["engine"], context.thin_config
    figures = {"decode_tokens_per_s": told["decode_tokens_per_s"], "requests": told["requests"]}
    words = f"{told['decode_tokens_per_s']:.0f} tokens/s with {told['requests']} requests"
    if context.device == "cpu":
        return Finding(f"{words}; the plan has no figure for CPUs", figures)
    ranks = context.settings.rollout.tensor_parallel_size
    read = 2 * model.num_parameters + told["requests"] * 160 * kv_bytes_per_token(model, "bf16")
    planned = told["requests"] * PEAK_BYTES_PER_S * ranks / read * DECODE_SHARE
    words += f"; the plan's share of bandwidth would be {planned:.0f} for the thin model"
    figures["planned_tokens_per_s"] = planned
    if told["decode_tokens_per_s"] < _LEAST_DECODING * planned:
        raise CheckFailed(f"{words}, and less than {_LEAST_DECODING:.0%} of it means a fault", figures)
    return Finding(words, figures)


CHECKS = [
    Check(
        "engine",
        start,
        "the report holds the engine's own output; ninja, nvcc and CUDA_HOME must be right (`toolkit`)",
        deadline_s=_START_S + 150.0,
        after=("thin model",),
    ),
    Check(
        "greedy tokens",
        greedy,
        "rollout.model.precision must equal actor.model.precision; otherwise try rollout.sglang.attention_backend=flashinfer",
        after=("engine", "one rank"),
    ),
    Check(
        "sleep and wake",
        sleep,
        "take PYTORCH_ALLOC_CONF out of the environment; disaggregated placement does without (docs/multi_node.md)",
        after=("engine",),
    ),
    Check(
        "decoding speed",
        decode,
        "does another process use the GPU or its host cores? rollout.sglang.server_args must leave CUDA graphs on",
        after=("engine",),
    ),
]
