"""One trajectory: prompt, assistant turns, tool calls and responses, until a typed ending.

Tokens in, tokens out: what the engine generated is appended as it is, tool responses are tokenised once, and text
is decoded only to find tool calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine_protocol import EngineError, EngineLost, GenerateResult, GenerationTimeout
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool_call import ParsedCall, parse_tool_calls
from rstar2_megatron.rollout.tool_response import ToolRun, format_refusal, format_tool_response, truncate
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.trajectory import (
    FinishReason,
    Problem,
    ToolCall,
    ToolOutcome,
    Trajectory,
    VersionSpan,
)

log = logging.getLogger(__name__)

# A judge's own words for what became of a call. Running out of memory or output, or being killed for it, is the
# program's doing; anything not named here is the judge's.
_OUTCOMES = {
    "ok": ToolOutcome.OK,
    "error": ToolOutcome.ERROR,
    "memory": ToolOutcome.ERROR,
    "output_limit": ToolOutcome.ERROR,
    "killed": ToolOutcome.ERROR,
    "invalid_input": ToolOutcome.ERROR,
    "timeout": ToolOutcome.TIMEOUT,
}


class Engine(Protocol):
    """What the loop needs of an engine (`EngineClient`)."""

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float
    ) -> GenerateResult: ...

    async def recover(self) -> None: ...


class Judge(Protocol):
    """What the loop needs of the Code Judge's client: retries inside, raises when the judge stays away."""

    async def run(self, code: str, stdin: str = "") -> ToolRun: ...


class Interrupted(Exception):
    """The trajectory cannot go on, and not for the model's fault."""


ProgressCallback = Callable[[int], None]


class AgentLoop:
    """Runs trajectories on one engine. Any number of `run` calls may be under way together.

    `max_context_tokens` bounds prompt and response together (runner.seq_length); `timeout_s` is the deadline of one
    trajectory with all its turns and tool calls. `stats` collects counters and may be replaced at any time.
    """

    def __init__(
        self,
        engine: Engine,
        judge: Judge,
        template: ChatTemplate,
        settings: AgentLoopSettings,
        sampling: SamplingParams,
        *,
        max_context_tokens: int,
        timeout_s: float,
    ) -> None:
        self.engine = engine
        self.judge = judge
        self.template = template
        self.settings = settings
        self.sampling = sampling
        self.max_context_tokens = max_context_tokens
        self.timeout_s = timeout_s
        self.stats = RolloutStats()

    def response_budget(self, prompt_tokens: int) -> int:
        """Tokens that a response may take, tool responses included."""
        return min(self.sampling.max_new_tokens, self.max_context_tokens - prompt_tokens)

    async def run(
        self, problem: Problem, rollout_index: int, *, on_progress: ProgressCallback | None = None
    ) -> Trajectory:
        """One attempt at `problem`. Never raises, except when it is cancelled.

        `on_progress` is told the trajectory's length in tokens after every turn. A trajectory that the engine or
        the judge spoilt ends as INFRASTRUCTURE with the reason in `error`.
        """
        started = time.monotonic()
        trajectory = Trajectory(query_id=problem.query_id, rollout_index=rollout_index, prompt_ids=[])
        try:
            trajectory.prompt_ids = self.template.prompt_ids(problem)
            turns = _Turns(self, trajectory, started + self.timeout_s, on_progress)
            trajectory.finish_reason = await turns.until_end()
        except Interrupted as error:
            trajectory.finish_reason = FinishReason.INFRASTRUCTURE
            trajectory.error = str(error)
        except Exception as error:
            log.exception("trajectory %s#%d failed", problem.query_id, rollout_index)
            trajectory.finish_reason = FinishReason.INFRASTRUCTURE
            trajectory.error = f"{type(error).__name__}: {error}"
        trajectory.seconds = time.monotonic() - started
        self.stats.finish(trajectory)
        return trajectory


