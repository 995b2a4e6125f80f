"""Rollout workers, reward worker and driver of a phase in one process, without Ray, so that one clock counts their CPU time.

All classes are the run's own. Replaced are what carries messages (Ray's channel by queues), what starts an engine's process
(`EngineChild.start`), SGLang and the judge (`benchmarks/paper_step/model.py`). The socket to an engine is a real one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from benchmarks.paper_step.model import PaperEngine, PaperJudge, PaperSGLang, shape_of
from rstar2_megatron.algorithm.batch import TokenBlock
from rstar2_megatron.algorithm.credit import advantages_of
from rstar2_megatron.algorithm.selection import Selection
from rstar2_megatron.cluster.channel import ENDED, TO_DRIVER
from rstar2_megatron.cluster.phases.server import PhaseEvents, PhaseServer
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.cluster.rollout_worker import RolloutWorker
from rstar2_megatron.records.run_files import RunFiles
from rstar2_megatron.records.samples import choose_shown
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine import child, process
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import GenerateResult, write_message
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.token_store import give_back
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training.metrics import step_metrics
from rstar2_megatron.trajectory import Problem


class Queues:
    """RLinf's channel, as far as the workers use it."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)

    def put(self, item: Any, key: str, async_op: bool = False) -> Any:
        self._queues[key].put_nowait(item)
        return SimpleNamespace(async_wait=self._nothing)

    def get(self, key: str, async_op: bool = True) -> Any:
        return SimpleNamespace(async_wait=self._queues[key].get)

    async def _nothing(self) -> None: ...


class PaperChild(child.EngineChild):
    """Runs the engine's server as a task of this process."""

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(process._EngineServer(theirs).run())
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._tasks = [asyncio.create_task(self._read(reader)), serving]
        write_message(self._writer, [0, "start", {"server_args": self._arguments}])
        await self._ready.wait()


class PaperClient(EngineClient):
    """Names a request's trajectory to the stand-in."""

    async def _start_child(self) -> None:
        self._child = PaperChild(self.settings, self._arguments, name=self.name, log_path=self._log_path)
        self._child.on_report = self._take_report
        await self._child.start()

    async def generate(self, input_ids: Any, sampling: dict[str, Any], **keywords: Any) -> GenerateResult:
        return await super().generate(input_ids, {**sampling, "trajectory": id(keywords["owner"])}, **keywords)


class LocalRollout(RolloutWorker):
    """A rollout worker that is no worker of RLinf."""

    def __init__(self, settings: Settings, template: ChatTemplate, number: int) -> None:
        self._settings, self._template, self._number, self._rank = settings, template, number, number
        self._group_name, self._device = "engines", "cpu"
        self._judge: Any = PaperJudge(number)
        self._engine = PaperClient(settings.rollout, seed=number)
        self._budget = self._runner = self._generating = None
        self._judge_counters = Counter()


class LocalReward(RewardWorker):
    """A reward worker that is no worker of RLinf."""

    def __init__(self, settings: Settings) -> None:
        self._rewards = Rewards(settings.reward)


class Phase:
    """Engines, reward worker and driver, ready for one step of `problems`."""

    def __init__(self, settings: Settings, problems: Sequence[Problem], directory: Path) -> None:
        self.settings, self.problems = settings, problems
        self.spec = RolloutSpec.training(settings)
        self.template = ChatTemplate(AutoTokenizer.from_pretrained(directory / "tokenizer"), settings.agentloop)
        self.selection = Selection(settings.algorithm)
        self.files = RunFiles(directory, settings.runner.model_copy(update={"save_rollouts": True}))
        self.workers: list[LocalRollout] = []

    async def start(self, engines: int, mean_tokens: int, max_tokens: int) -> None:
        shape = shape_of(mean_tokens, max_tokens)
        longest = self.settings.runner.seq_length

        def create(arguments: dict[str, Any], descriptor: int) -> PaperSGLang:
            engine = PaperEngine(shape, self.template, arguments["random_seed"], 256 * longest)
            return PaperSGLang(engine, longest)

        process._create_engine = create  # type: ignore[assignment]
        self.workers = [LocalRollout(self.settings, self.template, number) for number in range(engines)]
        for worker in self.workers:
            await worker._engine.start()

    async def step(self) -> dict[str, float]:
        """Roll out, grade, resample, make the batch and write the rows: a step but for the actor. Returns its metrics."""
        channel: Any = Queues()
        reward = LocalReward(self.settings)
        grading = asyncio.create_task(reward.serve(channel))
        groups, stats = await self._roll_out(channel)
        channel.put(None, key=ENDED)
        await grading
        reward._rewards.close()
        resampled = self.selection.resample(groups, [group.problem.query_id for group in groups])
        shown = choose_shown(groups, resampled, self.settings.runner.save_trajectories_per_step)
        for trajectory in (t for one in shown for t in one.group.trajectories):
            if held := trajectory.held:
                give_back(trajectory, self.workers[held.worker]._store.tokens([held.number])[0])
        kept = [t for result in resampled for t in result.kept]
        advantages_of([result.kept for result in resampled], self.settings.algorithm)
        for worker in self.workers:
            numbers = [t.held.number for t in kept if t.held and t.held.worker == worker.number]
            if numbers:
                block: TokenBlock = worker._store.block(numbers)
                assert len(block.ends) == len(numbers)
        metrics = step_metrics(groups, resampled, {}, stats, {"step": 1.0, "rollout": 1.0, "training": 1.0})
        self.files.append(1, metrics, groups, shown)
        return metrics

    async def _roll_out(self, channel: Any) -> tuple[list[Any], dict[str, float]]:
        rollout, count = self.settings.rollout, len(self.workers)
        phase = RolloutPhase(WorkQueue(rollout.scheduler, count, rollout.slice_size), self.spec.samples)
        phase.add_problems(self.problems)
        names = [f"engines:{number}" for number in range(count)]
        engines = SimpleNamespace(names=names, lost={}, start=print, restarts=Counter())
        end: Any = SimpleNamespace(
            rlinf=channel, engines=engines, lengths=LengthSurvival(self.settings.runner.seq_length), show_progress=print
        )
        server = PhaseServer(end, phase, self.spec, "rollout", PhaseEvents())
        running = [asyncio.create_task(worker.generate(channel, self.spec)) for worker in self.workers]
        while not phase.over:
            message = asyncio.ensure_future(channel.get(key=TO_DRIVER).async_wait())
            done, _ = await asyncio.wait([message, *running], return_when=asyncio.FIRST_COMPLETED)
            if message not in done:  # an engine's worker has failed
                for task in done:
                    task.result()
            server.handle(await message, time.monotonic())
        for number in range(count):
            server._answer(number, None)
        sums = Counter[str]()
        for counters in await asyncio.gather(*running):
            sums.update(counters)
        return phase.finish()[0], dict(sums)

    async def close(self) -> None:
        for worker in self.workers:
            await worker._engine.close()
