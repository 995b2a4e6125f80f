"""The simulator that compares policies: the engine model obeys its own memory, and everything ends under any load."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rollout.engine_model import EngineModel, Request
from benchmarks.rollout.scheduler import floor_s, gpu_cluster
from benchmarks.rollout.simulator import Cluster, Simulator, make_budgets
from benchmarks.rollout.traces import STAGE_8K, Shape, Trace, Turn, recorded, synthetic
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.rollout_log import rollout_rows, trace
from rstar2_megatron.rollout.scheduling.adaptive_budget import POLICIES
from rstar2_megatron.settings.planning.estimates import EngineSpeed
from rstar2_megatron.trajectory import FinishReason, Group, Problem, ToolCall, ToolOutcome, Trajectory

SPEED = EngineSpeed(0.01, 1e-4, 1e-7, 0.01, 1e-5)


def test_a_lone_request_takes_the_time_the_speeds_say() -> None:
    model = EngineModel(SPEED, 10_000, 8)
    model.submit(Request(1, 0, 100, 100, 50, 500))
    while not model.finished:
        model.advance(1e9)
    steps = sum(0.01 + 1e-4 + 1e-7 * (100 + i) for i in range(50))
    assert model.now == pytest.approx(0.01 + 100 * 1e-5 + steps, rel=1e-6)
    assert model.counters.busy_s == pytest.approx(model.now) and model.counters.decoded_tokens == 50


def test_the_next_turn_finds_its_prefix() -> None:
    model = EngineModel(SPEED, 10_000, 8)
    for context, generate in ((100, 50), (170, 30)):  # 20 tokens of a tool in between
        model.submit(Request(1, 0, 100, context, generate, 500))
        while not model.finished:
            model.advance(1e9)
        model.finished.clear()
    assert model.counters.cached_tokens == 150 and model.counters.prefill_tokens == 120
    assert model.counters.recomputed_tokens == 0


@given(seed=st.integers(0, 10_000), capacity=st.integers(700, 3000))
def test_the_cache_is_never_overfull_and_every_request_ends(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    model = EngineModel(SPEED, capacity, 32)
    wanted = 60
    for key in range(wanted):
        group = key // 4
        prompt = 20 + group
        model.submit(Request(group << 20 | key, group, prompt, prompt, rng.randint(1, 500), 500))
    ended = 0
    for _ in range(100_000):
        model.advance(model.now + 1.0)
        assert 0 <= model.free_tokens <= capacity
        ended += len(model.finished)
        model.finished.clear()
        if ended == wanted:
            break
    assert ended == wanted and model.idle and model.used_tokens() == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("kv_tokens", "tool_s"), [(20_000, 0.2), (60_000, 0.2), (20_000, 10.0)])
def test_every_policy_finishes_a_phase(policy: str, kv_tokens: int, tool_s: float) -> None:
    shape = Shape(8, 8, 2000, 500, 0.8, tool_median_s=tool_s)
    traces = synthetic(shape, seed=3)
    cluster = Cluster(2, SPEED, kv_tokens, 64)
    result = Simulator(traces, cluster, policy, slice_size=4).run()
    assert 0 <= result.idle_share < 1 and 0 < result.prefix_hit_rate < 1
    assert result.makespan_s >= result.p99_s >= result.p50_s > 0
    if policy == "kv_reserve" and tool_s < 1:  # what surely fits is computed once, unless it lies long in the cache
        assert result.recomputed_tokens == result.evictions == 0


def test_the_paper_s_stage_in_small() -> None:
    """A quarter of the 14B stage, lengths known from the step before: ours beats a static share and the paper's rule."""
    shape = replace(STAGE_8K, problems=32)
    cluster = gpu_cluster("14b", 2048)
    traces = synthetic(shape, 0)
    static, reserve = (Simulator(traces, cluster, policy, 8).run() for policy in ("static", "kv_reserve"))
    budgets = make_budgets(cluster, "kv_adaptive")
    Simulator(synthetic(shape, 9), cluster, "kv_adaptive", 8, budgets).run()
    ours = Simulator(traces, cluster, "kv_adaptive", 8, budgets).run()
    assert ours.makespan_s < static.makespan_s < reserve.makespan_s
    assert ours.idle_share < static.idle_share


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("problems", "group_size"), [(1, 1), (4, 8), (16, 16)])
def test_no_policy_is_faster_than_the_floor(policy: str, problems: int, group_size: int) -> None:
    """Of one trajectory alone the floor is all but its prefills' fixed costs; of many it is what their work takes."""
    traces = synthetic(Shape(problems, group_size, 2000, 500, 0.8), seed=1)
    cluster = Cluster(2, SPEED, 30_000, 64)
    makespan = Simulator(traces, cluster, policy, slice_size=4).run().makespan_s
    floor = floor_s(traces, cluster)
    assert floor < makespan
    if problems == 1:
        fixed = SPEED.prefill_base_s * len(traces[0].turns) + SPEED.prefill_per_token_s * traces[0].prompt_tokens
        assert makespan == pytest.approx(floor + fixed, abs=0.1)


def test_waits_are_told_by_the_length_of_the_prompt() -> None:
    """Four trajectories one after another on an engine that runs one at a time, in the order of their prompts."""
    traces = [Trace(group, 0, 10 * (group + 1), 100, (Turn(50, 0, 0.0),)) for group in range(4)]
    waits = Simulator(traces, Cluster(1, SPEED, 1000, 1), "static", slice_size=1).run().wait_s_by_prompt
    assert waits == sorted(waits) and waits[0] < 0.1
    assert waits[3] - waits[2] == pytest.approx(50 * 0.01, rel=0.1)


def test_a_recorded_turn_has_the_seconds_of_its_own_calls() -> None:
    """Two calls, none (an environment answers), one, and one whose response found no room."""
    calls = [ToolCall("python", {}, ToolOutcome.OK, "", seconds) for seconds in (0.5, 0.75, 0.25, 2.0)]
    mask = [1, 1, 0, 1, 0, 0, 1, 0, 1]
    texts, counts = ["two calls", "a guess", "a call", "a call"], [2, 0, 1, 1]
    t = Trajectory("q", 0, [1], [5] * 9, mask, assistant_texts=texts, tool_calls=calls, calls_per_turn=counts)
    assert trace(t) == [(2, 1, 0.75), (1, 2, 0.0), (1, 1, 0.25), (1, 0, 0.0)]


def test_recorded_rollouts_come_back_as_traces(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    call = ToolCall("python", {}, ToolOutcome.OK, "", seconds=0.25)
    done = Trajectory("q", 3, [1, 2], [5] * 6, [1, 1, 0, 0, 0, 1], assistant_texts=["call", "so"], tool_calls=[call])
    done.calls_per_turn, done.finish_reason = [1], FinishReason.ANSWERED
    lost = Trajectory("q", 4, [1, 2], finish_reason=FinishReason.INFRASTRUCTURE)
    JsonlFile(path).append(*rollout_rows(7, [Group(Problem("q", [], []), [done, lost])]))
    (trace,) = recorded(path, max_response_tokens=100)
    assert (trace.group, trace.index, trace.prompt_tokens) == (0, 0, 2)
    assert trace.turns == (Turn(2, 3, 0.25), Turn(1, 0, 0.0))
    path.write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(ValueError, match="save_rollouts"):
        recorded(path, 100)