class _Turns:
    """The state of one running trajectory."""

    def __init__(
        self, loop: AgentLoop, trajectory: Trajectory, deadline: float, on_progress: ProgressCallback | None
    ) -> None:
        self.loop = loop
        self.trajectory = trajectory
        self.deadline = deadline
        self.on_progress = on_progress
        self.budget = loop.response_budget(len(trajectory.prompt_ids))
        if self.budget <= 0:
            raise Interrupted(
                f"the prompt of {trajectory.query_id} has {len(trajectory.prompt_ids)} tokens and leaves no room "
                f"in runner.seq_length={loop.max_context_tokens}; lower data.max_prompt_length or raise seq_length"
            )

    async def until_end(self) -> FinishReason:
        trajectory, settings, template = self.trajectory, self.loop.settings, self.loop.template
        while True:
            result = await self._generate()
            self._append_generated(result)
            text = template.decode(result.token_ids)
            trajectory.assistant_texts.append(text)
            if result.finish_reason == "abort":
                raise Interrupted("the engine aborted the request")
            if result.finish_reason == "length":
                return FinishReason.LENGTH_LIMIT
            calls = parse_tool_calls(text, template.schemas)
            if not calls:
                return FinishReason.ANSWERED
            if trajectory.num_turns >= settings.max_assistant_turns:
                return FinishReason.TURN_LIMIT
            responses = await self._run_tools(calls)
            ids = template.tool_response_ids(responses)
            if len(trajectory.response_ids) + len(ids) >= self.budget:  # a token at least must follow
                return FinishReason.TOOL_RESPONSE_TOO_LONG
            trajectory.response_ids += ids
            trajectory.loss_mask += [0] * len(ids)
            trajectory.rollout_logprobs += [0.0] * len(ids)
            self._report_progress()

    def _report_progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.trajectory.length)

    def _seconds_left(self) -> float:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise Interrupted(f"the trajectory took longer than {self.loop.timeout_s:.0f} s")
        return seconds

    # ------------------------------------------------------------------------------------ generation

    async def _generate(self) -> GenerateResult:
        """One assistant turn. After the loss of an engine the turn starts again, from the same tokens."""
        sampling = self.loop.sampling
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": self.budget - len(self.trajectory.response_ids),
            "stop_token_ids": self.loop.template.stop_token_ids,
        }
        input_ids = self.trajectory.prompt_ids + self.trajectory.response_ids
        stats = self.loop.stats
        while True:
            begun = time.monotonic()
            try:
                result = await self.loop.engine.generate(
                    input_ids, parameters, timeout_s=self._seconds_left()
                )
            except GenerationTimeout as error:
                raise Interrupted(str(error)) from error
            except EngineLost as error:
                await self._recover(error)
                stats.engine_retries += 1
                continue
            except EngineError as error:
                raise Interrupted(str(error)) from error
            finally:
                stats.generate_seconds += time.monotonic() - begun
            stats.cached_tokens += result.cached_tokens
            stats.prefill_tokens += result.prompt_tokens - result.cached_tokens
            stats.retractions += result.retractions
            return result

    async def _recover(self, error: EngineLost) -> None:
        log.warning("trajectory %s#%d: %s", self.trajectory.query_id, self.trajectory.rollout_index, error)
        try:
            await asyncio.wait_for(self.loop.engine.recover(), self._seconds_left())
        except TimeoutError:
            raise Interrupted(f"no engine came back within the trajectory's deadline: {error}") from error
        except EngineLost as still:
            raise Interrupted(str(still)) from still

    def _append_generated(self, result: GenerateResult) -> None:
        trajectory = self.trajectory
        offset = len(trajectory.response_ids)
        trajectory.response_ids += result.token_ids
        trajectory.loss_mask += [1] * len(result.token_ids)
        trajectory.rollout_logprobs += result.logprobs
        for start, end, version in result.version_spans:
            trajectory.version_spans.append(VersionSpan(offset + start, offset + end, version))
        self._report_progress()

    # ----------------------------------------------------------------------------------------- tools

    async def _run_tools(self, calls: list[ParsedCall]) -> list[str]:
        """Run the turn's first calls together; the responses as the model reads them, in order."""
        limit = self.loop.settings.max_parallel_calls
        begun = time.monotonic()
        done = await asyncio.gather(*(self._run_tool(call) for call in calls[:limit]))
        self.loop.stats.tool_seconds += time.monotonic() - begun
        self.trajectory.tool_calls += done
        lost = [call for call in done if call.outcome is ToolOutcome.INFRASTRUCTURE]
        if lost:
            raise Interrupted(f"tool call lost: {lost[0].response_text}")
        responses = [call.response_text for call in done]
        if len(calls) > limit:
            skipped = len(calls) - limit
            responses.append(
                format_refusal(f"{skipped} further call(s) were not run: at most {limit} per turn.")
            )
        return responses

    async def _run_tool(self, call: ParsedCall) -> ToolCall:
        """Never raises for the judge's failures: they come back as outcome INFRASTRUCTURE."""
        if not call.valid:
            text = self._shown(format_refusal(call.message))
            return ToolCall(call.name, call.arguments, ToolOutcome.MALFORMED, text)
        begun = time.monotonic()
        try:
            run = await asyncio.wait_for(
                self.loop.judge.run(call.arguments["code"], call.arguments.get("input", "")),
                self._seconds_left(),
            )
        except Exception as error:  # JudgeUnavailable, or the deadline
            message = f"{type(error).__name__}: {error}"
            outcome, text = ToolOutcome.INFRASTRUCTURE, message
        else:
            outcome = _OUTCOMES.get(str(run.outcome), ToolOutcome.INFRASTRUCTURE)
            text = self._shown(format_tool_response(run))
        return ToolCall(call.name, call.arguments, outcome, text, time.monotonic() - begun)

    def _shown(self, text: str) -> str:
        settings = self.loop.settings
        return truncate(text, settings.max_tool_response_length, settings.tool_response_truncate_side)
