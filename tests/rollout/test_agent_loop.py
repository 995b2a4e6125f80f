"""Every ending of a trajectory, and groups of them, with an engine whose turns are written down.

The real engine and the real judge run in test_real_loop.py; here each ending must be provoked exactly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from benchmarks.rollout.group_runner import run_groups
from rstar2_megatron.judge.client.client import JudgeClient, JudgeUnavailable
from rstar2_megatron.judge.client.result import JudgeResult
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.rollout.agent_loop import AgentLoop, Preemption
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.protocol import (
    EngineError,
    EngineLost,
    EngineReport,
    GenerateResult,
    GenerationTimeout,
)
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.kv_budget import POLICIES, make_budget
from rstar2_megatron.rollout.scheduling.kv_reservation import KVBudget, KVReservation
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.tools import JUPYTER, STANDARD_IO
from rstar2_megatron.trajectory import FinishReason, Problem, ToolOutcome, Trajectory, VersionSpan

ANSWER = "so</reason><answer>\\boxed{4}</answer>"


def call(code: str = "print(4)", name: str = STANDARD_IO) -> str:
    body = json.dumps({"name": name, "arguments": {"code": code, "input": ""}})
    return f"run</reason><tool_call>{body}</tool_call>"


@dataclass
class WrittenEngine:
    """Gives the written turns in order; a turn may also be an exception, or (text, finish reason)."""

    tokenizer: Any
    turns: list[Any]
    seen: list[list[int]] = field(default_factory=list)
    recovered: int = 0
    recover_error: Exception | None = None
    delay_s: float = 0.0
    aborting: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[object] = field(default_factory=list)  # owners of requests
    change_over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.change_over.set()

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float, **about: Any
    ) -> GenerateResult:
        self.seen.append(list(input_ids))
        await asyncio.sleep(self.delay_s)
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if isinstance(turn, Exception):
            raise turn
        text, reason = turn if isinstance(turn, tuple) else (turn + "<|im_end|>", "stop")
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: sampling["max_new_tokens"]]
        if len(ids) == sampling["max_new_tokens"]:
            reason = "length"
        ids, logprobs = np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)
        return GenerateResult(ids, logprobs, reason, [(0, len(ids), 3)], len(input_ids), 0)

    async def abort(self, owner: object) -> None:
        self.aborted.append(owner)

    async def abort_all(self) -> None:
        self.aborting.set()

    async def settled(self) -> None:
        await self.change_over.wait()

    async def recover(self) -> None:
        self.recovered += 1
        if self.recover_error is not None:
            raise self.recover_error


class WrittenJudge:
    def __init__(self, *results: JudgeResult | Exception, delay_s: float = 0.0) -> None:
        self.results = list(results) or [JudgeResult(Outcome.OK, "4\n", "", 0, 0.01)]
        self.delay_s = delay_s
        self.codes: list[str] = []
        self.sessions: list[str | None] = []
        self.expected: list[str] = []
        self.closed: list[str] = []

    def expect_session(self, session: str) -> None:
        self.expected.append(session)

    async def close_session(self, session: str) -> None:
        self.closed.append(session)

    async def run(self, code: str, stdin: str = "", *, session: str | None = None) -> JudgeResult:
        self.codes.append(code)
        self.sessions.append(session)
        await asyncio.sleep(self.delay_s)
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


def make_loop(tokenizer, turns, judge=None, *, max_new_tokens=2000, timeout_s=20.0, **settings) -> AgentLoop:
    chosen = AgentLoopSettings(system_prompt=f"{STANDARD_IO} code input", user_prefix="", **settings)
    return AgentLoop(
        WrittenEngine(tokenizer, list(turns)),
        judge or WrittenJudge(),
        ChatTemplate(tokenizer, chosen),
        chosen,
        SamplingParams(max_new_tokens=max_new_tokens),
        max_context_tokens=8000,
        timeout_s=timeout_s,
    )


def written(loop: AgentLoop) -> WrittenEngine:
    assert isinstance(loop.engine, WrittenEngine)
    return loop.engine


PROBLEM = Problem("q", [{"role": "user", "content": "What is 2+2?"}], ["4"])


def assert_same_tokens(ours: Trajectory, theirs: Trajectory) -> None:
    for name in Trajectory.ARRAYS:
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()


async def run(tokenizer, turns, judge=None, **kwargs) -> tuple[Trajectory, AgentLoop]:
    loop = make_loop(tokenizer, turns, judge, **kwargs)
    trajectory = await loop.run(PROBLEM, 0)
    trajectory.check()
    return trajectory, loop


async def test_answer_after_a_tool_call_is_token_exact(tokenizer) -> None:
    trajectory, loop = await run(tokenizer, [call(), ANSWER])
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.assistant_texts == [call(), ANSWER]
    assert [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.OK]
    # the ids are those of a fresh render of the conversation, and the mask is its trained segments
    segments = loop.template.conversation(
        PROBLEM, trajectory.assistant_texts, [[trajectory.tool_calls[0].response_text]]
    )
    whole = tokenizer.encode("".join(text for text, _ in segments), add_special_tokens=False)
    assert [*trajectory.prompt_ids, *trajectory.response_ids] == whole
    trained = [i for i, kept in zip(trajectory.response_ids, trajectory.loss_mask) if kept]
    assert tokenizer.decode(trained) == "".join(text for text, kept in segments if kept)
    assert all(
        (logprob == 0.0) == (kept == 0)
        for logprob, kept in zip(trajectory.rollout_logprobs, trajectory.loss_mask)
    )
    covered = [i for span in trajectory.version_spans for i in range(span.start, span.end)]
    assert covered == [i for i, kept in enumerate(trajectory.loss_mask) if kept]
    assert {span.version for span in trajectory.version_spans} == {3}
    # what the engine was asked to continue is exactly what it had been given and gave
    second = written(loop).seen[1]
    assert second == whole[: len(second)]


async def test_turn_limit(tokenizer) -> None:
    trajectory, loop = await run(tokenizer, [call()], max_assistant_turns=3)
    assert trajectory.finish_reason is FinishReason.TURN_LIMIT
    assert trajectory.num_turns == 3 and len(trajectory.tool_calls) == 2
    assert loop.stats.endings == {"turn_limit": 1}


async def test_length_limit_also_inside_a_call(tokenizer) -> None:
    trajectory, _ = await run(tokenizer, [call()], max_new_tokens=20)
    assert trajectory.finish_reason is FinishReason.LENGTH_LIMIT
    assert len(trajectory.response_ids) == 20 and trajectory.tool_calls == []


async def test_tool_response_that_does_not_fit(tokenizer) -> None:
    first = len(tokenizer.encode(call() + "<|im_end|>", add_special_tokens=False))
    trajectory, _ = await run(tokenizer, [call(), ANSWER], max_new_tokens=first + 20)
    assert trajectory.finish_reason is FinishReason.TOOL_RESPONSE_TOO_LONG
    assert len(trajectory.response_ids) == first == sum(trajectory.loss_mask)


@pytest.mark.parametrize(
    "bad", ["x</reason><tool_call>{oops</tool_call>", call(name="Wolfram"), "<tool_call>{"]
)
async def test_bad_calls_reach_the_model_as_a_message(tokenizer, bad: str) -> None:
    judge = WrittenJudge()
    trajectory, loop = await run(tokenizer, [bad, ANSWER], judge)
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.MALFORMED]
    assert trajectory.num_tool_errors == 1 and judge.codes == []
    assert "Tool call failure" in tokenizer.decode(written(loop).seen[1])


async def test_calls_past_the_limit_are_told(tokenizer) -> None:
    judge = WrittenJudge()
    trajectory, loop = await run(
        tokenizer, [call("1") + call("2") + call("3"), ANSWER], judge, max_parallel_calls=2
    )
    assert judge.codes == ["1", "2"]
    assert len(trajectory.tool_calls) == 2
    assert "1 further call" in tokenizer.decode(written(loop).seen[1])


async def test_the_same_call_again_and_again_is_an_ending(tokenizer) -> None:
    turns = [call("a"), call("b"), call("b"), call("b"), ANSWER]
    trajectory, loop = await run(tokenizer, turns, max_assistant_turns=9, max_identical_calls=3)
    assert trajectory.finish_reason is FinishReason.REPEATED_CALL and trajectory.usable
    assert trajectory.num_turns == 4 and len(trajectory.tool_calls) == 3  # the third "b" is not run
    assert loop.stats.endings == {"repeated_call": 1}
    trajectory, _ = await run(tokenizer, turns, max_assistant_turns=9)  # off unless asked for
    assert trajectory.finish_reason is FinishReason.ANSWERED


async def test_malformed_calls_in_a_row_are_an_ending(tokenizer) -> None:
    bad = "<tool_call>{oops</tool_call>"
    turns = [bad, call(), bad, bad, ANSWER]
    trajectory, loop = await run(tokenizer, turns, max_assistant_turns=9, max_malformed_turns=2)
    assert trajectory.finish_reason is FinishReason.MALFORMED_CALLS
    assert trajectory.num_turns == 4 and loop.stats.endings == {"malformed_calls": 1}


async def test_jupyter_calls_share_one_session_that_is_closed(tokenizer) -> None:
    cell = f'x</reason><tool_call>{{"name": "{JUPYTER}", "arguments": {{"code": "x"}}}}</tool_call>'
    judge = WrittenJudge()
    trajectory, _ = await run(tokenizer, [cell, call(), cell, ANSWER], judge, tools=[JUPYTER, STANDARD_IO])
    assert [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.OK] * 3
    first, plain, second = judge.sessions
    assert first and first == second and plain is None
    assert judge.closed == [first] and trajectory.session == ""


async def test_a_lost_session_is_not_the_models_fault(tokenizer) -> None:
    cell = f'x</reason><tool_call>{{"name": "{JUPYTER}", "arguments": {{"code": "x"}}}}</tool_call>'
    judge = WrittenJudge(JudgeResult(Outcome.SESSION_LOST, "", "", None, 0.0))
    trajectory, _ = await run(tokenizer, [cell, ANSWER], judge, tools=[JUPYTER])
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.num_tool_errors == 0


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.OK, ToolOutcome.OK),
        (Outcome.ERROR, ToolOutcome.ERROR),
        (Outcome.MEMORY, ToolOutcome.ERROR),
        (Outcome.OUTPUT_LIMIT, ToolOutcome.ERROR),
        (Outcome.KILLED, ToolOutcome.ERROR),
        (Outcome.TIMEOUT, ToolOutcome.TIMEOUT),
    ],
)
async def test_what_the_program_did_is_a_result(tokenizer, outcome: Outcome, expected: ToolOutcome) -> None:
    trajectory, loop = await run(
        tokenizer, [call(), ANSWER], WrittenJudge(JudgeResult(outcome, "", "", None, 0.1))
    )
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.tool_calls[0].outcome is expected
    assert loop.stats.tool_calls == {str(expected): 1}


@pytest.mark.parametrize(
    "failure",
    [
        JudgeUnavailable("away"),
        JudgeResult(Outcome.INTERNAL_ERROR, "", "", None, 0.0),
        JudgeResult(Outcome.QUEUE_TIMEOUT, "", "", None, 0.0),
    ],
)
async def test_the_judges_failure_is_never_the_models(tokenizer, failure: JudgeResult | Exception) -> None:
    trajectory, loop = await run(tokenizer, [call(), ANSWER], WrittenJudge(failure))
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE
    assert not trajectory.usable and trajectory.num_tool_errors == 0
    assert "tool call lost" in trajectory.error
    assert loop.stats.endings == {"infrastructure": 1}


async def test_a_judge_that_never_answers_meets_the_deadline(tokenizer) -> None:
    trajectory, _ = await run(tokenizer, [call(), ANSWER], WrittenJudge(delay_s=60), timeout_s=0.3)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE
    assert trajectory.seconds < 10


async def test_a_server_that_takes_the_call_and_never_answers(tokenizer) -> None:
    """The real client over a real socket: its request times out, it retries, and gives up in the end."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with JudgeClient(f"http://127.0.0.1:{port}", request_timeout_s=0.3, max_outage_s=0.8) as judge:
        trajectory, loop = await run(tokenizer, [call(), ANSWER], judge)
        retries = judge.counters["retries"]
    server.close()
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and "no result" in trajectory.error
    assert trajectory.num_tool_errors == 0 and trajectory.seconds < 10 and retries >= 2
    assert loop.stats.endings == {"infrastructure": 1}


