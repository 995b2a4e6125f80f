"""Trajectories on one engine: generate, parse, run tools, append, until a typed ending; parked, or spoiled.

Tokens in, tokens out: what the engine generated is appended as it is, tool responses are tokenised once, and text
is decoded only to find tool calls. A trajectory can be parked at any token and go on later, under other weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, GenerateResult, GenerationTimeout
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool_call import ParsedCall, parse_tool_calls
from rstar2_megatron.rollout.tool_runner import Judge, ToolRunner
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.trajectory import FinishReason, Problem, ToolOutcome, Trajectory, VersionSpan

log = logging.getLogger(__name__)

LengthCallback = Callable[[int], None]


class Engine(Protocol):
    """What the loop needs of an engine (`EngineClient`)."""

    async def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        *,
        timeout_s: float,
        on_tokens: LengthCallback | None = None,
        owner: object = None,
    ) -> GenerateResult: ...

    async def settled(self) -> None: ...

    async def recover(self) -> None: ...

    async def abort(self, owner: object) -> None: ...

    async def abort_all(self) -> None: ...


class Interrupted(Exception):
    """The trajectory cannot go on, and not for the model's fault."""


class EngineGone(Exception):
    """The engine is lost and cannot be started again with the current weights."""


class Parked(Exception):
    """The phase ends before the trajectory, or the scheduler wants its room."""


@dataclass(slots=True, eq=False)
class Preemption:
    """The scheduler's word to one running trajectory (`AgentLoop.preempt`), and what it needs to know of it."""

    asked: bool = False
    at_tool: bool = False  # waits for a tool's answer


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
        self.tools = ToolRunner(judge, settings)
        self.template = template
        self.settings = settings
        self.sampling = sampling
        self.max_context_tokens = max_context_tokens
        self.timeout_s = timeout_s
        self.stats = RolloutStats()
        self.parking = False  # set it and abort the engine's requests: every running trajectory is parked
        self.cutting = False  # and with this, parked ones are over
        self.engine_gone = ""  # why the engine can serve no more; every running trajectory is then parked

    def response_budget(self, prompt_tokens: int) -> int:
        """Tokens that a response may take, tool responses included."""
        return min(self.sampling.max_new_tokens, self.max_context_tokens - prompt_tokens)

    async def run(
        self,
        problem: Problem,
        rollout_index: int,
        *,
        on_progress: LengthCallback | None = None,
        resume: Trajectory | None = None,
        preemption: Preemption | None = None,
    ) -> Trajectory:
        """One attempt at `problem`, or the rest of `resume`. Never raises, except when it is cancelled.

        `on_progress` is told the trajectory's length in tokens after every turn, and about once a second inside
        one. A trajectory that the judge or a deadline spoilt ends as INFRASTRUCTURE with the reason in `error`; one that
        was parked comes back without a finish reason: by the end of the phase, by `preemption`, or because the engine
        is gone (`engine_gone`), so that another engine can continue it from the same tokens.
        """
        started = time.monotonic()
        preemption = preemption or Preemption()
        parked = False
        trajectory = resume or Trajectory(
            query_id=problem.query_id, rollout_index=rollout_index, prompt_ids=[]
        )
        try:
            if not trajectory.prompt_ids:
                trajectory.prompt_ids = self.template.prompt_ids(problem)
            if trajectory.session:
                self.tools.judge.expect_session(trajectory.session)
            deadline = started + self.timeout_s - trajectory.seconds
            turns = Turns(self, trajectory, deadline, on_progress, preemption)
            trajectory.finish_reason = await turns.until_end()
        except Parked:
            parked = not self.cutting
            trajectory.finish_reason = None if parked else FinishReason.CUT
        except EngineGone as error:
            self.engine_gone = self.engine_gone or str(error)
            parked = not self.cutting
            trajectory.finish_reason = None if parked else FinishReason.CUT
        except Interrupted as error:
            trajectory.finish_reason = FinishReason.INFRASTRUCTURE
            trajectory.error = str(error)
        except Exception as error:
            log.exception("trajectory %s#%d failed", problem.query_id, rollout_index)
            trajectory.finish_reason = FinishReason.INFRASTRUCTURE
            trajectory.error = f"{type(error).__name__}: {error}"
        finally:
            if not parked:  # its interpreter goes on with it
                await self.tools.close(trajectory)
        trajectory.seconds += time.monotonic() - started
        if parked and not self.parking and not self.engine_gone:
            self.stats.preemptions += 1
        else:
            self.stats.finish(trajectory)
        return trajectory

    async def preempt(self, preemption: Preemption) -> None:
        """Park the trajectory that runs with `preemption`, keeping its tokens; a tool call under way is waited for."""
        preemption.asked = True
        with contextlib.suppress(EngineLost, EngineError):  # then its turn is over anyway
            await self.engine.abort(preemption)


