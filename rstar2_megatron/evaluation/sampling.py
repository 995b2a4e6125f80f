"""Draws k trajectories per problem from a model directory: engine, agent loop, judge and grader as in training.

A caller needs only `sample(problems, settings, out)`:

    settings = SamplingSettings.of(load_settings(NAME), spec, model="DIR")
    samples = sample(problems, settings, Path("out/trajectories.jsonl"))

It starts SGLang engines, grading processes, and the Code Judge with its Redis unless the settings name a running judge. It
writes every trajectory to `out` as it ends. It stops what it started, also when it is interrupted. A further call with the
same `out` draws only the missing attempts. No Ray: one process drives all engines of this node.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from rstar2_megatron.evaluation.attempt_queue import Attempt, AttemptQueue, run_together
from rstar2_megatron.evaluation.samples import Sample, SampleFile
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.code_judge import CodeJudgeService
from rstar2_megatron.records.trajectory_row import trajectory_row
from rstar2_megatron.reward.grade import grade_trajectories
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.rollout.build import make_agent_loop, make_engine_budget
from rstar2_megatron.rollout.chat import ChatTemplate, check_tools_in_prompt
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.services.run_temporary import RunTemporary
from rstar2_megatron.settings.schema import (
    AgentLoopSettings,
    CodeJudgeSettings,
    RewardSettings,
    RolloutSettings,
    Settings,
)
from rstar2_megatron.trajectory import Problem, Trajectory

_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "max_assistant_turns")


@dataclass(frozen=True)
class SamplingSettings:
    """The part of a run's settings that sampling needs.

    `spec.samples` is k. `max_context_tokens` bounds prompt and response together. `num_engines` engines run on this
    node, each on `rollout.tensor_parallel_size` GPUs (on a machine without GPUs one engine is sensible).
    """

    rollout: RolloutSettings
    agentloop: AgentLoopSettings
    codejudge: CodeJudgeSettings
    reward: RewardSettings
    spec: RolloutSpec
    max_context_tokens: int
    num_engines: int = 1
    seed: int = 1234

    @classmethod
    def of(
        cls,
        settings: Settings,
        spec: RolloutSpec,
        *,
        model: str | Path,
        max_context_tokens: int | None = None,
        num_engines: int = 1,
    ) -> SamplingSettings:
        """A run's settings with another model (a Hugging Face directory) and another sampling."""
        path = settings.rollout.model.model_copy(update={"model_path": str(model)})
        return cls(
            rollout=settings.rollout.model_copy(update={"model": path}),
            agentloop=settings.agentloop.model_copy(update={"max_assistant_turns": spec.max_assistant_turns}),
            codejudge=settings.tools.codejudge,
            reward=settings.reward,
            spec=spec,
            max_context_tokens=max_context_tokens or settings.runner.seq_length,
            num_engines=num_engines,
            seed=settings.actor.seed,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that all samples of one file share: model, prompts, sampling, limits of the judge, grader."""
        model = Path(self.rollout.model.model_path)
        files = sorted(model.glob("*.safetensors"))
        return {
            "model": str(model.resolve()),
            "weights": [[file.name, file.stat().st_size, int(file.stat().st_mtime)] for file in files],
            "precision": self.rollout.model.precision,
            "sampling": {name: getattr(self.spec, name) for name in _SAMPLING},
            "max_context_tokens": self.max_context_tokens,
            "agentloop": self.agentloop.model_dump(mode="json"),
            "judge": self.codejudge.model_dump(mode="json", include={"time_limit_s", "memory_mb"}),
            "reward": self.reward.model_dump(mode="json", exclude={"group_name", "num_workers"}),
        }


def sample(
    problems: Sequence[Problem],
    settings: SamplingSettings,
    out: str | Path,
    *,
    label: str = "sampling",
) -> list[Sample]:
    """`settings.spec.samples` attempts at each problem, graded, in the order of problems and attempts.

    out: jsonl of trajectories (`trajectory_row`); attempts that it already holds are not drawn again. An attempt that the
        infrastructure spoiled is tried `attempt_queue.MAX_TRIES` times, then left out; a later call tries it again.
    Logs of engines and judge go to `logs/` beside `out`. Sampling is not reproducible token by token: an engine's batches
    depend on timing.

    Raises SamplesError when `out` was made with other settings or problems, ValueError for problems that cannot be
    sampled (no room in the context, a trajectory that never fits the KV cache), EngineLost, ServiceError, GraderLost.
    SIGINT ends it with KeyboardInterrupt, SIGTERM with asyncio.CancelledError, both after everything is stopped.
    """
    file = SampleFile(out, settings.identity)
    found = file.open(problems)
    keys = [(p.query_id, i) for p in problems for i in range(settings.spec.samples)]
    if any(key not in found for key in keys):
        temporary = RunTemporary()
        try:
            asyncio.run(_Sampler(problems, settings, file, found, label).run())
        finally:
            temporary.remove()
    return [found[key] for key in keys if key in found]


@dataclass
class _Sampler:
    """One call of `sample`: services up, engines pulling attempts, services down."""

    problems: Sequence[Problem]
    settings: SamplingSettings
    file: SampleFile
    found: dict[tuple[str, int], Sample]
    label: str

    def __post_init__(self) -> None:
        self.logs = self.file.path.parent.resolve() / "logs"

    async def run(self) -> None:
        settings = self.settings
        if threading.current_thread() is threading.main_thread():
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.rollout.model.model_path)
        template = ChatTemplate(tokenizer, settings.agentloop)
        self._check_prompts(template)
        attempts = [
            Attempt(group, problem, index)
            for group, problem in enumerate(self.problems)
            for index in range(settings.spec.samples)
            if (problem.query_id, index) not in self.found
        ]
        self.logs.mkdir(parents=True, exist_ok=True)
        async with contextlib.AsyncExitStack() as stack:
            service = CodeJudgeService(settings.codejudge, self.logs / "judge.log")
            stack.callback(service.stop)
            service.begin()
            engines = [self._engine(i) for i in range(settings.num_engines)]
            for engine in engines:
                stack.push_async_callback(engine.close)
            _, url = await asyncio.gather(
                asyncio.gather(*(engine.start() for engine in engines)), asyncio.to_thread(service.wait_ready)
            )
            judge = await stack.enter_async_context(JudgeClient.of(url, settings.codejudge))
            reward = settings.reward
            pool = stack.enter_context(GraderPool(reward.num_workers, reward.timeout_s, mode=reward.mode))
            self.attempts = AttemptQueue(attempts, settings.rollout.slice_size)
            with tqdm(total=len(attempts), desc=self.label, disable=None) as bar:
                await run_together(self._serve(engine, judge, template, pool, bar) for engine in engines)

    def _check_prompts(self, template: ChatTemplate) -> None:
        check_tools_in_prompt(template.prompt_text(self.problems[0]), template.schemas)
        for problem in self.problems:
            tokens, most = len(template.prompt_ids(problem)), self.settings.max_context_tokens
            if tokens >= most:
                raise ValueError(
                    f"the prompt of {problem.query_id} has {tokens} tokens and leaves no room for an answer in "
                    f"{most}; leave the problem out or raise the context"
                )

    def _engine(self, number: int) -> EngineClient:
        settings, rollout = self.settings, self.settings.rollout
        if torch.cuda.is_available():  # the engines of one process share its devices
            arguments = {"base_gpu_id": number * rollout.tensor_parallel_size, **rollout.sglang.server_args}
            sglang = rollout.sglang.model_copy(update={"server_args": arguments})
            rollout = rollout.model_copy(update={"sglang": sglang})
        return EngineClient(
            rollout,
            seed=settings.seed + number,
            name=f"engine {number}",
            log_path=self.logs / f"engine-{number}.log",
            max_context_tokens=settings.max_context_tokens,
        )

    async def _serve(
        self, engine: EngineClient, judge: JudgeClient, template: ChatTemplate, pool: GraderPool, bar: Any
    ) -> None:
        """Keep one engine busy until no attempt is left."""
        settings = self.settings
        loop = make_agent_loop(
            engine, judge, template, settings.spec, settings.rollout, settings.max_context_tokens
        )
        budget = make_engine_budget(engine, settings.rollout)

        async def finished(work: Slice, trajectory: Trajectory) -> None:
            if trajectory.usable:
                await grade_trajectories(pool, work.problem, [trajectory])
            row = trajectory_row(work.problem, trajectory)
            self.file.append(row)
            if trajectory.usable:
                self.found[trajectory.query_id, trajectory.rollout_index] = Sample.from_row(row)
                bar.update()
            self.attempts.ended(work.group, trajectory.rollout_index, usable=trajectory.usable)

        runner = TrajectoryRunner(loop, AdmissionQueue(budget), self.attempts.next, finished)
        engine.on_report = runner.observe
        await runner.run()