async def test_a_tool_reply_of_10_mb_is_cut(tokenizer) -> None:
    """Over the wire, through the real client."""

    async def answer(request: web.Request) -> web.Response:
        sub_id = (await request.json())["sub_id"]
        return web.json_response(make_result(sub_id, Outcome.OK, stdout="9" * 10_000_000, exit_code=0))

    app = web.Application()
    app.router.add_post("/run", answer)
    async with TestServer(app, host="127.0.0.1") as server, JudgeClient(str(server.make_url("/"))) as judge:
        trajectory, _ = await run(tokenizer, [call(), ANSWER], judge, max_tool_response_length=64)
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert len(trajectory.tool_calls[0].response_text) < 100


async def test_a_lost_engine_repeats_the_turn(tokenizer) -> None:
    trajectory, loop = await run(tokenizer, [call(), EngineLost("gone"), ANSWER])
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert written(loop).recovered == 1 and loop.stats.engine_retries == 1
    assert written(loop).seen[1] == written(loop).seen[2]


async def test_an_engine_that_stays_away(tokenizer) -> None:
    loop = make_loop(tokenizer, [EngineLost("gone")])
    written(loop).recover_error = EngineLost("restarted 2 times")
    trajectory = await loop.run(PROBLEM, 0)
    assert trajectory.finish_reason is None and "2 times" in loop.engine_gone