class Turns:
    """The state of one running trajectory."""

    def __init__(
        self,
        loop: AgentLoop,
        trajectory: Trajectory,
        deadline: float,
        on_progress: LengthCallback | None,
        preemption: Preemption,
    ) -> None:
        self.loop = loop
        self.trajectory = trajectory
        self.deadline = deadline
        self.on_progress = on_progress
        self.preemption = preemption
        self.budget = loop.response_budget(len(trajectory.prompt_ids))
        self.malformed_turns = 0
        self.identical_calls = 0
        self.last_call: list[tuple[str, Any]] = []
        if self.budget <= 0:
            raise Interrupted(
                f"the prompt of {trajectory.query_id} has {len(trajectory.prompt_ids)} tokens and leaves no room "
                f"in runner.seq_length={loop.max_context_tokens}; lower data.max_prompt_length or raise seq_length"
            )
        for text in trajectory.assistant_texts:  # before it was parked
            self._gone_astray(parse_tool_calls(text, loop.template.schemas))

    @property
    def parking(self) -> bool:
        return self.loop.parking or self.preemption.asked

    async def until_end(self) -> FinishReason:
        trajectory, settings, template = self.trajectory, self.loop.settings, self.loop.template
        while True:
            if await self._assistant_turn() == "length":
                return FinishReason.LENGTH_LIMIT
            calls = parse_tool_calls(trajectory.assistant_texts[-1], template.schemas)
            if not calls:
                return FinishReason.ANSWERED
            if trajectory.num_turns >= settings.max_assistant_turns:
                return FinishReason.TURN_LIMIT
            if (ending := self._gone_astray(calls)) is not None:
                return ending
            ids = template.tool_response_ids(await self._run_tools(calls))
            if len(trajectory.response_ids) + len(ids) >= self.budget:  # a token at least must follow
                return FinishReason.TOOL_RESPONSE_TOO_LONG
            trajectory.response_ids += ids
            trajectory.loss_mask += [0] * len(ids)
            trajectory.rollout_logprobs += [0.0] * len(ids)
            self._report_progress(0)

    def _gone_astray(self, calls: list[ParsedCall]) -> FinishReason | None:
        """Endings of a model that goes round in circles; both are off unless the YAML sets them."""
        settings = self.loop.settings
        self.malformed_turns = 0 if any(call.valid for call in calls) else self.malformed_turns + 1
        if settings.max_malformed_turns is not None and self.malformed_turns >= settings.max_malformed_turns:
            return FinishReason.MALFORMED_CALLS
        these = [(call.name, call.arguments) for call in calls if call.valid]
        self.identical_calls = self.identical_calls + 1 if these and these == self.last_call else 1
        self.last_call = these
        if settings.max_identical_calls is not None and self.identical_calls >= settings.max_identical_calls:
            return FinishReason.REPEATED_CALL
        return None

    def _report_progress(self, more: int) -> None:
        if self.on_progress is not None:
            self.on_progress(self.trajectory.length + more)

    def _seconds_left(self) -> float:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise Interrupted(f"the trajectory took longer than {self.loop.timeout_s:.0f} s")
        return seconds

    # ------------------------------------------------------------------------------------ generation

    async def _assistant_turn(self) -> str:
        """Generate one turn, or the rest of one that was parked. Returns why it ended: stop or length."""
        trajectory = self.trajectory
        if trajectory.open_turn is None:
            trajectory.open_turn = len(trajectory.response_ids)
        result = await self._generate()
        self._append_generated(result)
        if result.finish_reason == "abort":
            raise Parked if self.parking else Interrupted("the engine aborted the request")
        turn = trajectory.response_ids[trajectory.open_turn :]
        trajectory.assistant_texts.append(self.loop.template.decode(turn))
        trajectory.open_turn = None
        return result.finish_reason

    async def _generate(self) -> GenerateResult:
        """After the loss of an engine the turn starts again, from the same tokens."""
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
            await self._settled()
            if self.parking:
                raise Parked
            begun = time.monotonic()
            stats.enter_engine()
            try:
                result = await self.loop.engine.generate(
                    input_ids,
                    parameters,
                    timeout_s=self._seconds_left(),
                    on_tokens=self._report_progress,
                    owner=self.preemption,
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
                stats.leave_engine()
                stats.generate_seconds += time.monotonic() - begun
            stats.cached_tokens += result.cached_tokens
            stats.prefill_tokens += result.prompt_tokens - result.cached_tokens
            stats.retractions += result.retractions
            return result

    async def _settled(self) -> None:
        """An engine that restarts, or changes its weights, takes this turn when it has done so."""
        try:
            async with asyncio.timeout(self._seconds_left()):  # must not yield between this and the request
                await self.loop.engine.settled()
        except TimeoutError as error:
            raise Interrupted(
                "the engine restarted or changed its weights until the trajectory's deadline"
            ) from error

    async def _recover(self, error: EngineLost) -> None:
        log.warning("trajectory %s#%d: %s", self.trajectory.query_id, self.trajectory.rollout_index, error)
        try:
            await asyncio.wait_for(self.loop.engine.recover(), self._seconds_left())
        except TimeoutError:
            raise Interrupted(f"no engine came back within the trajectory's deadline: {error}") from error
        except EngineLost as still:
            raise EngineGone(str(still)) from still

    def _append_generated(self, result: GenerateResult) -> None:
        trajectory = self.trajectory
        offset = len(trajectory.response_ids)
        trajectory.response_ids += result.token_ids
        trajectory.loss_mask += [1] * len(result.token_ids)
        trajectory.rollout_logprobs += result.logprobs
        for start, end, version in result.version_spans:
            trajectory.version_spans.append(VersionSpan(offset + start, offset + end, version))
        self._report_progress(0)

    # ----------------------------------------------------------------------------------------- tools

    async def _run_tools(self, calls: list[ParsedCall]) -> list[str]:
        """The responses as the model reads them, in order."""
        self.preemption.at_tool = True
        try:
            done, responses = await self.loop.tools.run(
                self.trajectory, calls, self._seconds_left, self.loop.stats
            )
        finally:
            self.preemption.at_tool = False
        self.trajectory.tool_calls += done
        lost = [call for call in done if call.outcome is ToolOutcome.INFRASTRUCTURE]
        if lost:
            raise Interrupted(f"tool call lost: {lost[0].response_text}")
        return responses
