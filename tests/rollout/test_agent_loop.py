"""Every ending of a trajectory, with an engine whose turns are written down.

The real engine and the real judge run in test_real_loop.py; here each ending must be provoked exactly.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rstar2_megatron.judge.client.client import JudgeClient, JudgeUnavailable
from rstar2_megatron.judge.outcome import JudgeResult, Outcome, make_result
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, GenerationTimeout
from rstar2_megatron.rollout.tool_response import NOISE
from rstar2_megatron.tools import JUPYTER, STANDARD_IO
from rstar2_megatron.trajectory import FinishReason, ToolOutcome
from tests.rollout.written import ANSWER, CELL, PROBLEM, WrittenJudge, assert_same_tokens, call, make_loop, run, written


async def test_answer_after_a_tool_call_is_token_exact(tokenizer) -> None:
    trajectory, loop = await run(tokenizer, [call(), ANSWER])
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.assistant_texts == [call(), ANSWER]
    assert [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.OK]
    # the ids are those of a fresh render of the conversation, and the mask is its trained segments
    segments = loop.template.conversation(PROBLEM, trajectory.assistant_texts, [[trajectory.tool_calls[0].response_text]])
    whole = tokenizer.encode("".join(text for text, _ in segments), add_special_tokens=False)
    assert [*trajectory.prompt_ids, *trajectory.response_ids] == whole
    trained = [i for i, kept in zip(trajectory.response_ids, trajectory.loss_mask) if kept]
    assert tokenizer.decode(trained) == "".join(text for text, kept in segments if kept)
    assert all((logprob == 0.0) == (kept == 0) for logprob, kept in zip(trajectory.rollout_logprobs, trajectory.loss_mask))
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


@pytest.mark.parametrize("bad", ["x</reason><tool_call>{oops</tool_call>", call(name="Wolfram"), "<tool_call>{"])
async def test_bad_calls_reach_the_model_as_a_message(tokenizer, bad: str) -> None:
    judge = WrittenJudge()
    trajectory, loop = await run(tokenizer, [bad, ANSWER], judge)
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.MALFORMED]
    assert trajectory.num_tool_errors == 1 and judge.codes == []
    assert "Tool call failure" in tokenizer.decode(written(loop).seen[1])


async def test_why_a_call_is_refused_is_told_whole(tokenizer) -> None:
    """The shortest response length that the settings allow cuts a program's output, not the remedy."""
    bad = f'<tool_call>{{"name": "{STANDARD_IO}", "arguments": {{"code": "a\nb", "input": ""}}}}</tool_call>'
    trajectory, loop = await run(tokenizer, [bad, ANSWER], max_tool_response_length=16)
    told = "a raw line end inside a string at character 65; write \\n in its place."
    assert trajectory.tool_calls[0].response_text.endswith(told) and told in tokenizer.decode(written(loop).seen[1])


async def test_calls_past_the_limit_are_told(tokenizer) -> None:
    judge = WrittenJudge()
    trajectory, loop = await run(tokenizer, [call("1") + call("2") + call("3"), ANSWER], judge, max_parallel_calls=2)
    assert judge.codes == ["1", "2"]
    assert len(trajectory.tool_calls) == 2 and trajectory.calls_per_turn == [2]
    assert "1 further call" in tokenizer.decode(written(loop).seen[1])


async def test_a_well_formed_call_is_run_beside_a_malformed_one(tokenizer) -> None:
    judge = WrittenJudge()
    turn = "I use the <tool_call> format.\n<tool_call>{oops</tool_call>\n" + call("1")
    trajectory, _ = await run(tokenizer, [turn, ANSWER], judge)
    assert judge.codes == ["1"] and [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.OK]


async def test_the_same_call_again_and_again_is_an_ending(tokenizer) -> None:
    turns = [call("a"), call("b"), call("b"), call("b"), ANSWER]
    trajectory, loop = await run(tokenizer, turns, max_assistant_turns=9, max_identical_calls=3)
    assert trajectory.finish_reason is FinishReason.REPEATED_CALL and trajectory.usable
    assert trajectory.num_turns == 4 and len(trajectory.tool_calls) == 3  # the third "b" is not run
    assert loop.stats.endings == {"repeated_call": 1}
    trajectory, _ = await run(tokenizer, turns, max_assistant_turns=9)  # off unless asked for
    assert trajectory.finish_reason is FinishReason.ANSWERED


