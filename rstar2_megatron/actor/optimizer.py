"""DDP, the distributed optimizer and the learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from rstar2_megatron.actor.host_optimizer import move_to_host, threads_of_this_rank
from rstar2_megatron.settings.schema import LrSchedSettings, OptimSettings


def learning_rate(step: int, optim: OptimSettings, schedule: LrSchedSettings, max_steps: int, start: int = 0) -> float:
    """Rate of optimizer step `step`, counted from 0 over the optimizer's life.

    The warm-up is linear and reaches the full rate on step `lr_warmup_iters - 1`. No step has rate 0, unlike the first step
    of Megatron-LM and verl. Then the rate is constant, or a cosine that reaches min_lr `lr_decay_iters` steps (null:
    max_steps) after `start`. `start` is the step at which this run took over the optimizer of another run.
    """
    if step < schedule.lr_warmup_iters:
        return optim.lr * (step + 1) / schedule.lr_warmup_iters
    if schedule.lr_decay_style == "constant":
        return optim.lr
    first, last = max(start, schedule.lr_warmup_iters), start + (schedule.lr_decay_iters or max_steps)
    progress = min(1.0, (step - first) / max(1, last - first))
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def wrap_ddp(config: TransformerConfig, chunks: list[Any], optim: OptimSettings) -> list[Any]:
    """Wrap the model chunks in DDP and give the pipeline schedules its synchronisation functions."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optim.use_distributed_optimizer,
        overlap_grad_reduce=optim.overlap_grad_reduce or optim.overlap_param_gather,
        overlap_param_gather=optim.overlap_param_gather,
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    if ddp.overlap_grad_reduce:
        config.no_sync_func = wrapped[0].no_sync
        if len(wrapped) > 1:
            config.no_sync_func = [chunk.no_sync for chunk in wrapped]  # type: ignore[assignment]
            config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]  # type: ignore[assignment]
    # The loss of every micro-batch is already divided by the global token count, so gradients are not scaled.
    config.finalize_model_grads_func = _finalize_without_scaling  # type: ignore[assignment]
    return wrapped


def _finalize_without_scaling(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def build_optimizer(chunks: list[Any], optim: OptimSettings, precision: str) -> Any:
    """AdamW for the wrapped chunks, with state sharded over data-parallel ranks and fp32 masters for bf16; collective.

    With `optim.optimizer_cpu_offload` master weights and moments are in host memory, and the CPU updates them.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_eps=optim.adam_eps,
        clip_grad=optim.clip_grad,
        bf16=precision == "bf16",
        params_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        use_distributed_optimizer=optim.use_distributed_optimizer,
        overlap_param_gather=optim.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    if optim.optimizer_cpu_offload:
        threads = threads_of_this_rank() if torch.cuda.is_available() else None
        move_to_host(optimizer, threads=threads)
    return optimizer


def optimizer_step(optimizer: Any, lr: float, optim: OptimSettings) -> tuple[bool, float]:
    """Clip gradients and step. Returns (stepped, gradient norm before clipping); a norm that is not finite skips the step.

    Biases and norm weights have no weight decay, as in Megatron.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
        # A loaded checkpoint has put the values of its own run here.
        group["betas"], group["eps"] = (optim.adam_beta1, optim.adam_beta2), optim.adam_eps
        group.setdefault("bias_correction", True)  # TransformerEngine's Adam asks for it; torch's has it always and no key
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    if norm > optim.clip_grad:
        scale = optim.clip_grad / (norm + 1e-6)
        for part in optimizer.chained_optimizers:  # one for dense weights, one for experts under EP
            for parameter in part.get_parameters():
                # `decoupled_grad` with the optimizer on the host, because `.grad` must be on the parameter's device
                gradient = getattr(parameter, "decoupled_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    gradient.mul_(scale)
    optimizer.step_with_ready_grads()
    return True, norm
