"""Host memory of every process of a run on CPU slots.

The constants are proportional shares of memory (PSS) seen with SmolLM2-135M on two slots (benchmarks/NOTES.md). torch's CPU
layers keep more for the backward pass than `memory.py` counts for the fused ones of a GPU: padded copies for attention, the
parts of the gated MLP, and in bf16 the norms' fp32 inputs.
"""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.advice import RECOMPUTE, Change, as_words, changed, smaller_micro_batches
from rstar2_megatron.settings.planning.host_memory import save_bytes
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token
from rstar2_megatron.settings.planning.memory import GB, WIDTH, training_memory
from rstar2_megatron.settings.planning.table import RunPlan
from rstar2_megatron.settings.schema import Settings

ACTOR_PROCESS_GB, ENGINE_PROCESSES_GB, SERVICES_GB = 0.6, 1.0, 3.0
ACTIVATION_FACTOR = {"bf16": 2.0, "fp32": 1.3}
_DEFAULT_KV_TOKENS = 65536  # rollout/engine/arguments.py
_DENSE_GB = 1 << 30  # cpu/sglang_attention.py


def cpu_memory(settings: Settings, model: ModelConfig, world: int, engines: int) -> tuple[float, list[str]]:
    """GB of all processes, and in words those of an actor rank and of an engine with its worker.

    A rank's are its mean, in a step or while a checkpoint is saved. engines: slots of the rollout; they count in a run of
    reinforcement learning only.
    """
    memory = training_memory(settings, model, world, cpu=True)
    precision = settings.rollout.model.precision
    kv = (settings.rollout.max_total_tokens or _DEFAULT_KV_TOKENS) * kv_bytes_per_token(model, precision)
    weights = WIDTH[precision] * model.num_parameters
    extra = (ACTIVATION_FACTOR[settings.actor.model.precision] - 1) * memory.activations
    saving = save_bytes(settings.actor, model, world, ranks=world) / world / GB
    actor = ACTOR_PROCESS_GB + max(memory.total + extra, memory.static + saving)
    engine = ENGINE_PROCESSES_GB + (weights + kv + min(kv, _DENSE_GB)) / GB
    engines = engines if settings.runner.task_type == "reasoning" else 0
    parts = [f"{world} actor ranks of {actor:.1f}"]
    parts += [f"{engines} engines of {engine:.1f}"] if engines else []
    return actor * world + engine * engines + SERVICES_GB, parts


def plan_cpu_memory(plan: RunPlan, settings: Settings, model: ModelConfig, world: int, engines: int, host_gb: float) -> None:
    """A row with all processes; a problem with the smallest change that fits when the machine has less."""
    total, parts = cpu_memory(settings, model, world, engines)
    plan.add(
        "host",
        "GB of all processes",
        f"{total:.1f} of {host_gb:.1f} = {' + '.join(parts)} + driver, Ray, judge and rewards {SERVICES_GB:.1f}",
    )
    if total > host_gb:
        plan.problems.append(
            f"the run's processes need {total:.1f} GB ({', '.join(parts)}, others {SERVICES_GB:.1f}), the machine "
            f"has {host_gb:.1f}; {_remedy(settings, model, world, engines, host_gb)}"
        )


def _remedy(settings: Settings, model: ModelConfig, world: int, engines: int, host_gb: float) -> str:
    """The first that fits: smaller micro-batches, the smallest with recompute, these and a single engine."""
    changes: list[Change] = [{"runner.max_tokens_per_mbs": n} for n in smaller_micro_batches(settings)]
    if settings.actor.model.recompute_granularity != "full":
        changes.append((changes[-1] if changes else {}) | RECOMPUTE)

    def fits(change: Change, engines: int) -> bool:
        return cpu_memory(changed(settings, change), model, world, engines)[0] <= host_gb

    for change in changes:
        if fits(change, engines):
            return f"set {as_words(change)}"
    least = changes[-1] if changes else {}
    if engines > 1 and fits(least, 1):
        place = "place the rollout on one slot: cluster.component_placement={actor: all, rollout: 0, reward: 0}"
        return f"set {as_words(least)}, and {place}" if least else place
    return "take a smaller model or a machine with more memory"
