"""One Megatron rank as an RLinf worker: everything is in `actor.MegatronActor`, this only carries it."""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

from rlinf.scheduler import Worker

from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.cluster.weights import Sent, WeightSender
from rstar2_megatron.services.process import free_port
from rstar2_megatron.settings.schema import LrSchedSettings, OptimSettings, Settings, SFTPhaseSettings
from rstar2_megatron.weights.route import Place, WeightRoute

# Megatron warns of what is normal here (no TransformerEngine on CPU, an unfinished checkpoint it may overwrite).
logging.getLogger("megatron").setLevel(logging.ERROR)


class ActorWorker(Worker):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._actor: MegatronActor | None = None
        self._sender = WeightSender(self)

    def rendezvous_address(self) -> str:
        """Where rank 0 will host the process group of the actor, as a torch init method."""
        host = os.environ["MASTER_ADDR"]
        return f"tcp://{host}:{free_port(host)}"

    def place(self) -> Place:
        """Node and accelerators of this rank."""
        return Place(self._cluster_node_rank, tuple(self.global_accelerator_ids))

    def initialize(self, model_path: str, init_method: str, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
        """Build the Megatron model from the Hugging Face directory `model_path`; collective."""
        self._actor = MegatronActor(
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
        if self._actor is None:
            raise RuntimeError("ActorWorker.initialize has not been called")
        return self._actor

    def train_step(self, sequences: list[TrainSequence]) -> dict[str, float]:
        """One training step on the global batch; collective, the same metrics on every rank."""
        algorithm = self._settings.algorithm
        rows = self._settings.data.rollout_batch_size * algorithm.group_size // algorithm.n_minibatches
        return self.actor.train_step(sequences, mini_batch_rows=rows)

    def compute_logprobs(self, sequences: list[TrainSequence]) -> list[list[float]]:
        """Log-prob of each token (0.0 at position 0) under the current weights; collective."""
        return self.actor.compute_logprobs(sequences)

    def sft_steps(self, batches: list[list[TrainSequence]], lrs: list[float]) -> list[dict[str, float]]:
        """Several supervised steps in one call, so that short steps do not pay a call each; collective."""
        return [self.actor.sft_step(batch, lr=lr) for batch, lr in zip(batches, lrs, strict=True)]

    def sft_validation(self, sequences: list[TrainSequence]) -> dict[str, float]:
        """Summed cross entropy of the trained tokens, and how many they are; collective."""
        return self.actor.sft_validation(sequences)

    def start_sft_phase(self, phase: SFTPhaseSettings) -> None:
        """A fresh optimizer with the phase's settings."""
        optim = self._settings.actor.optim.model_copy(
            update={
                "lr": phase.lr,
                "adam_beta1": phase.adam_beta1,
                "adam_beta2": phase.adam_beta2,
                "weight_decay": phase.weight_decay,
            }
        )
        sched = LrSchedSettings(lr_warmup_iters=0, lr_decay_style="constant")
        self.actor.reset_optimizer(optim, sched, phase.steps)

    def start_rl(self, optim: OptimSettings, lr_sched: LrSchedSettings, max_steps: int) -> None:
        """A fresh optimizer for `max_steps` steps of reinforcement learning, after supervised fine-tuning."""
        minibatches = self._settings.algorithm.n_minibatches
        self.actor.reset_optimizer(optim, lr_sched, max_steps * minibatches)
        self.actor.freeze_reference()

    def send_weights(self, route: WeightRoute, engines: list[Any]) -> Sent:
        """Stream all weights in Hugging Face names to the engines' workers; collective over actor ranks."""
        return self._sender.send(self.actor.iter_hf_weights(), route, engines)

    def forget_weights(self) -> None:
        """Free what `send_weights` left for receivers to open."""
        self._sender.forget()

    def offload(self, keep_weights: bool = False) -> None:
        """Leave the accelerator to the engines (`actor.offload_*`), all but the weights on request."""
        self.actor.offload(keep_weights=keep_weights)

    def reload(self) -> None:
        """Take the accelerator again."""
        self.actor.reload()

    def weights_checksum(self) -> dict[str, int]:
        return self.actor.weights_checksum()

    def save_checkpoint(self, directory: str, wait: bool = True) -> None:
        """Write a checkpoint; with wait=False only copy it and go on, `finish_checkpoint` waits for the files."""
        self.actor.save_checkpoint(directory, wait=wait)

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is in place; at once when there is none."""
        self.actor.finish_checkpoint()

    def load_checkpoint(self, directory: str) -> None:
        self.actor.load_checkpoint(directory)

    def resume(self, directory: str) -> None:
        """Go on from a checkpoint of RL; the weights held until now, those RL began with, are the reference."""
        self.actor.freeze_reference()
        self.actor.load_checkpoint(directory)

    def continue_rl(self) -> None:
        """Reinforcement learning goes on with the optimizer that was loaded; these weights are its reference."""
        self.actor.keep_optimizer()
        self.actor.freeze_reference()

    def export_hf(self, directory: str) -> None:
        self.actor.export_hf(directory)

    def shutdown(self) -> None:
        """Leave the process group."""
        if self._actor is not None:
            self._actor.close()