async def test_noise_lets_calls_fail_and_the_same_ones_again(tokenizer) -> None:
    turns = [call(str(i)) for i in range(30)]
    judges = [WrittenJudge(), WrittenJudge(), WrittenJudge()]
    words = {"max_assistant_turns": 40, "max_new_tokens": 7000}
    noisy, again = [
        (await run(tokenizer, [*turns, "<tool_call>{oops</tool_call>", ANSWER], judge, tool_noise=0.3, **words))[0]
        for judge in judges[:2]
    ]
    failed = [c.arguments["code"] for c in noisy.tool_calls if c.response_text == NOISE]
    assert 3 <= len(failed) <= 15 and judges[0].codes == [str(i) for i in range(30) if str(i) not in failed]
    assert {c.outcome for c in noisy.tool_calls if c.response_text == NOISE} == {ToolOutcome.ERROR}
    assert noisy.tool_calls[-1].outcome is ToolOutcome.MALFORMED
    assert_same_tokens(noisy, again)
    await run(tokenizer, [*turns, ANSWER], judges[2], **words)
    assert judges[2].codes == [str(i) for i in range(30)], "off unless asked for"


async def test_malformed_calls_in_a_row_are_an_ending(tokenizer) -> None:
    bad = "<tool_call>{oops</tool_call>"
    turns = [bad, call(), bad, bad, ANSWER]
    trajectory, loop = await run(tokenizer, turns, max_assistant_turns=9, max_malformed_turns=2)
    assert trajectory.finish_reason is FinishReason.MALFORMED_CALLS
    assert trajectory.num_turns == 4 and loop.stats.endings == {"malformed_calls": 1}


async def test_jupyter_calls_share_one_session_that_is_closed(tokenizer) -> None:
    judge = WrittenJudge()
    trajectory, _ = await run(tokenizer, [CELL, call(), CELL, ANSWER], judge, tools=[JUPYTER, STANDARD_IO])
    assert [c.outcome for c in trajectory.tool_calls] == [ToolOutcome.OK] * 3
    first, plain, second = judge.sessions
    assert first and first == second and plain is None
    assert judge.closed == [first] and trajectory.session == ""


async def test_a_lost_session_is_not_the_models_fault(tokenizer) -> None:
    judge = WrittenJudge(JudgeResult(Outcome.SESSION_LOST, "", "", None, 0.0))
    trajectory, _ = await run(tokenizer, [CELL, ANSWER], judge, tools=[JUPYTER])
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
    trajectory, loop = await run(tokenizer, [call(), ANSWER], WrittenJudge(JudgeResult(outcome, "", "", None, 0.1)))
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
    judge = WrittenJudge()
    judge.go.clear()
    trajectory, _ = await run(tokenizer, [call(), ANSWER], judge, timeout_s=0.3)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE


async def test_a_server_that_takes_the_call_and_never_answers(tokenizer) -> None:
    """The real client over a real socket: its request times out, it retries, and gives up in the end."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with JudgeClient(f"http://127.0.0.1:{port}", request_timeout_s=0.3, max_outage_s=3.0) as judge:
        trajectory, loop = await run(tokenizer, [call(), ANSWER], judge)
        retries = judge.counters["retries"]
    server.close()
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and "no result" in trajectory.error
    assert trajectory.num_tool_errors == 0 and retries >= 1
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


async def test_a_turn_waits_for_a_change_of_weights(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    written(loop).change_over.clear()
    running = asyncio.create_task(loop.run(PROBLEM, 0))
    await written(loop).waited.wait()
    await asyncio.sleep(0)
    assert not written(loop).seen
    written(loop).change_over.set()
    assert (await asyncio.wait_for(running, 60)).finish_reason is FinishReason.ANSWERED


async def test_an_engine_that_never_settles(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    loop.timeout_s = 0.2
    written(loop).change_over.clear()
    trajectory = await asyncio.wait_for(loop.run(PROBLEM, 0), 60)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and "deadline" in trajectory.error


@pytest.mark.parametrize("failure", [GenerationTimeout("late"), EngineError("refused"), RuntimeError("bug"), ("cut", "abort")])
async def test_other_failures_end_the_trajectory(tokenizer, failure: Any) -> None:
    trajectory, _ = await run(tokenizer, [failure])
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.error


async def test_prompt_without_room(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    loop.max_context_tokens = 10
    trajectory = await loop.run(PROBLEM, 0)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and "seq_length" in trajectory.error
