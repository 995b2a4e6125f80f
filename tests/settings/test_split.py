"""What the plan expects of training while rolling out, against the simulated steps, and when it says nothing."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from benchmarks.rollout.asynchronous import ALONE, NODE, SHARED, Actor, cluster_of
from benchmarks.rollout.traces import STAGE_8K
from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.placement import Slots
from rstar2_megatron.settings.planning.estimates import RECOMPUTE_COST, Engines, splits
from rstar2_megatron.settings.planning.table import RunPlan
from tests.settings.loaded import H100, plan_of

SIMULATED = Path(__file__).parents[2] / "benchmarks" / "results" / "asynchronous.json"
TP = 2  # of the simulated engines on one node
APART = [
    "algorithm.max_staleness=1",
    "cluster.component_placement={actor: 0-3, rollout: 4-7, reward: 0}",
    *(f"actor.offload_{part}=False" for part in ("weight", "grad", "optimizer")),
]


def expected(plan: RunPlan) -> dict[str, str]:
    return {label: value for section, label, value in plan.rows if section == "expected"}


def test_the_closed_forms_are_near_every_simulated_step_with_quick_tools() -> None:
    """Within 18%. With slow tools they are no estimate, nor is a split without staleness, which nobody would use."""
    seen = 0
    for row in json.loads(SIMULATED.read_text()):
        found = re.fullmatch(r"(7b|14b), (\d+) x (\d+), 8K", row["scenario"])
        together = row["placement"] == f"collocated on {NODE}"
        if found is None or "step_s" not in row or not (together or row["max_staleness"]):
            continue
        name, problems, size = found.groups()
        model = known_model(f"Qwen2.5-{name.upper()}")
        assert model is not None
        gpus = int(row["placement"].split()[-1])
        cluster = cluster_of(name, model, gpus, TP, SHARED if together else ALONE)
        work = (int(problems) * int(size), STAGE_8K.max_response_tokens)
        engines = Engines(cluster.engines, cluster.speed, cluster.kv_tokens, cluster.max_requests, *work)
        actor = Actor(model, NODE if together else NODE - gpus)
        if together:
            step = engines.phase_s() + row["train_s"] + row["handover_and_sync_s"]
        else:
            step = max(row["train_s"], engines.batch_s(row["max_staleness"])) + actor.sync_s
        assert step == pytest.approx(row["step_s"], rel=0.18), row
        seen += 1
    assert seen >= 20


def test_the_users_batch_is_not_better_on_a_split() -> None:
    text = expected(plan_of("rstar2-qwen2.5-7b-megatron"))["max_staleness=1"]
    assert text.startswith("synchronous on all 8 GPUs ")
    assert "; no split is better: with actor 0-3, rollout 4-7 " in text and "times the trajectories/s" in text


def test_a_placement_is_compared_with_the_best_split() -> None:
    text = expected(plan_of("rstar2-qwen2.5-7b-megatron", *APART))["max_staleness=1"]
    assert "; this placement " in text
    shared = expected(plan_of("rstar2-qwen2.5-7b-megatron", APART[0]))["max_staleness=1"]
    assert "this placement" not in shared


def test_a_split_that_pays_is_recommended_with_its_seconds() -> None:
    """A small batch, whose tail is most of the synchronous rollout."""
    plan = plan_of("rstar2-qwen2.5-1.5b-megatron", "data.rollout_batch_size=16")
    text = expected(plan)["max_staleness=1"]
    found = re.fullmatch(
        r"synchronous on all 8 GPUs (\d+) s a step; best with actor 0(?:-\d)?, rollout \d(?:-7)? (\d+) s, ([\d.]+) times "
        "the trajectories/s",
        text,
    )
    assert found is not None, text
    assert float(found[3]) == pytest.approx(int(found[1]) / int(found[2]), rel=0.05) and float(found[3]) > 1.02


def test_splits_keep_the_layouts_and_count_what_recompute_costs() -> None:
    settings = load("rstar2-qwen2.5-14b-megatron").settings
    model = known_model(settings.rollout.model.model_path)
    assert model is not None
    (only,) = splits(settings, H100, model, 1)  # the actor's TP 4
    assert only.actor == 4 and only.recompute and str(only).endswith("recompute_granularity=full")
    settings.rollout.gpu_memory_utilization = 0.1  # the split has its own
    assert list(splits(settings, H100, model, 1)) == [only]
    larger = Slots(8, 141.0)
    without = next(split for split in splits(settings, larger, model, 1) if split.actor == 4)
    assert not without.recompute
    settings.rollout.max_running_requests = 4096  # so that training is what takes longest
    settings.data.rollout_batch_size, settings.algorithm.sampling_params.max_new_tokens = 512, 64
    fast, slow = (next(iter(splits(settings, slots, model, 1))).step_s for slots in (larger, H100))
    assert slow == pytest.approx(RECOMPUTE_COST * fast, rel=0.01)


def test_nothing_is_said_on_cpu_slots_and_where_nothing_fits() -> None:
    assert not expected(plan_of("rstar2-tiny-cpu", slots=Slots(2, None)))
    small = plan_of("rstar2-qwen2.5-14b-megatron", slots=Slots(8, 24.0))
    assert small.problems and "max_staleness=1" not in expected(small)


def test_the_plan_stays_fast() -> None:
    begun = time.process_time()
    plan_of("rstar2-qwen2.5-7b-megatron", *APART, slots=Slots(64, 80.0))
    assert time.process_time() - begun < 1.0