async def test_a_gone_engine_gives_back_what_it_had_and_takes_no_more(tokenizer) -> None:
    """Slices that wait, trajectories in their second turn, and work that is on its way; another engine ends them all."""
    loop = make_loop(tokenizer, [call(), EngineLost("gone")])
    written(loop).delay_s = 0.02
    written(loop).recover_error = EngineLost("restarted 2 times")
    answer: asyncio.Future[list[Slice] | None] = asyncio.get_running_loop().create_future()
    given = iter([[Slice(0, PROBLEM, [0, 1, 2])], answer])
    back: list[tuple[int, Trajectory]] = []
    reasons: list[str] = []

    async def next_work(room: int) -> list[Slice] | None:
        work = next(given)  # a third request raises
        return await work if isinstance(work, asyncio.Future) else work

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append((work.group, trajectory))

    async def gone(reason: str) -> None:
        reasons.append(reason)
        answer.set_result([Slice(1, PROBLEM, [0, 1])])

    budget = make_budget("least_requests", 20_000, 4)
    runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended, gone)
    await asyncio.wait_for(runner.run(), 20)
    assert reasons == ["restarted 2 times"] and budget.running == 0
    assert sorted((group, t.rollout_index) for group, t in back) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert {t.finish_reason for _, t in back} == {None} and not loop.stats.endings
    assert any(t.tool_calls for _, t in back)  # with the turns they had

    other = make_loop(tokenizer, [ANSWER])
    for _, trajectory in back:
        calls = len(trajectory.tool_calls)
        done = await other.run(PROBLEM, trajectory.rollout_index, resume=trajectory)
        assert done.finish_reason is FinishReason.ANSWERED and len(done.tool_calls) == calls
        done.check()


