"""Runs trajectories on one engine: each turn's generation and tool calls; `turn_loops` composes the turns.

Tokens in, tokens out. Generated token ids are appended unchanged, tool responses are tokenised once, and text is decoded
only to find tool calls. A trajectory can be parked at any token and resumed later, under newer weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import numpy as np

from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.records.trace import TRACE
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.dialogue import ANSWERED_OTHERWISE, Dialogue
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import INTERRUPTED, EngineError, EngineLost, GenerateResult, GenerationTimeout
from rstar2_megatron.rollout.engine.seeds import request_seed
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool import Judge
from rstar2_megatron.rollout.tool_call import ParsedCall, check_call
from rstar2_megatron.rollout.tool_runner import ToolRunner
from rstar2_megatron.rollout.turn_loops import TurnLoops
from rstar2_megatron.settings.schema import AgentLoopSettings, RolloutSettings, SamplingParams
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory, VersionSpan

log = logging.getLogger(__name__)

LengthCallback = Callable[[int, int], None]  # of the prompt's and the response's tokens


class Interrupted(Exception):
    """Infrastructure ended the trajectory, not the model."""


class Parked(Exception):
    """The trajectory stops unfinished: the phase ended, the scheduler preempted it, or the engine is lost for good."""


@dataclass(slots=True, eq=False)
class Preemption:
    """Preemption state of one running trajectory, shared by the loop and the scheduler (`AgentLoop.preempt`)."""

    asked: bool = False
    at_tool: bool = False  # a tool call is running


@dataclass(frozen=True, slots=True)
class OneTurn:
    """Lets `AgentLoop.run` end after one assistant turn and its tool calls: a step of a search."""

    max_tokens: int  # longest turn; a turn that reaches it ends the trajectory as LENGTH_LIMIT
    seed: int  # of the turn's sampling; it counts in an engine with enable_deterministic_inference


@dataclass(eq=False)
class AgentLoop:
    """Runs trajectories on one engine. Any number of `run` calls may run concurrently.

    `max_context_tokens` bounds prompt and response together (runner.seq_length). `timeout_s` is the deadline of one
    trajectory with all its turns and tool calls. With `seed` every request has a seed (`engine.seeds`). `stats` collects
    counters.
    """

    engine: EngineClient
    judge: InitVar[Judge]
    template: ChatTemplate
    settings: AgentLoopSettings
    sampling: SamplingParams
    _: KW_ONLY
    max_context_tokens: int
    timeout_s: float
    seed: int | None = None
    texts: bool = False  # whether ended trajectories get their `response_text`
    stats: RolloutStats = field(default_factory=RolloutStats)
    parking: bool = False  # set before aborting the engine's requests: every running trajectory is parked
    cutting: bool = False  # with `parking`: a parked trajectory ends as CUT
    engine_gone: str = ""  # reason of the engine's loss; every running trajectory is then parked

    def __post_init__(self, judge: Judge) -> None:
        self.tools = ToolRunner(judge, self.settings, self.template.tools)
        self.turn_loops = TurnLoops(self.settings)

    @classmethod
    def of(
        cls,
        engine: EngineClient,
        judge: Judge,
        template: ChatTemplate,
        spec: RolloutSpec,
        rollout: RolloutSettings,
        max_context_tokens: int,
    ) -> AgentLoop:
        """With the sampling and the limits of `spec`."""
        return cls(
            engine,
            judge,
            template,
            template.settings.model_copy(update={"max_assistant_turns": spec.max_assistant_turns}),
            spec.sampling,
            max_context_tokens=max_context_tokens,
            timeout_s=rollout.trajectory_timeout_s,
            seed=spec.seed,
            texts=spec.texts,
        )

    def response_budget(self, prompt_tokens: int) -> int:
        """Largest response in tokens, tool responses included."""
        return min(self.sampling.max_new_tokens, self.max_context_tokens - prompt_tokens)

    async def run(
        self,
        problem: Problem,
        rollout_index: int,
        *,
        on_progress: LengthCallback | None = None,
        resume: Trajectory | None = None,
        preemption: Preemption | None = None,
        one_turn: OneTurn | None = None,
        number: int = 0,
    ) -> Trajectory:
        """One attempt at `problem`, or the rest of `resume`. Raises only when it is cancelled. number: of `request_seed`.

        With `one_turn` it ends after one more turn, without a finish reason when another turn may follow.

        `on_progress` gets the tokens of prompt and response after every turn, and about once a second within a turn.
        A trajectory that the judge or a deadline spoiled ends as INFRASTRUCTURE, with the reason in `error`.
        A parked trajectory has no finish reason, and any engine can continue it from the same tokens. It is parked at the
        end of the phase, by `preemption`, or when the engine is lost for good (`engine_gone`).
        """
        started = time.monotonic()
        preemption = preemption or Preemption()
        parked = False
        trajectory = resume or Trajectory(problem.query_id, rollout_index)
        try:
            deadline = started + self.timeout_s - trajectory.seconds
            async with self.turn_loops.begin(problem, deadline, trajectory.note_failed_close) as turn_loop:
                trajectory.opening = turn_loop.opening
                if not len(trajectory.prompt_ids):
                    trajectory.prompt_ids = np.array(self.template.prompt_ids(turn_loop.problem), np.int32)
                elif self._reset_otherwise(turn_loop.problem, trajectory):
                    raise UserCodeError(f"{turn_loop.label}: reset said otherwise {ANSWERED_OTHERWISE}")
                self.tools.expect(trajectory)
                turns = RunningTrajectory(self, problem, trajectory, deadline, on_progress, preemption, one_turn, number)
                dialogue = Dialogue(turns, turn_loop.label)
                trajectory.environment_reward = await turn_loop.run(dialogue)  # what is recorded already is replayed
                trajectory.finish_reason = dialogue.ending
                if self.texts and one_turn is None:
                    trajectory.response_text = self.template.plain(trajectory.response_ids)
        except Parked:
            parked = not self.cutting
            trajectory.finish_reason = None if parked else FinishReason.CUT
        except UserCodeError as error:
            trajectory.finish_reason, trajectory.error = FinishReason.INFRASTRUCTURE, str(error)
            trajectory.user_error = error.kind
        except Interrupted as error:
            trajectory.finish_reason, trajectory.error = FinishReason.INFRASTRUCTURE, str(error)
        except Exception as error:
            log.exception("trajectory %s#%d failed", problem.query_id, rollout_index)
            trajectory.finish_reason, trajectory.error = FinishReason.INFRASTRUCTURE, f"{type(error).__name__}: {error}"
        finally:
            if not parked:  # a parked trajectory keeps its interpreter
                await self.tools.close(trajectory)
        trajectory.seconds += time.monotonic() - started
        if parked and not self.parking and not self.engine_gone:
            self.stats.preemptions += 1
        elif one_turn is None:  # a step is no trajectory
            self.stats.finish(trajectory)
        return trajectory

    def _reset_otherwise(self, problem: Problem, trajectory: Trajectory) -> bool:
        """Whether an environment has put other words to the problem than when the trajectory began."""
        return self.settings.environment is not None and self.template.prompt_ids(problem) != trajectory.prompt_ids.tolist()

    def preempt(self, preemption: Preemption) -> None:
        """Park the trajectory that runs with `preemption` and keep its tokens. A running tool call is finished first."""
        preemption.asked = True
        self.engine.abort(preemption)


@dataclass(eq=False)
class RunningTrajectory:
    """The engine's and the tools' side of one trajectory while it runs."""

    loop: AgentLoop
    problem: Problem
    trajectory: Trajectory
    deadline: float
    on_progress: LengthCallback | None
    preemption: Preemption
    one_turn: OneTurn | None
    number: int
    malformed_turns: int = 0
    identical_calls: int = 0
    last_call: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        self.template = self.loop.template
        self.max_turns = self.loop.settings.max_assistant_turns
        prompt_tokens = len(self.trajectory.prompt_ids)
        self.budget = self.loop.response_budget(prompt_tokens)
        if self.budget <= 0:
            raise Interrupted(
                f"the prompt of {self.trajectory.query_id} has {prompt_tokens} tokens and leaves no room in "
                f"runner.seq_length={self.loop.max_context_tokens}; lower data.max_prompt_length or raise seq_length"
            )

    @property
    def parking(self) -> bool:
        return self.loop.parking or self.preemption.asked

    def degenerate_ending(self, calls: list[ParsedCall]) -> FinishReason | None:
        """The ending of a model that repeats itself, if any. Both rules are off unless the YAML sets them."""
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

    def report_progress(self, more: int) -> None:
        if self.on_progress is not None:
            self.on_progress(self.trajectory.prompt_tokens, self.trajectory.response_tokens + more)

    def seconds_left(self) -> float:
        """Until the trajectory's deadline. Raises Interrupted behind it."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise Interrupted(f"the trajectory took longer than {self.loop.timeout_s:.0f} s")
        return seconds

    # ------------------------------------------------------------------------------------ generation

    async def assistant_turn(self) -> str:
        """Generate one turn, or the rest of a parked one. Returns the finish reason: stop or length."""
        trajectory = self.trajectory
        if trajectory.open_turn is None:
            trajectory.open_turn = len(trajectory.response_ids)
        reason = INTERRUPTED
        while reason == INTERRUPTED:  # by a weight update: go on from these tokens with the new weights
            with TRACE.span("generate") as span:
                result = await self._generate()
                span.update(tokens=len(result.token_ids), cached=result.cached_tokens)
            self._append_generated(result)
            reason = self._reason(result)
        if reason == "abort":
            raise Parked if self.parking else Interrupted("the engine aborted the request")
        turn = trajectory.response_ids[trajectory.open_turn :]
        trajectory.assistant_texts.append(self.loop.template.decode(turn))
        trajectory.open_turn = None
        return reason

    def _reason(self, result: GenerateResult) -> str:
        """Why generation ended. SGLang does not say of an aborted request that its last token had ended the turn."""
        if result.finish_reason in ("abort", INTERRUPTED) and len(result.token_ids):
            if int(result.token_ids[-1]) in self.loop.template.stop_token_ids:
                return "stop"
            if len(self.trajectory.response_ids) >= self.budget:
                return "length"
        return result.finish_reason

    async def _generate(self) -> GenerateResult:
        """Generate from the current tokens. After an engine loss the request is repeated from the same tokens."""
        parameters: dict[str, Any] = {
            **self.loop.sampling.model_dump(),  # whose names are SGLang's
            "max_new_tokens": self.budget - len(self.trajectory.response_ids),
            "stop_token_ids": self.loop.template.stop_token_ids,
        }
        if self.one_turn is not None:
            parameters["max_new_tokens"] = min(parameters["max_new_tokens"], self.one_turn.max_tokens)
            parameters["sampling_seed"] = self.one_turn.seed
        elif self.loop.seed is not None:
            t = self.trajectory
            parameters["sampling_seed"] = request_seed(self.loop.seed, self.number, t.query_id, t.rollout_index, t.num_turns)
        input_ids = np.concatenate([self.trajectory.prompt_ids, self.trajectory.response_ids])
        stats = self.loop.stats
        while True:
            late = "the engine restarted or changed its weights until the trajectory's deadline"
            await self._within_deadline(self.loop.engine.wait_until_ready, late)  # no yield between this and the request
            if self.parking:
                raise Parked
            with stats.at_engine():
                try:
                    result = await self.loop.engine.generate(
                        input_ids,
                        parameters,
                        timeout_s=self.seconds_left(),
                        on_tokens=self.report_progress,
                        owner=self.preemption,
                    )
                except (GenerationTimeout, EngineError) as error:
                    raise Interrupted(str(error)) from error
                except EngineLost as error:
                    await self._recover(error)
                    stats.engine_retries += 1
                    continue
            stats.cached_tokens += result.cached_tokens
            stats.prefill_tokens += result.prompt_tokens - result.cached_tokens
            stats.retractions += result.retractions
            return result

    async def _recover(self, error: EngineLost) -> None:
        late = f"no engine came back within the trajectory's deadline: {error}"
        try:
            await self._within_deadline(self.loop.engine.recover, late)
        except EngineLost as still:
            self.loop.engine_gone = self.loop.engine_gone or str(still)
            raise Parked from still

    async def _within_deadline(self, wait: Callable[[], Awaitable[None]], late: str) -> None:
        try:
            async with asyncio.timeout(self.seconds_left()):
                await wait()
        except TimeoutError as error:
            raise Interrupted(late) from error

    def _append_generated(self, result: GenerateResult) -> None:
        trajectory = self.trajectory
        offset = len(trajectory.response_ids)
        trajectory.append(result.token_ids, result.logprobs)
        for start, end, version in result.version_spans:
            trajectory.version_spans.append(VersionSpan(offset + start, offset + end, version))
        self.report_progress(0)

    # ----------------------------------------------------------------------------------------- tools

    def check_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        """The call that a loop of the user makes."""
        return check_call(name, arguments, self.template.schemas)

    async def run_tools(self, calls: list[ParsedCall]) -> tuple[list[ToolCall], list[str]]:
        """The calls that were run, noted in the trajectory, and the responses to all."""
        self.preemption.at_tool = True
        try:
            done, responses = await self.loop.tools.run(
                self.problem, self.trajectory, calls, self.seconds_left, self.loop.stats
            )
        finally:
            self.preemption.at_tool = False
        self.trajectory.tool_calls += done
        lost = [call for call in done if call.outcome is ToolOutcome.INFRASTRUCTURE]
        if lost:
            raise Interrupted(f"{'' if self.trajectory.user_error else 'tool call lost: '}{lost[0].response_text}")
        return done, responses
