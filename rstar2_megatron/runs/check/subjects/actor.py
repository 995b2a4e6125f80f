"""Checks of the actor's state: the optimizer's step, offload, checkpoint; and how fast it trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from rstar2_megatron.runs.check.case import longest_sequence, make_batch, make_case, random_batch
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.result import Check, CheckFailed, Finding
from rstar2_megatron.runs.check.subjects.network import AFTER, BUG
from rstar2_megatron.settings.planning.advice import changed
from rstar2_megatron.settings.planning.estimates import train_share

_PROGRAMS = "rstar2_megatron.runs.check.programs.actor_state"
_OFFLOAD: dict[str, Any] = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}
_STAY: dict[str, Any] = dict.fromkeys(_OFFLOAD, False)
_VISIBLE_LR = 1e-2  # a first step of it is many times the spacing of bf16 numbers at the weights' size
_LEAST_FREED = 0.95
_MAY_STAY_BYTES = 5e8  # workspaces and tables, whatever the model's size; the plan counts them with the CUDA context


def optimizer(*, on_host: bool) -> Callable[[Context], Finding]:
    def run(context: Context) -> Finding:
        optim = {
            "lr": _VISIBLE_LR,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "clip_grad": 1e9,
            "use_distributed_optimizer": True,
            "overlap_param_gather": False,
            "overlap_grad_reduce": False,
            "optimizer_cpu_offload": on_host,
        }
        case = make_case(context, optim=optim, **_STAY)
        figures = context.nodes.one(f"{_PROGRAMS}:optimizer_error", 170.0, case=case, batch=make_batch(context))
        allowed = 1e-3 if context.settings.actor.model.precision == "fp32" else 0.05
        words = f"a step is {figures['error']:.1e} from AdamW's formula, allowed {allowed:.0e}; {figures['seconds']:.2f} s"
        if figures["skipped"] or not figures["error"] <= allowed:
            raise CheckFailed(words + ("; the step was skipped" if figures["skipped"] else ""), figures)
        return Finding(words, figures)

    return run


def offload(context: Context) -> Finding:
    case = make_case(context, optim={"use_distributed_optimizer": True, "optimizer_cpu_offload": False}, **_OFFLOAD)
    figures = context.nodes.one(f"{_PROGRAMS}:offload_and_reload", 170.0, case=case, batch=make_batch(context))
    before, away = figures["bytes_before"], figures["bytes_away"]
    freed = 1 - away / max(before, 1)
    words = (
        f"{freed:.1%} of {before / 1e9:.3g} GB freed in {figures['offload_seconds']:.2f} s, back in "
        f"{figures['reload_seconds']:.2f} s"
    )
    if freed < _LEAST_FREED and away > (_MAY_STAY_BYTES if context.device == "cuda" else 0):
        raise CheckFailed(f"{words}; at least {_LEAST_FREED:.0%} must go", figures)
    if not figures["same_weights"] or figures["bytes_back"] < 0.9 * before:
        raise CheckFailed(f"{words}, but the weights did not come back as they went", figures)
    return Finding(words, figures)


def checkpoint(context: Context) -> Finding:
    case = make_case(
        context, optim={"use_distributed_optimizer": True, "optimizer_cpu_offload": False, "lr": 1e-3, "min_lr": 0.0}, **_STAY
    )
    directory = context.scratch / "checkpoint"
    arguments: dict[str, Any] = {"case": case, "batch": make_batch(context), "directory": str(directory)}
    saved = context.nodes.one(f"{_PROGRAMS}:save_checkpoint", 170.0, **arguments)
    loaded = context.nodes.one(f"{_PROGRAMS}:load_checkpoint", 110.0, **arguments)
    shutil.rmtree(directory, ignore_errors=True)
    figures = {
        **{k: v for k, v in saved.items() if k != "weights"},
        "load_seconds": loaded["seconds"],
        "loaded_grad_norm": loaded["grad_norm"],
    }
    words = (
        f"{saved['bytes'] / 1e9:.3g} GB in {saved['seconds']:.1f} s, loaded in {loaded['seconds']:.1f} s; above what was held: "
        f"device {saved['device_peak_bytes'] / 1e9:.3g} GB, host {saved['host_peak_bytes'] / 1e9:.3g} GB "
        f"(state {saved['state_bytes'] / 1e9:.3g})"
    )
    relative = abs(saved["grad_norm"] - loaded["grad_norm"]) / max(saved["grad_norm"], 1e-12)
    same = sum(saved["weights"][name] == value for name, value in loaded["weights"].items())
    exact = context.device == "cpu"  # kernels of a GPU add in an order of their own
    if relative > 0.01 or (exact and same < len(saved["weights"])):
        raise CheckFailed(
            f"{words}; but the next step's gradient norm is {loaded['grad_norm']:.6f} after loading and was "
            f"{saved['grad_norm']:.6f}, {len(saved['weights']) - same} weights differ after it",
            figures,
        )
    return Finding(words, figures)


def speed(context: Context) -> Finding:
    """Full micro-batches of the YAML's length through the thin model on one rank."""
    settings, gpu = context.settings, context.device == "cuda"
    tokens = settings.runner.max_tokens_per_mbs if gpu else 16 * longest_sequence(context)
    length = min(settings.runner.seq_length // 2, tokens) if gpu else longest_sequence(context)
    count = max(1, tokens // length) * (2 if gpu else 1)
    case = changed(make_case(context, max_tokens=tokens, **_STAY), {"runner.seq_length": length})
    batch = random_batch(context.thin_config, count, length, length)
    figures = context.nodes.one(f"{_PROGRAMS}:training_speed", 170.0, case=case, batch=batch, steps=4 if gpu else 2)
    words = f"{figures['tokens_per_s']:.0f} tokens/s, {figures['tflops']:.3g} TFLOP/s a rank with {length} tokens a sequence"
    if not gpu:
        return Finding(f"{words}; the plan has no figure for CPUs", figures)
    planned = train_share(context.thin_config)
    words += f", MFU {figures['mfu']:.1%}, planned {planned:.0%}; peak {figures['peak_bytes'] / 1e9:.1f} GB"
    if not figures["mfu"] >= planned / 4:
        raise CheckFailed(words, {**figures, "planned_mfu": planned})
    return Finding(words, {**figures, "planned_mfu": planned})


CHECKS = [
    Check("optimizer step", optimizer(on_host=False), BUG, deadline_s=180.0, after=AFTER),
    Check("optimizer on the host", optimizer(on_host=True), f"actor.optim.optimizer_cpu_offload=False avoids it; {BUG}",
          deadline_s=180.0, after=AFTER),
    Check("offload and reload", offload, "something else holds the memory: take PYTORCH_ALLOC_CONF out of the environment",
          deadline_s=180.0, after=AFTER),
    Check("checkpoint", checkpoint, "is the disk full or failing? runner.output_dir on another file system",
          deadline_s=300.0, after=AFTER),
    Check("training speed", speed, "nvidia-smi -q -d CLOCK,POWER: is the GPU throttled? without TransformerEngine it is slower",
          deadline_s=180.0, after=AFTER),
]  # fmt: skip
