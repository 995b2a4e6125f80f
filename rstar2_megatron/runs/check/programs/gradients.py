"""Programs that compare gradients: of packed batches, parallel layouts and layer implementations, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rstar2_megatron.runs.check.case import Batch, Case, start
from rstar2_megatron.runs.check.process import Job


def gradients(job: Job, case: Case, batch: Batch, keep: str = "", compare: str = "") -> dict[str, Any]:
    """Log-probs and gradients of one training step; the gradients go to the file `keep`, or against those in `compare`.

    Gradients leave as weights do, under Hugging Face names: each one is put in its parameter's place first.
    """
    import torch  # here: the driver reads this file and does no torch work
    from safetensors.torch import load_file, save_file

    actor = start(job, case)
    logprobs = actor.compute_logprobs(batch)
    metrics = actor.train_step(batch)
    with torch.no_grad():
        for chunk in actor.policy.chunks:
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.main_grad)
    named = {name: tensor.detach().cpu().clone() for name, tensor in actor.iter_hf_weights() if job.rank == 0}
    actor.close()
    result: dict[str, Any] = {
        "logprobs": [[float(value) for value in row] for row in logprobs],
        "loss": metrics["actor/policy_loss"],
        "grad_norm": metrics["actor/grad_norm"],
    }
    if job.rank == 0 and keep:
        save_file(named, keep)
    if job.rank == 0 and compare:
        result["worst"], result["error"] = largest_error(named, load_file(compare))
    return result


def largest_error(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, float]:
    """(name, relative error) of the tensor that differs most. A tensor whose gradient is nearly nothing counts little."""
    missing = sorted(ours.keys() ^ theirs.keys())
    if missing:
        return f"{missing[0]} (only on one side)", float("inf")
    total = sum(float(t.double().square().sum()) for t in theirs.values())
    count = sum(t.numel() for t in theirs.values())
    worst = ("", 0.0)
    for name, right in theirs.items():
        floor = 0.05 * (total * right.numel() / count) ** 0.5
        error = float((ours[name].double() - right.double()).norm()) / (float(right.double().norm()) + floor)
        if not error <= worst[1]:  # a NaN is the worst of all
            worst = (name, error)
    return worst


def reference_path(scratch: Path) -> str:
    """The file of the gradients of one rank with a packed batch."""
    return str(scratch / "gradients.safetensors")
