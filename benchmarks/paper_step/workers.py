"""Workers of the rehearsal: a rollout worker with a protocol engine, an actor rank without a model."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.paper_step.model import PaperEngine, PaperJudge, shape_of
from rstar2_megatron.actor.network.microbatch import PackContext, build_microbatch
from rstar2_megatron.actor.packing import plan_microbatches
from rstar2_megatron.algorithm.batch import TrainBatch
from rstar2_megatron.cluster.actor_worker import ActorWorker
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.cluster.rollout_worker import RolloutWorker
from rstar2_megatron.cluster.tokens import read_batch
from rstar2_megatron.rollout.chat import ChatTemplate


class PaperRollout(RolloutWorker):
    """The rollout worker with `PaperEngine` and `PaperJudge`."""

    def process_id(self) -> int:
        return os.getpid()

    async def start_paper_engine(self, tokenizer: str, mean_tokens: int, max_tokens: int) -> None:
        self._template = ChatTemplate(AutoTokenizer.from_pretrained(tokenizer), self._settings.agentloop)
        shape = shape_of(mean_tokens, max_tokens)
        capacity = 256 * self._settings.runner.seq_length
        self._engine: Any = PaperEngine(shape, self._template, self._rank, capacity)
        self._judge: Any = PaperJudge(self._rank)
        self._started = True


class PaperReward(RewardWorker):
    def process_id(self) -> int:
        return os.getpid()


class PaperActor(ActorWorker):
    """An actor rank that unpacks the batch, plans it and packs its micro-batches, and has no model."""

    def process_id(self) -> int:
        return os.getpid()

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        started = time.process_time()
        sequences = read_batch(batch)
        unpacked = time.process_time()
        runner = self._settings.runner
        plan = plan_microbatches([s.length for s in sequences], self._world_size, max_tokens=runner.max_tokens_per_mbs)
        context = PackContext(
            frequencies=1e4 ** -(torch.arange(0, 64, 2) / 64),
            dtype=torch.float32,
            device="cpu",
            tensor_parallel=1,
            sequence_parallel=False,
            context_parallel=1,
            context_rank=0,
            implementation="local",
        )
        trained = tokens = 0
        for members in plan.microbatches[self._rank]:
            packed = build_microbatch(sequences, members, context)
            trained += len(packed.targets)
            tokens += packed.input_ids.size(1)
        assert trained == sum(sequences[i].num_trained_tokens for own in plan.microbatches[self._rank] for i in own)
        return {
            "actor/trained_tokens": float(sum(s.num_trained_tokens for s in sequences)),
            "actor/unpack_cpu_s": unpacked - started,
            "actor/pack_cpu_s": time.process_time() - unpacked,
            "actor/microbatches": float(len(plan.microbatches[self._rank])),
        }

    def compute_logprobs(self, batch: TrainBatch) -> list[np.ndarray]:
        sequences = read_batch(batch)
        return [np.zeros(s.length, np.float32) for s in sequences] if self._rank == 0 else []
