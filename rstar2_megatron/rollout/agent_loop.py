"""Trajectories on one engine: each runs its turns (`turns`) until a typed ending, is parked, or is spoilt.

A trajectory can be parked at any token and go on later, under other weights.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Protocol

from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, GenerateResult
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool_runner import Judge, ToolRunner
from rstar2_megatron.rollout.turns import Interrupted, LengthCallback, Parked, Preemption, Turns
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory

log = logging.getLogger(__name__)


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
        one. A trajectory that the engine or the judge spoilt ends as INFRASTRUCTURE with the reason in `error`; one
        that was parked, by the end of the phase or by `preemption`, comes back without a finish reason.
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
        if parked and not self.parking:
            self.stats.preemptions += 1
        else:
            self.stats.finish(trajectory)
        return trajectory

    async def preempt(self, preemption: Preemption) -> None:
        """Park the trajectory that runs with `preemption`, keeping its tokens; a tool call under way is waited for."""
        preemption.asked = True
        with contextlib.suppress(EngineLost, EngineError):  # then its turn is over anyway
            await self.engine.abort(preemption)
