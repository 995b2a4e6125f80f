"""Traces replayed on real engines: real decoding, real prefix cache, real tool calls, the production scheduler.

Each turn asks the engine for exactly the trace's tokens; the last ones are then overwritten with a tool call, so that
the agent loop parses it and the judge runs it. Every policy therefore gets the same work, as the simulator does.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from benchmarks.rollout.traces import Trace, Turn
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.records.rollout_log import trace as turns_of
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import GenerateResult
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget
from rstar2_megatron.rollout.scheduling.work_queue import Slice, WorkQueue
from rstar2_megatron.rollout.stats import combine
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.tools import STANDARD_IO
from rstar2_megatron.trajectory import Problem, Trajectory

CONTEXT_TOKENS = 2040
"""Longest prompt and response together of the engines."""

_current: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("trace")  # [trace, next turn, its tokens so far]


class TraceEngine:
    """The engine, but each turn is as long as the trace says and ends with a call of a tool, or with an answer."""

    def __init__(self, engine: EngineClient, template: ChatTemplate) -> None:
        self.engine = engine
        self.template = template
        # a trained model would make calls of its own
        opening = template.tokenizer.encode("<tool_call>", add_special_tokens=False)
        self.no_calls = {str(opening[0]): -100.0}

    async def generate(
        self, input_ids: Any, sampling: dict[str, Any], *, timeout_s: float, on_tokens: Any = None, owner: object = None
    ) -> GenerateResult:
        state = _current.get()
        trace, number, generated = state
        turn = trace.turns[number]
        last = number + 1 == len(trace.turns)
        program = "" if last else f"import time; time.sleep({turn.tool_seconds:.3f}); print('x' * {turn.tool_tokens})"
        text = call_text(program) if program else ""
        ending = self.template.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        count = max(turn.generated_tokens - generated, len(ending))
        result = await self.engine.generate(
            input_ids,
            {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True, "logit_bias": self.no_calls},
            timeout_s=timeout_s,
            on_tokens=on_tokens,
            owner=owner,
        )
        if result.finish_reason == "abort":
            state[2] += len(result.token_ids)
        else:
            state[1:] = [number + 1, 0]
            result.token_ids = np.array([*result.token_ids[: -len(ending)], *ending], np.int32)
            result.finish_reason = "stop"
        return result

    async def wait_until_ready(self) -> None:
        await self.engine.wait_until_ready()

    async def recover(self) -> None:
        await self.engine.recover()

    def abort(self, owner: object) -> None:
        self.engine.abort(owner)

    def abort_all(self) -> None:
        self.engine.abort_all()


def call_text(program: str) -> str:
    body = json.dumps({"name": STANDARD_IO, "arguments": {"code": program, "input": ""}})
    return f"<tool_call>{body}</tool_call>"


class TracedLoop(AgentLoop):
    """The agent loop, told which trace each trajectory follows."""

    states: dict[tuple[str, int], list[Any]]  # kept while a trajectory is parked

    async def run(self, problem: Problem, rollout_index: int, **keywords: Any) -> Trajectory:
        _current.set(self.states[problem.query_id, rollout_index])
        return await super().run(problem, rollout_index, **keywords)


async def replay(
    traces: Sequence[Trace],
    engines: Sequence[EngineClient],
    judge: JudgeClient,
    template: ChatTemplate,
    settings: AgentLoopSettings,
    *,
    policy: str,
    budgets: Sequence[KVBudget],
    slice_size: int,
) -> tuple[dict[str, Any], list[Trace]]:
    """One phase on all engines under `policy`: the simulator's columns, measured, and what the trajectories did.

    `budgets` has one for each engine; as in training, they may have learnt lengths in a phase before.
    The latter differ a little from `traces`: a call takes some tokens at least, the sandbox has its own time. Raises
    ValueError unless all groups are of one size.
    """
    groups = sorted({trace.group for trace in traces})
    size = len(traces) // len(groups)
    if {(t.group, t.index) for t in traces} != {(g, i) for g in groups for i in range(size)}:
        raise ValueError(f"{len(traces)} trajectories in {len(groups)} groups: a replay needs groups of one size, without gaps")
    problems = [Problem(str(group), [{"role": "user", "content": words(group, traces)}], ["0"]) for group in groups]
    phase = RolloutPhase(WorkQueue(policy, len(engines), slice_size), size)
    phase.add_problems(problems)
    changed = asyncio.Condition()
    finished: list[Trajectory] = []
    start = time.monotonic()

    async def work_for(number: int, room: int) -> list[Slice] | None:
        async with changed:
            while not phase.over:
                if slices := phase.take(number, room, time.monotonic()):
                    return slices
                await changed.wait()
            return None

    runners = []
    for number, engine in enumerate(engines):
        loop = TracedLoop(
            cast(EngineClient, TraceEngine(engine, template)),
            judge,
            template,
            settings,
            SamplingParams(max_new_tokens=traces[0].max_response_tokens),
            max_context_tokens=CONTEXT_TOKENS,
            timeout_s=600,
        )
        loop.states = {(str(t.group), t.index): [t, 0, 0] for t in traces}

        async def ended(work: Slice, trajectory: Trajectory, number: int = number) -> None:
            finished.append(trajectory)
            async with changed:
                phase.ended(number, work.group, trajectory, time.monotonic())
                changed.notify_all()

        async def next_work(room: int, number: int = number) -> list[Slice] | None:
            return await work_for(number, room)

        runner = TrajectoryRunner(loop, AdmissionQueue(budgets[number]), next_work, ended)
        engine.on_report = runner.observe
        runners.append(runner)
    await asyncio.gather(*(runner.run() for runner in runners))
    makespan = time.monotonic() - start
    stats = combine([runner.loop.stats.sums() for runner in runners], makespan)
    seconds = np.array([trajectory.seconds for trajectory in finished])
    figures = {
        "makespan_s": round(makespan, 2),
        "idle_share": round(stats["idle_share"], 4),
        "preemptions": int(stats["preemptions"]),
        "evictions": int(stats["retractions"]),
        "prefill_tokens": int(stats["prefill_tokens"]),
        "prefix_hit_rate": round(stats["prefix_hit_rate"], 4),
        "kv_use": round(stats["kv_use"], 3),
        "running_requests": round(stats["running_requests"], 1),
        "p50_s": round(float(np.quantile(seconds, 0.5)), 2),
        "p99_s": round(float(np.quantile(seconds, 0.99)), 2),
        "generated_tokens": int(stats["generated_tokens"]),
        "tool_calls": int(sum(value for name, value in stats.items() if name.startswith("tool_calls/"))),
        "spoiled": sum(not trajectory.usable for trajectory in finished),
    }
    return figures, _what_they_did(finished, traces[0].max_response_tokens)


def _what_they_did(finished: Sequence[Trajectory], max_response_tokens: int) -> list[Trace]:
    """As traces, with the tokens and the tools' seconds that were seen."""
    sizes: Counter[int] = Counter()
    done = []
    for trajectory in sorted((t for t in finished if t.usable), key=lambda t: t.rollout_index):
        group = int(trajectory.query_id)
        turns = tuple(Turn(*turn) for turn in turns_of(trajectory))
        done.append(Trace(group, sizes[group], len(trajectory.prompt_ids), max_response_tokens, turns))
        sizes[group] += 1
    return done


def words(group: int, traces: Sequence[Trace]) -> str:
    """A problem of about the trace's prompt length, its own for each group."""
    length = next(trace.prompt_tokens for trace in traces if trace.group == group)
    return " ".join(f"{(group * 7919 + i) % 1000}" for i in range(max(1, length // 4)))
