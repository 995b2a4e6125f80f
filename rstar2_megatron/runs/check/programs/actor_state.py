"""Programs of one rank that put the actor's state through its paces: optimizer, offload, checkpoint, speed."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from rstar2_megatron.runs.check.case import Batch, started_actor
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.settings.schema import Settings


def optimizer_error(job: Job, case: Settings, batch: Batch) -> dict[str, float]:
    """Relative error of the first AdamW step against its formula, over all weights; seconds of the step."""
    optim = case.actor.optim
    wrong = moved = 0.0
    with started_actor(job, case) as actor:
        parameters = [p for chunk in actor.policy.chunks for p in chunk.parameters()]
        before = [p.detach().cpu().clone() for p in parameters]
        started = time.perf_counter()
        metrics = actor.train_step(batch)
        seconds = time.perf_counter() - started
        for parameter, old in zip(parameters, before, strict=True):
            start_value = old.to(parameter.device).float()
            gradient = parameter.main_grad.float()  # type: ignore[attr-defined]
            decay = optim.weight_decay if parameter.ndim > 1 else 0.0
            step = gradient / (gradient.abs() + optim.adam_eps)  # both moments corrected for the first step
            move = (step + decay * start_value).mul_(-optim.lr)
            wrong += float((parameter.detach().float() - start_value).sub_(move).norm()) ** 2
            moved += float(move.norm()) ** 2
    assert torch.isfinite(torch.tensor(wrong))
    return {
        "error": (wrong / max(moved, 1e-30)) ** 0.5,
        "moved": moved**0.5,
        "seconds": seconds,
        "skipped": metrics["actor/skipped_steps"],
    }


def device_bytes(actor: Any, device: str) -> int:
    """Bytes that the actor holds on its device; on a CPU those of its weight and gradient buffers."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    storages = {}
    for chunk in actor.policy.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for tensor in (buffer.param_data, buffer.grad_data):
                if tensor is not None:
                    storages[id(tensor)] = tensor.untyped_storage().size()
    return sum(storages.values())


def offload_and_reload(job: Job, case: Settings, batch: Batch) -> dict[str, Any]:
    """Bytes before, away and back again; whether the weights came back bit by bit, and whether training still works."""
    with started_actor(job, case) as actor:
        actor.train_step(batch)
        weights, before = actor.weights_checksum(), device_bytes(actor, job.device)
        started = time.perf_counter()
        actor.offload()
        away, middle = device_bytes(actor, job.device), time.perf_counter()
        actor.reload()
        ended, back = time.perf_counter(), device_bytes(actor, job.device)
        return {
            "bytes_before": before,
            "bytes_away": away,
            "bytes_back": back,
            "offload_seconds": middle - started,
            "reload_seconds": ended - middle,
            "same_weights": actor.weights_checksum() == weights,
            "grad_norm": actor.train_step(batch)["actor/grad_norm"],
        }


def save_checkpoint(job: Job, case: Settings, batch: Batch, directory: str) -> dict[str, Any]:
    """A step, a checkpoint, another step; peaks of device and host memory while it is written."""
    with started_actor(job, case) as actor:
        actor.train_step(batch)
        if job.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        device_before = torch.cuda.memory_allocated() if job.device == "cuda" else 0
        host_before = psutil.Process().memory_info().rss
        _reset_peak()
        started = time.perf_counter()
        actor.save_checkpoint(directory)
        return {
            "seconds": time.perf_counter() - started,
            "bytes": sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file()),
            "device_peak_bytes": torch.cuda.max_memory_allocated() - device_before if job.device == "cuda" else 0,
            "host_peak_bytes": max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host_before),
            "state_bytes": 12 * sum(p.numel() for chunk in actor.policy.chunks for p in chunk.parameters()),
            "grad_norm": actor.train_step(batch)["actor/grad_norm"],
            "weights": actor.weights_checksum(),
        }


def load_checkpoint(job: Job, case: Settings, batch: Batch, directory: str) -> dict[str, Any]:
    """Load into a fresh actor and take the step that followed."""
    with started_actor(job, case) as actor:
        started = time.perf_counter()
        actor.load_checkpoint(directory)
        seconds = time.perf_counter() - started
        norm = actor.train_step(batch)["actor/grad_norm"]
        return {"seconds": seconds, "grad_norm": norm, "weights": actor.weights_checksum()}


def _reset_peak() -> None:
    """Let the kernel count this process's peak of memory from here on."""
    with contextlib.suppress(OSError):  # not allowed in some containers: the peak is then that of the whole life
        Path("/proc/self/clear_refs").write_text("5")


def training_speed(job: Job, case: Settings, batch: Batch, steps: int) -> dict[str, float]:
    """Tokens a second and MFU of the fastest of some steps, peak memory."""
    with started_actor(job, case) as actor:
        best = min((actor.train_step(batch) for _ in range(steps)), key=lambda row: row["actor/seconds"])
    return {
        "tokens_per_s": best["actor/total_tokens"] / best["actor/seconds"],
        "tflops": best["actor/tflops_per_rank"],
        "mfu": best.get("actor/mfu", 0.0),
        "peak_bytes": float(torch.cuda.max_memory_allocated()) if job.device == "cuda" else 0.0,
    }


def score(job: Job, case: Settings, batch: Batch) -> list[list[float]]:
    """Log-prob of every token."""
    with started_actor(job, case) as actor:
        return [[float(value) for value in row] for row in actor.compute_logprobs(batch)]
