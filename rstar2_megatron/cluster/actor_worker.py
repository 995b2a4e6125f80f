"""One Megatron rank as an RLinf worker: a thin adapter of `actor.MegatronActor`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rlinf.scheduler import Worker

from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.actor.process_groups import order_collectives
from rstar2_megatron.actor.profile import TorchProfile
from rstar2_megatron.actor.score_actor import ScoreActor
from rstar2_megatron.algorithm.batch import TrainBatch, logprob_difference
from rstar2_megatron.algorithm.preference import Pairs
from rstar2_megatron.cluster.tokens import read_batch
from rstar2_megatron.cluster.tracing import TracedWorker, traced
from rstar2_megatron.cluster.weight_transfer import Sent, WeightSender
from rstar2_megatron.records.trace import TraceRow, actor_row
from rstar2_megatron.services.process import free_port
from rstar2_megatron.settings.schema import LrSchedSettings, OptimSettings, Settings, SFTPhaseSettings
from rstar2_megatron.weights.route import Place, WeightRoute

# Megatron's warnings concern normal states here (no TransformerEngine on CPU, an unfinished checkpoint to overwrite).
logging.getLogger("megatron").setLevel(logging.ERROR)


class ActorWorker(TracedWorker, Worker):
    """Methods without a docstring do what those of MegatronActor do."""

    def __init__(self, settings: Settings) -> None:
        order_collectives()  # before RLinf or torch touches the device
        super().__init__()
        self._settings = settings
        self._actor: MegatronActor | None = None
        self._profile: TorchProfile | None = None
        self._sender = WeightSender(self)

    def rendezvous_address(self) -> str:
        """Address at which rank 0 hosts the actor's process group, as a torch init method."""
        host = os.environ["MASTER_ADDR"]
        return f"tcp://{host}:{free_port(host)}"

    def trace_row(self) -> TraceRow:
        return actor_row(self._rank)

    def place(self) -> Place:
        """Node and accelerators of this rank."""
        return Place(self._cluster_node_rank, tuple(self.global_accelerator_ids))

    def initialize(self, model_path: str, init_method: str, device: Literal["cpu", "cuda"]) -> int:
        """Build the Megatron model from the Hugging Face directory `model_path`. Collective."""
        kind = ScoreActor if self._settings.runner.task_type == "preference" else MegatronActor
        self._actor = kind(
            self._settings.actor,
            self._settings.runner,
            self._settings.algorithm,
            model_path=model_path,
            rank=self._rank,
            world_size=self._world_size,
            init_method=init_method,
            device=device,
        )
        return self._actor.initialize()

    @property
    def actor(self) -> MegatronActor:
        assert self._actor is not None, "initialize comes first"
        return self._actor

    @property
    def scorer(self) -> ScoreActor:
        assert isinstance(self._actor, ScoreActor), "runner.task_type is preference"
        return self._actor

    @traced
    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One training step on the global batch, of which this rank reads its share. Collective; rank 0 returns metrics."""
        algorithm = self._settings.algorithm
        rows = self._settings.data.rollout_batch_size * algorithm.group_size // algorithm.n_minibatches
        metrics = self.actor.train_step(read_batch(batch), mini_batch_rows=rows)
        return metrics if self._rank == 0 else {}

    @traced
    def compute_logprobs(self, batch: TrainBatch) -> list[np.ndarray]:
        """Log-prob of each token (0.0 at position 0) under the current weights. Collective; rank 0 returns them."""
        logprobs = self.actor.compute_logprobs(read_batch(batch))
        return logprobs if self._rank == 0 else []

    def compare_logprobs(self, batch: TrainBatch) -> dict[str, float]:
        """`logprob_difference` of the current weights from the engine. Collective; rank 0 returns it."""
        sequences = read_batch(batch)
        logprobs = self.actor.compute_logprobs(sequences)
        return logprob_difference(sequences, logprobs) if self._rank == 0 else {}

    def sft_steps(self, batches: list[TrainBatch], lrs: list[float]) -> list[dict[str, float]]:
        """Several supervised steps in one call, to save a call per step. Collective."""
        return [self.actor.sft_step(read_batch(batch), lr=lr) for batch, lr in zip(batches, lrs, strict=True)]

    def sft_validation(self, batch: TrainBatch) -> dict[str, float]:
        """Summed cross entropy of the trained tokens, and their number. Collective."""
        return self.actor.sft_validation(read_batch(batch))

    def preference_steps(self, batches: list[tuple[TrainBatch, Pairs]], lrs: list[float]) -> list[dict[str, float]]:
        """Several steps of a reward model in one call: (prefixes, which of them are compared) each. Collective."""
        return [
            self.scorer.preference_step(read_batch(prefixes), pairs, lr)
            for (prefixes, pairs), lr in zip(batches, lrs, strict=True)
        ]

    def preference_validation(self, prefixes: TrainBatch, pairs: Pairs) -> dict[str, float]:
        """Loss, accuracy and margin of comparisons under the current weights. Collective."""
        return self.scorer.preference_validation(read_batch(prefixes), pairs)

    def start_sft_phase(self, phase: SFTPhaseSettings) -> None:
        """A fresh optimizer with the phase's settings."""
        own = phase.model_dump(include={"lr", "adam_beta1", "adam_beta2", "weight_decay"})
        optim = self._settings.actor.optim.model_copy(update=own)
        sched = LrSchedSettings(lr_warmup_iters=0, lr_decay_style="constant")
        self.actor.reset_optimizer(optim, sched, phase.steps)

    def start_rl(self, optim: OptimSettings, lr_sched: LrSchedSettings, max_steps: int) -> None:
        """A fresh optimizer for `max_steps` steps of reinforcement learning, after supervised fine-tuning."""
        minibatches = self._settings.algorithm.n_minibatches
        self.actor.reset_optimizer(optim, lr_sched, max_steps * minibatches)
        self.actor.freeze_reference()

    @traced
    def send_weights(self, route: WeightRoute, engines: list[Any]) -> Sent:
        """Stream all weights by Hugging Face name to the engines' workers. Collective over actor ranks."""
        return self._sender.send(self.actor.iter_hf_weights(), route, engines)

    def forget_weights(self) -> None:
        """Free the buckets of the last `send_weights`."""
        self._sender.forget()

    @traced
    def offload(self, keep_weights: bool = False) -> None:
        self.actor.offload(keep_weights=keep_weights)

    @traced
    def reload(self) -> None:
        self.actor.reload()

    def begin_profile(self, directory: str) -> None:
        """Record a torch profile until `end_profile`."""
        self._profile = TorchProfile(self._settings.runner.profiler)

    def end_profile(self, directory: str) -> None:
        """Write the profile to `directory`."""
        if self._profile is not None:
            self._profile.write(Path(directory) / f"actor_rank_{self._rank}.json.gz")
            self._profile = None

    def weights_checksum(self) -> dict[str, int]:
        return self.actor.weights_checksum()

    @traced
    def save_checkpoint(self, directory: str, wait: bool = True) -> None:
        """Write a checkpoint. wait=False returns once the tensors are copied; `finish_checkpoint` waits for the files."""
        self.actor.save_checkpoint(directory, wait=wait)

    @traced
    def finish_checkpoint(self) -> None:
        self.actor.finish_checkpoint()

    def load_checkpoint(self, directory: str) -> None:
        self.actor.load_checkpoint(directory)

    def resume(self, directory: str) -> None:
        """Resume RL from a checkpoint. The weights before loading, with which RL began, become the reference."""
        self.actor.freeze_reference()
        self.actor.load_checkpoint(directory)

    def continue_rl(self) -> None:
        """Start a further RL stage with the loaded optimizer. The current weights become the reference."""
        self.actor.keep_optimizer()
        self.actor.freeze_reference()

    def export_hf(self, directory: str) -> None:
        self.actor.export_hf(directory)

    def shutdown(self) -> None:
        if self._actor is not None:
            self._actor.close()
