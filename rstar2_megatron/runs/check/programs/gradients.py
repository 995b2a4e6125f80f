"""Programs that compare gradients: of packed batches, parallel layouts and layer implementations, tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rstar2_megatron.runs.check.case import Batch, started_actor
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.settings.schema import Settings


def gradients(job: Job, case: Settings, batch: Batch, keep: str = "", compare: str = "") -> dict[str, Any]:
    """Log-probs and gradients of one training step; the gradients go to the file `keep`, or against those in `compare`.

    Gradients leave as weights do, under Hugging Face names: each one is put in its parameter's place first.
    """
    import torch  # here: the driver reads this file and does no torch work
    from safetensors.torch import load_file, save_file

    with started_actor(job, case) as actor:
        logprobs = actor.compute_logprobs(batch)
        metrics = actor.train_step(batch)
        with torch.no_grad():
            for chunk in actor.policy.chunks:
                for parameter in chunk.parameters():
                    parameter.data.copy_(parameter.main_grad)
        named = {name: tensor.detach().cpu().clone() for name, tensor in actor.iter_hf_weights() if job.rank == 0}
    result: dict[str, Any] = {
        "logprobs": [[float(value) for value in row] for row in logprobs],
        "loss": metrics["actor/policy_loss"],
        "grad_norm": metrics["actor/grad_norm"],
    }
    if job.rank == 0 and keep:
        save_file(named, keep)
    if job.rank == 0 and compare:
        result["worst"], result["error"] = largest_error(named, load_file(compare), job.device)
    return result


def largest_error(ours: dict[str, Any], theirs: dict[str, Any], device: str = "cpu") -> tuple[str, float]:
    """(name, relative error) of the tensor that differs most. A tensor whose gradient is nearly nothing counts little.

    Computed on `device`, a tensor at a time: of a thin model as wide as a 32B one core would take minutes.
    """

    def norm(tensor: Any) -> float:
        return float(tensor.norm())

    def there(tensor: Any) -> Any:
        return tensor.to(device).float()

    missing = sorted(ours.keys() ^ theirs.keys())
    if missing:
        return f"{missing[0]} (only on one side)", float("inf")
    norms = {name: norm(there(tensor)) for name, tensor in theirs.items()}
    total = sum(each**2 for each in norms.values())
    count = sum(t.numel() for t in theirs.values())
    worst = ("", 0.0)
    for name, right in theirs.items():
        floor = 0.05 * (total * right.numel() / count) ** 0.5
        error = norm(there(ours[name]) - there(right)) / (norms[name] + floor)
        if math.isnan(error):  # a NaN is the worst of all
            return name, error
        if error > worst[1]:
            worst = (name, error)
    return worst


def reference_path(scratch: Path) -> str:
    """The file of the gradients of one rank with a packed batch."""
    return str(scratch / "gradients.safetensors")
