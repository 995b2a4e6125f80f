"""The services that sampling and search run on: engines of this node, the Code Judge, grading processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rstar2_megatron.evaluation.model_directory import find_run_config
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.records.model_format import wording_note
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate, check_tools_in_prompt
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.services.run_temporary import RunTemporary
from rstar2_megatron.settings.schema import AgentLoopSettings, CodeJudgeSettings, RewardSettings, RolloutSettings, Settings
from rstar2_megatron.trajectory import Problem


def weights_of(model: Path) -> list[list[Any]]:
    """Name, size and time of each file of weights: what tells one model of a directory from another."""
    files = sorted(model.glob("*.safetensors"))
    return [[file.name, file.stat().st_size, int(file.stat().st_mtime)] for file in files]


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
        return {
            "model": str(model.resolve()),
            "weights": weights_of(model),
            **({} if self.spec.seed is None else {"request_seed": self.spec.seed}),
            "precision": self.rollout.model.precision,
            "sampling": {**self.spec.sampling.model_dump(), "max_assistant_turns": self.spec.max_assistant_turns},
            "max_context_tokens": self.max_context_tokens,
            "agentloop": self.agentloop.model_dump(mode="json"),
            "judge": self.codejudge.model_dump(mode="json", include={"time_limit_s", "memory_mb"}),
            "reward": self.reward.model_dump(mode="json", exclude={"group_name", "num_workers"}),
        }


@dataclass(frozen=True, slots=True)
class Services:
    engines: list[EngineClient]
    judge: JudgeClient
    template: ChatTemplate
    rewards: Rewards

    def agent_loop(self, engine: EngineClient, settings: SamplingSettings) -> AgentLoop:
        """The agent loop of one of the engines, with the sampling of `settings`."""
        return AgentLoop.of(engine, self.judge, self.template, settings.spec, settings.rollout, settings.max_context_tokens)


@contextlib.asynccontextmanager
async def running_services(settings: SamplingSettings, problems: Sequence[Problem], logs: Path) -> AsyncIterator[Services]:
    """Start everything, and stop it at the end. SIGTERM and SIGHUP cancel the task that entered, in the main thread.

    Raises ValueError for a problem whose prompt leaves no room in the context, EngineLost, JudgeServiceError.
    """
    if threading.current_thread() is threading.main_thread():
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.rollout.model.model_path)
    template = ChatTemplate(tokenizer, settings.agentloop)
    _check_prompts(template, problems, settings.max_context_tokens)
    model = Path(settings.rollout.model.model_path)
    first, of_a_run = template.prompt_text(problems[0]), find_run_config(model) is not None
    if said := wording_note(model, settings.agentloop, settings.reward, first, trained_here=of_a_run):
        print(f"note: {said}", file=sys.stderr)
    logs.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(RunTemporary().remove)  # after the processes that leave files there
        service = JudgeService(settings.codejudge, logs / "judge.log", needed=settings.agentloop.needs_judge)
        stack.callback(service.stop)
        service.begin()
        engines = [_engine(settings, i, logs) for i in range(settings.num_engines)]
        for engine in engines:
            stack.push_async_callback(engine.close)
        _, url = await asyncio.gather(
            asyncio.gather(*(engine.start() for engine in engines)), asyncio.to_thread(service.wait_ready)
        )
        service.watch()
        judge = await stack.enter_async_context(JudgeClient.of(url, settings.codejudge))
        rewards = stack.enter_context(Rewards(settings.reward))
        yield Services(engines, judge, template, rewards)


def _check_prompts(template: ChatTemplate, problems: Sequence[Problem], most: int) -> None:
    check_tools_in_prompt(template.prompt_text(problems[0]), template.schemas)
    for problem in problems:
        tokens = len(template.prompt_ids(problem))
        if tokens >= most:
            raise ValueError(
                f"the prompt of {problem.query_id} has {tokens} tokens and leaves no room for an answer in "
                f"{most}; leave the problem out or raise the context"
            )


def _engine(settings: SamplingSettings, number: int, logs: Path) -> EngineClient:
    rollout = settings.rollout
    if torch.cuda.is_available():  # the engines of one process share its devices
        arguments = {"base_gpu_id": number * rollout.tensor_parallel_size, **rollout.sglang.server_args}
        sglang = rollout.sglang.model_copy(update={"server_args": arguments})
        rollout = rollout.model_copy(update={"sglang": sglang})
    return EngineClient(
        rollout,
        seed=settings.seed + number,
        name=f"engine {number}",
        log_path=logs / f"engine-{number}.log",
        max_context_tokens=settings.max_context_tokens,
    )
