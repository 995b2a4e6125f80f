"""One engine with its agent loop as an RLinf worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from rlinf.scheduler import Channel, Worker
from transformers import AutoTokenizer

from rstar2_megatron.cluster.channel import ENDED, TO_DRIVER, Outbox, over_ray, pack, work_key
from rstar2_megatron.cluster.tokens import put_block
from rstar2_megatron.cluster.tracing import TracedWorker, traced
from rstar2_megatron.cluster.weight_transfer import WeightReceiver
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.records.trace import TraceRow, engine_row
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient, MemoryTag
from rstar2_megatron.rollout.engine.protocol import EngineLost
from rstar2_megatron.rollout.messages import EngineGone, RolloutResult, WorkAnswer, WorkRequest
from rstar2_megatron.rollout.progress import EngineLoad
from rstar2_megatron.rollout.scheduling.adaptive_budget import make_budget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.token_store import TokenStore
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.settings.host_memory import available_memory
from rstar2_megatron.settings.placement import collocated, slots_of, visible_gpus
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Trajectory
from rstar2_megatron.weights.route import Place, WeightRoute
from rstar2_megatron.weights.shared_memory import OpenedBucket


class RolloutWorker(TracedWorker, Worker):
    def __init__(self, settings: Settings, device: str, engine: int | None = None) -> None:
        """engine: the number of this worker's engine; by default its RLinf rank, which a restarted worker has not kept."""
        super().__init__()
        self._settings = settings
        self._number = self._rank if engine is None else engine
        self._device = device
        self._generating: asyncio.Task[Any] | None = None
        self._budget: KVBudget | None = None
        self._runner: TrajectoryRunner | None = None
        self._started = False
        self._receiver = WeightReceiver(self, self._number)
        self._engine_workers: list[Any] = []
        self._store = TokenStore(self._number)
        self._judge_counters: Counter[str] = Counter()  # of the phase under way

    @property
    def number(self) -> int:
        return self._number

    def trace_row(self) -> TraceRow:
        return engine_row(self._number)

    async def place(self) -> Place:
        return Place(self._cluster_node_rank, tuple(self.global_accelerator_ids), (self._group_name, self._rank))

    async def start_engine(self, model_path: str, judge_url: str) -> int:
        """Start SGLang on `model_path` and connect to the judge. Returns the engine's KV capacity in tokens."""
        settings = self._settings
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._template = ChatTemplate(tokenizer, settings.agentloop)
        self._judge = JudgeClient.of(judge_url, settings.tools.codejudge)
        model = settings.rollout.model.model_copy(update={"model_path": model_path})
        log = Path(settings.runner.logger.log_path).resolve() / "logs" / f"engine-{self._number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._engine = EngineClient(
            settings.rollout.model_copy(update={"model": model}),
            seed=settings.actor.seed + self._number,
            name=f"engine {self._number}",
            log_path=log,
            max_context_tokens=settings.runner.seq_length,
            # All engines of a node share the buckets, so the copy costs memory once.
            keep_weights_bytes=available_memory() // 4,
            memory_saver=collocated(settings.cluster, slots_of(settings.cluster, visible_gpus())),
        )
        self._started = True
        await self._engine.start()
        return self._engine.kv_capacity_tokens

    @traced
    async def receive_weights(self, route: WeightRoute, version: int) -> str:
        """Receive the actor's weights and load them into the engine as `version`.

        Returns the reason when the engine was lost, otherwise "". An exception means that the route failed; the loss of an
        engine does not.
        """
        buckets = self._receiver.begin(route)
        failure = "the engine's worker stopped receiving"
        try:
            await self._engine.update_weights(buckets, version)
            failure = ""
        except EngineLost as error:
            async for bucket, _ in buckets:  # sender and other engines wait for each bucket
                bucket.close()
            failure = ""
            return str(error)
        except Exception as error:
            failure = f"engine {self._number}: {type(error).__name__}: {error}"
            raise
        finally:
            self._receiver.end(route, failure)
        return ""

    async def deliver_weights(self, route: WeightRoute, sender: int, number: int, item: Any, last: bool) -> str:
        """Deliver a bucket of the current weight sync (`WeightReceiver.deliver`)."""
        return await self._receiver.deliver(route, sender, number, item, last, self._engine_workers)

    async def abort_weights(self, route: WeightRoute, reason: str) -> None:
        """End `receive_weights`, because the sending side of the weight sync has failed."""
        self._receiver.abort(route, reason)

    @traced
    async def keep_weights(self, paths_of_nodes: dict[int, list[str]], version: int) -> str:
        """Open the host copy of the last sync for engine restarts. A lost engine is restarted now.

        Returns the reason when the restart failed, otherwise "".
        """
        paths = paths_of_nodes.get(self._cluster_node_rank, [])
        try:
            await self._engine.keep_weights([OpenedBucket(path) for path in paths], version)
        except EngineLost as error:
            return str(error)
        return ""

    async def set_engine_workers(self, engine_workers: list[Any]) -> None:
        self._engine_workers = engine_workers

    @traced
    async def release_memory(self) -> None:
        """Release KV cache and weights for a collocated actor. Generation needs `resume_memory` first.

        Raises EngineError while trajectories are being generated.
        """
        await self._engine.release_memory()

    @traced
    async def resume_memory(self, tags: list[MemoryTag]) -> None:
        """Allocate memory again: `["weights"]` before `receive_weights`, `["kv_cache"]` once the actor has offloaded."""
        await self._engine.resume_memory(tags)

    async def engine_lost(self) -> bool:
        return self._engine.lost

    async def restart_engine(self) -> str:
        """Start a lost engine again, which `receive_weights` must follow. Returns why it could not be started, or ""."""
        try:
            await self._engine.recover(with_weights=False)
        except EngineLost as error:
            return str(error)
        return ""

    async def begin_profile(self, directory: str) -> None:
        """Record a torch profile of the engine's next `runner.profiler.engine_forwards` forward passes."""
        profiler = self._settings.runner.profiler
        await self._engine.start_profile(profiler, directory, f"engine_{self._number}")

    async def end_profile(self, directory: str) -> None:
        """Write the profile now, unless the engine has recorded all its forward passes."""
        await self._engine.stop_profile()

    async def weights_checksum(self) -> dict[str, int] | None:
        """`EngineClient.weights_checksum`; None of an engine that is lost, which restarts with the weights of the last sync."""
        try:
            return await self._engine.weights_checksum()
        except EngineLost:
            return None

    async def generate(self, channel: Channel, spec: RolloutSpec) -> dict[str, float]:
        """Roll out slices from the driver until the driver answers None. Ended trajectories go to ENDED at once.

        An engine that is lost for good returns its unfinished trajectories and requests no more work.
        The tokens of ended trajectories stay here (`tokens`, `put_tokens`) until the next phase. Those of parked ones go along.
        Returns the counters of this phase. All are sums, so that several workers' counters can be added.
        """
        channel = over_ray(channel)
        store = self._store = TokenStore(self._number)
        self._generating = asyncio.current_task()
        rollout, most = self._settings.rollout, self._settings.runner.seq_length
        loop = AgentLoop.of(self._engine, self._judge, self._template, spec, rollout, most)
        if self._budget is None:  # kept across steps: the adaptive policy learns lengths
            capacity = self._engine.kv_capacity_tokens
            self._budget = make_budget(rollout.scheduler, capacity, rollout.max_running_requests)
        self._budget.capacity_tokens = self._engine.kv_capacity_tokens or self._budget.capacity_tokens
        outbox = Outbox(lambda items: channel.put(pack(items), key=ENDED, async_op=True).async_wait())

        own_key = work_key(f"{self._group_name}:{self._rank}")

        async def next_work(room: int) -> list[Slice] | None:
            request = WorkRequest(self._number, spec.phase, room)
            await channel.put(request, key=TO_DRIVER, async_op=True).async_wait()
            while True:
                answer: WorkAnswer = await channel.get(key=own_key, async_op=True).async_wait()
                if answer.phase == spec.phase:
                    return answer.work

        async def ended(work: Slice, trajectory: Trajectory) -> None:
            if trajectory.finish_reason is not None:
                store.keep(trajectory)
            outbox.add(RolloutResult(self._number, spec.phase, work.group, work.problem, trajectory))

        async def gone(reason: str) -> None:
            message = EngineGone(self._number, spec.phase, reason)
            await channel.put(message, key=TO_DRIVER, async_op=True).async_wait()

        self._runner = TrajectoryRunner(loop, AdmissionQueue(self._budget), next_work, ended, gone)
        self._judge_counters.clear()
        self._engine.on_report = self._runner.observe
        try:
            try:
                await self._engine.recover()  # returns at once unless the engine is lost
            except EngineLost as error:
                loop.engine_gone = str(error)
            await self._runner.run()
            await outbox.flush()
        finally:
            self._runner = None
            self._engine.on_report = lambda report: None
            await outbox.close()
        return {**self._counters(loop.stats), "reported": float(outbox.sent)}

    async def counters(self) -> dict[str, float]:
        """The counters of the phase under way so far; empty between phases."""
        return {} if self._runner is None else self._counters(self._runner.loop.stats)

    def _counters(self, stats: RolloutStats) -> dict[str, float]:
        self._judge_counters.update(self._judge.take_counters())
        return {
            **stats.sums(),
            "engine_restarts": float(self._engine.restarts),
            **{f"judge/{name}": value for name, value in self._judge_counters.items()},
        }

    async def tokens(self, numbers: list[int]) -> list[Trajectory]:
        return self._store.tokens(numbers)

    async def put_tokens(self, numbers: list[int]) -> tuple[list[Any], int]:
        """Put the training sequences of `numbers` into the object store as one block.

        Returns the block's reference in a list, and its trained tokens.
        """
        return put_block(self._store.block(numbers))

    async def forget_tokens(self, numbers: list[int]) -> None:
        self._store.forget(numbers)

    async def load(self) -> EngineLoad | None:
        """The current activity of this worker; None between phases."""
        runner = self._runner
        if runner is None:
            return None
        return EngineLoad(
            self._number,
            runner.response_tokens,
            list(runner.responses.values()),
            runner.queue.num_waiting,
            runner.num_at_tool,
            self._engine.kv_used_tokens,
            self._engine.kv_capacity_tokens,
        )

    async def end_phase(self, cut: bool) -> None:
        """Park all running trajectories. `generate` then returns as soon as the running tool calls have ended."""
        if self._runner is not None:
            await self._runner.park(cut=cut)

    async def shutdown(self) -> None:
        """Stop generating, end the engine, close the connection to the judge."""
        if self._generating is not None and not self._generating.done():
            self._generating.cancel()
            await asyncio.wait([self._generating], timeout=5)
        if self._started:  # otherwise the run failed before the engine existed
            await self._engine.close()
            await self._judge.close()
