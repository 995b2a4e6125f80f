"""The plan of a YAML in trajectories, tokens and gigabytes, before anything starts. Pure arithmetic.

The other modules of `planning/` have the formulas.
"""

from __future__ import annotations

from pathlib import Path

from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.placement import Slots, collocated, component_slots, slots_of, visible_gpus, visible_host_gb
from rstar2_megatron.settings.planning.advice import Change, as_words, fewest_changes
from rstar2_megatron.settings.planning.batch import plan_batch, plan_placement, plan_supervised
from rstar2_megatron.settings.planning.cpu_memory import plan_cpu_memory
from rstar2_megatron.settings.planning.disk import plan_disk
from rstar2_megatron.settings.planning.estimates import plan_split, plan_times, plan_transport
from rstar2_megatron.settings.planning.rollout import plan_rollout, plan_sharing
from rstar2_megatron.settings.planning.table import RunPlan, parameters_text
from rstar2_megatron.settings.planning.training import plan_training
from rstar2_megatron.settings.schema import Settings


def model_of(settings: Settings) -> tuple[ModelConfig | None, str]:
    """(shape, source of the shape); None when the directory is absent and its name is no known model.

    Raises ValueError for a config.json that the actor does not support.
    """
    path = settings.rollout.model.model_path
    if Path(path).is_dir():
        scores = settings.runner.task_type == "preference"
        return ModelConfig.from_directory(path, scores=scores), "config.json"
    return known_model(path), "by the directory's name"


def make_plan(settings: Settings, *, slots: Slots | None = None, with_remedy: bool = True) -> RunPlan:
    """The plan of a YAML. Without `slots` the machine's GPUs are counted; if there are none, `cluster.assumed_node` is taken.

    with_remedy: search what would fit, where training does not. Raises ValueError for an invalid placement or an unsupported
    model.
    """
    if slots is None:
        slots = slots_of(settings.cluster, visible_gpus(), visible_host_gb())
    plan = RunPlan(f"Plan of {settings.runner.experiment_name}")
    places = component_slots(settings.cluster, slots.count)
    model, source = model_of(settings)
    plan_placement(plan, settings, slots, places)
    world, engines = len(places["actor"]), len(places["rollout"])
    task = settings.runner.task_type
    if task in ("sft", "preference"):
        plan_supervised(plan, settings)
    else:
        plan_batch(plan, settings, world)
    if model is None:
        plan.notes.append(
            f"rollout.model.model_path={settings.rollout.model.model_path} is absent and of no known name: "
            "memory cannot be planned"
        )
        return plan
    plan.add("model", "parameters", f"{parameters_text(model.num_parameters)} ({source})")
    if task not in ("difficulty_filter", "search"):
        plan_training(plan, settings, slots, model, world, lambda: remedy(settings, slots) if with_remedy else "")
        if slots.is_cpu:
            plan_cpu_memory(plan, settings, model, world, engines, slots.host_gb)
    if task in ("sft", "preference"):
        return plan
    plan_disk(plan, settings, model)
    plan_rollout(plan, settings, slots, model, engines)
    if task == "reasoning":
        plan_transport(plan, settings, max(engines // settings.rollout.tensor_parallel_size, 1))
    if not slots.is_cpu and task == "reasoning":
        if collocated(settings.cluster, slots):
            plan_sharing(plan, settings, slots, model)
        plan_times(plan, settings, model, world)
        plan_split(plan, settings, slots, model, places)
    return plan


def what_fits(settings: Settings, slots: Slots) -> Change:
    """The fewest changes with which the plan on these GPUs fits; {} when none is found, or for a model of unknown shape."""
    model, _ = model_of(settings)
    places = component_slots(settings.cluster, slots.count)
    if model is None or slots.is_cpu:
        return {}
    actor, rollout = len(places["actor"]), len(places["rollout"])
    return fewest_changes(
        settings, model, actor, rollout, lambda changed: make_plan(changed, slots=slots, with_remedy=False).fits
    )


def remedy(settings: Settings, slots: Slots) -> str:
    """What to set so that the plan on these GPUs fits, in words."""
    change = what_fits(settings, slots)
    return f"set {as_words(change)}" if change else "no layout fits; use more GPUs, more host memory or a smaller model"