async def test_a_restarted_engines_capacity_counts(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    budget = make_budget("kv_adaptive", 20_000, 4)

    async def never(*_: Any) -> None:
        raise AssertionError

    runner = TrajectoryRunner(loop, AdmissionQueue(budget), never, never)
    runner.observe(EngineReport(ready=True, progress=0.0, max_total_tokens=20_000))
    runner.observe(EngineReport(ready=True, progress=0.0, max_total_tokens=12_000))
    assert budget.capacity_tokens == 12_000


async def test_a_turn_waits_for_a_change_of_weights(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    written(loop).change_over.clear()
    running = asyncio.create_task(loop.run(PROBLEM, 0))
    await asyncio.sleep(0.05)
    assert not written(loop).seen
    written(loop).change_over.set()
    assert (await asyncio.wait_for(running, 5)).finish_reason is FinishReason.ANSWERED


async def test_a_trajectory_that_waits_for_an_engine_is_parked(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    written(loop).change_over.clear()
    running = asyncio.create_task(loop.run(PROBLEM, 0))
    await asyncio.sleep(0.05)
    loop.parking = True
    written(loop).change_over.set()
    assert (await asyncio.wait_for(running, 5)).finish_reason is None and not written(loop).seen


async def test_an_engine_that_never_settles(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    loop.timeout_s = 0.2
    written(loop).change_over.clear()
    trajectory = await asyncio.wait_for(loop.run(PROBLEM, 0), 5)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and "deadline" in trajectory.error


@pytest.mark.parametrize(
    "failure", [GenerationTimeout("late"), EngineError("refused"), RuntimeError("bug"), ("cut", "abort")]
)
async def test_other_failures_end_the_trajectory(tokenizer, failure: Any) -> None:
    trajectory, _ = await run(tokenizer, [failure])
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.error


async def test_prompt_without_room(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    loop.max_context_tokens = 10
    trajectory = await loop.run(PROBLEM, 0)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and "seq_length" in trajectory.error


# ------------------------------------------------------------------------------------------------- parking


@dataclass
class ParkableEngine(WrittenEngine):
    """Cuts the turn under way in half when it is aborted, as SGLang does."""

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float, **about: Any
    ) -> GenerateResult:
        whole = await super().generate(input_ids, sampling, timeout_s=timeout_s)
        if self.aborting.is_set() or about["owner"] in self.aborted:
            half = whole.token_ids[: len(whole.token_ids) // 2]
            self.turns.insert(0, (self.tokenizer.decode(whole.token_ids[len(half) :]), "stop"))
            logprobs = whole.logprobs[: len(half)]
            return GenerateResult(half, logprobs, "abort", [(0, len(half), 3)], len(input_ids), 0)
        return whole


async def until_in(stage: str, engine: WrittenEngine, judge: WrittenJudge) -> None:
    """Until the trajectory waits for its first turn, its tool call or its second turn."""
    places = {"first turn": (engine.seen, 1), "tool call": (judge.codes, 1), "second turn": (engine.seen, 2)}
    what, count = places[stage]
    async with asyncio.timeout(20):
        while len(what) < count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("parked_in", ["first turn", "tool call", "second turn"])
async def test_parked_anywhere_and_resumed_gives_the_same_tokens(tokenizer, parked_in: str) -> None:
    expected, _ = await run(tokenizer, [call(), ANSWER])
    loop = make_loop(tokenizer, [call(), ANSWER])
    engine = ParkableEngine(tokenizer, [call(), ANSWER], delay_s=0.1)
    judge = WrittenJudge(delay_s=0.1)
    loop.engine, loop.tools.judge = engine, judge
    task = asyncio.create_task(loop.run(PROBLEM, 0))
    await until_in(parked_in, engine, judge)
    loop.parking = True
    await engine.abort_all()
    parked = await task
    parked.check()
    assert (
        parked.finish_reason is None and not parked.usable and len(judge.codes) == (parked_in != "first turn")
    )
    assert loop.stats.parked == 1 and not loop.stats.endings

    engine.aborting.clear()
    later = make_loop(tokenizer, [ANSWER])
    later.engine = engine
    done = await later.run(PROBLEM, 0, resume=parked)
    done.check()
    assert done.finish_reason is FinishReason.ANSWERED and done.open_turn is None
    assert_same_tokens(done, expected)
    assert done.assistant_texts == expected.assistant_texts and len(done.tool_calls) == 1
    covered = [i for span in done.version_spans for i in range(span.start, span.end)]
    assert covered == [i for i, kept in enumerate(done.loss_mask) if kept]


@pytest.mark.parametrize("preempted_in", ["first turn", "tool call", "second turn"])
async def test_preempted_anywhere_and_resumed_gives_the_same_tokens(tokenizer, preempted_in: str) -> None:
    cell = f'x</reason><tool_call>{{"name": "{JUPYTER}", "arguments": {{"code": "x"}}}}</tool_call>'
    expected, _ = await run(tokenizer, [cell, ANSWER], tools=[JUPYTER])
    loop = make_loop(tokenizer, [cell, ANSWER], tools=[JUPYTER])
    engine = ParkableEngine(tokenizer, [cell, ANSWER], delay_s=0.1)
    judge = WrittenJudge(delay_s=0.1)
    loop.engine, loop.tools.judge = engine, judge
    preemption = Preemption()
    task = asyncio.create_task(loop.run(PROBLEM, 0, preemption=preemption))
    await until_in(preempted_in, engine, judge)
    await loop.preempt(preemption)
    parked = await task
    parked.check()
    assert parked.finish_reason is None and loop.stats.preemptions == 1
    assert loop.stats.parked == 0 and loop.stats.trajectories == 0 and not loop.stats.endings
    assert not judge.closed and bool(parked.session) == (preempted_in != "first turn")

    done = await loop.run(PROBLEM, 0, resume=parked)
    done.check()
    assert done.finish_reason is FinishReason.ANSWERED and done.open_turn is None
    assert_same_tokens(done, expected)
    assert done.assistant_texts == expected.assistant_texts and len(judge.codes) == 1
    assert len(judge.closed) == 1 and loop.stats.endings == {"answered": 1}


async def test_what_went_astray_before_a_preemption_still_counts(tokenizer) -> None:
    turns = [call("b"), call("b"), call("b"), ANSWER]
    loop = make_loop(tokenizer, turns, max_assistant_turns=9, max_identical_calls=3)
    loop.engine = ParkableEngine(tokenizer, turns, delay_s=0.05)
    preemption = Preemption()
    task = asyncio.create_task(loop.run(PROBLEM, 0, preemption=preemption))
    while loop.stats.generate_seconds == 0:  # the first turn is over, the tool has not answered
        await asyncio.sleep(0)
    preemption.asked = True
    parked = await task
    assert parked.finish_reason is None and parked.num_turns == 1
    done = await loop.run(PROBLEM, 0, resume=parked)
    assert done.finish_reason is FinishReason.REPEATED_CALL and done.num_turns == 3


class PreemptingBudget(KVBudget):
    """Names every running trajectory but the first, once; with `full` there is no room for them afterwards."""

    full = False
    done = False

    def preempt(self) -> list[Hashable]:
        chosen = [] if self.done else list(self._reservations)[1:]
        self.done = True
        return chosen

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        return not (self.full and self.done)


@pytest.mark.parametrize("ending", ["goes on", "parked", "cut"])
async def test_the_runner_requeues_what_it_preempts(tokenizer, ending: str) -> None:
    """Preempted and carried trajectories go on, or come back as they are when the phase ends before they run."""
    loop = make_loop(tokenizer, [call(), ANSWER])
    engine = ParkableEngine(tokenizer, [ANSWER], delay_s=0.05)
    loop.engine = engine
    budget = PreemptingBudget(20_000, 4)
    budget.full = ending != "goes on"
    back: list[Trajectory] = []
    carried = Trajectory(PROBLEM.query_id, 5, loop.template.prompt_ids(PROBLEM), [8, 9], [1, 1], [-0.1, -0.2])
    carried.version_spans, carried.open_turn = [VersionSpan(0, 2, 2)], 0
    given = iter([[Slice(0, PROBLEM, list(range(6)), {5: carried})], None])

    async def next_work(room: int) -> list[Slice] | None:
        return next(given)

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append(trajectory)

    runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended)
    running = asyncio.create_task(runner.run())
    while budget.running < 4:
        await asyncio.sleep(0)
    runner.observe(EngineReport(ready=True, progress=0.0))
    while loop.stats.preemptions < 3:
        await asyncio.sleep(0)
    if ending != "goes on":
        await runner.park(cut=ending == "cut")
    await asyncio.wait_for(running, 20)
    assert budget.running == 0 and budget.reserved_tokens == 0
    assert len({t.rollout_index for t in back}) == len(back)
    if ending == "goes on":
        assert [t.finish_reason for t in back] == [FinishReason.ANSWERED] * 6
        assert loop.stats.preemptions == 3 and loop.stats.parked == 0
        assert carried.response_ids[:2].tolist() == [8, 9] and carried.version_spans[0].version == 2
    else:  # those that wait for room with what they have, and the one that ran; one never started
        reason = FinishReason.CUT if ending == "cut" else None
        assert {t.rollout_index for t in back if t.finish_reason is reason} >= {1, 2, 3, 5}
        assert {t.rollout_index for t in back} == {0, 1, 2, 3, 5} and carried.response_ids.tolist() == [8, 9]
        assert all(t.response_tokens for t in back)
    for trajectory in back:
        trajectory.check()


@pytest.mark.parametrize("cut", [False, True])
async def test_work_that_comes_after_the_end_of_the_phase(tokenizer, cut: bool) -> None:
    """What had not started is forgotten; what was carried here comes back with its tokens."""
    loop = make_loop(tokenizer, [ANSWER])
    loop.engine = ParkableEngine(tokenizer, [ANSWER])
    carried = Trajectory(PROBLEM.query_id, 1, loop.template.prompt_ids(PROBLEM), [8], [1], [-0.1])
    asked, over = asyncio.Event(), asyncio.Event()
    back: list[Trajectory] = []

    async def next_work(room: int) -> list[Slice] | None:
        asked.set()
        await over.wait()
        return [Slice(0, PROBLEM, [0, 1], {1: carried})]

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append(trajectory)

    runner = TrajectoryRunner(loop, AdmissionQueue(make_budget("kv_adaptive", 20_000, 4)), next_work, ended)
    running = asyncio.create_task(runner.run())
    await asked.wait()
    await runner.park(cut=cut)
    over.set()
    await asyncio.wait_for(running, 20)
    assert back == [carried] and carried.response_ids.tolist() == [8]
    assert carried.finish_reason is (FinishReason.CUT if cut else None)


async def test_a_cut_trajectory_is_counted_and_its_session_closed(tokenizer) -> None:
    cell = f'x</reason><tool_call>{{"name": "{JUPYTER}", "arguments": {{"code": "x"}}}}</tool_call>'
    judge = WrittenJudge(delay_s=0.05)
    loop = make_loop(tokenizer, [cell, ANSWER], judge, tools=[JUPYTER])
    task = asyncio.create_task(loop.run(PROBLEM, 0))
    await until_in("tool call", written(loop), judge)
    loop.parking = loop.cutting = True
    trajectory = await task
    assert trajectory.finish_reason is FinishReason.CUT and not trajectory.usable
    assert len(judge.closed) == 1 and loop.stats.endings == {"cut": 1}


# ------------------------------------------------------------------------------------------------- groups


def problems(count: int) -> list[Problem]:
    return [
        Problem(f"q{i}", [{"role": "user", "content": f"What is {i}+1?"}], [str(i + 1)]) for i in range(count)
    ]


def giver(work: list[Problem]):
    iterator = iter(work)

    async def next_problem() -> Problem | None:
        await asyncio.sleep(0)
        return next(iterator, None)

    return next_problem


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_groups_are_complete_and_ordered(tokenizer, policy: str) -> None:
    loop = make_loop(tokenizer, [ANSWER], max_new_tokens=300)
    written(loop).delay_s = 0.001
    budget = make_budget(policy, 3000, 5)
    seen: list[str] = []

    async def scored(problem: Problem, trajectory: Trajectory) -> None:
        seen.append(problem.query_id)

    groups = [
        g async for g in run_groups(giver(problems(6)), loop, budget, group_size=4, on_trajectory=scored)
    ]
    assert sorted(g.problem.query_id for g in groups) == [f"q{i}" for i in range(6)]
    for group in groups:
        assert [t.rollout_index for t in group.trajectories] == [0, 1, 2, 3]
        assert {t.query_id for t in group.trajectories} == {group.problem.query_id}
    assert budget.running == 0 and budget.reserved_tokens == 0
    assert len(seen) == 24 and loop.stats.trajectories == 24


async def test_a_spoilt_trajectory_still_completes_its_group(tokenizer) -> None:
    loop = make_loop(tokenizer, [EngineError("refused"), ANSWER])
    (group,) = [
        g
        async for g in run_groups(giver(problems(1)), loop, make_budget("kv_reserve", 9000, 1), group_size=3)
    ]
    assert [t.usable for t in group.trajectories] == [False, True, True]


async def test_leaving_early_cancels_the_rest(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    written(loop).delay_s = 0.01
    budget = make_budget("static", 9000, 3)
    groups = run_groups(giver(problems(50)), loop, budget, group_size=2)
    async for _ in groups:
        break
    await groups.aclose()
    assert budget.running == 0 and budget.reserved_tokens == 0


async def test_trajectories_that_never_fit_are_an_error(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER], max_new_tokens=500)
    with pytest.raises(ValueError, match="never fits"):
        async for _ in run_groups(giver(problems(1)), loop, make_budget("kv_reserve", 100, 4), group_size=2):
            pass


async def test_the_same_problem_twice_makes_two_groups(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    written(loop).delay_s = 0.01
    budget = make_budget("static", 9000, 9)
    groups = [g async for g in run_groups(giver([PROBLEM, PROBLEM]), loop, budget, group_size=2)]
    assert [len(g.trajectories) for g in groups] == [2, 2]
