"""The policy under training: one MegatronActor per Megatron rank.

It needs neither Ray nor RLinf; it joins torch.distributed at a given address. Every method that touches the model is
collective: all ranks must call it with the same arguments. `train_step` is the training step, from top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor import process_groups
from rstar2_megatron.actor.layout import Layout, check_layout
from rstar2_megatron.actor.losses import SUMS, FlatLogProbs, LossFunction, rl_loss, rl_metrics, sft_loss, sft_metrics
from rstar2_megatron.actor.offload import DeviceMemory
from rstar2_megatron.actor.packing import MicroBatchPlan, plan_microbatches, split_minibatches
from rstar2_megatron.algorithm.batch import TrainSequence, logprob_difference
from rstar2_megatron.algorithm.layout_check import load_policy_loss
from rstar2_megatron.algorithm.loss import aggregate
from rstar2_megatron.algorithm.mismatch import has_rules, mismatch_by_turn, without_mismatch
from rstar2_megatron.model.flops import peak_tflops
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.records.disk import writing
from rstar2_megatron.settings.schema import ActorSettings, AlgorithmSettings, LrSchedSettings, OptimSettings, RunnerSettings
from rstar2_megatron.weights.checksum import check_same_weights, weights_checksum

# Policy, reference, optimizer, checkpoint and hf_weights import megatron-core. They are imported inside methods, because on a
# CPU `process_groups.join` must install the stand-ins for CUDA first.
if TYPE_CHECKING:
    from rstar2_megatron.actor.checkpoint import PendingSave
    from rstar2_megatron.actor.reference import FrozenReference


class MegatronActor:
    """Trains, scores, exports and checkpoints the policy under one parallel layout."""

    scores = False  # True: the model has a reward model's head (`score_actor.ScoreActor`)

    def __init__(
        self,
        actor: ActorSettings,
        runner: RunnerSettings,
        algorithm: AlgorithmSettings,
        *,
        model_path: str,
        rank: int,
        world_size: int,
        init_method: str,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        """Store the arguments and check the layout; `initialize` builds the model.

        init_method: e.g. "tcp://127.0.0.1:29500", the same on all ranks. device "cuda" uses the current CUDA
        device. Raises ValueError for a model or layout that cannot be trained.
        """
        self.actor, self.runner, self.algorithm = actor, runner, algorithm
        self.model_path, self.rank, self.world_size = model_path, rank, world_size
        self.init_method, self.device = init_method, device
        self.model_config = ModelConfig.from_directory(model_path, scores=self.scores)
        self.layout: Layout = check_layout(actor, self.model_config, world_size, runner)
        self._loss, self._loss_values = load_policy_loss(algorithm)
        self.optim, self.lr_sched = actor.optim, actor.lr_sched
        self.max_optimizer_steps = runner.max_steps * algorithm.n_minibatches
        self.optimizer_steps = 0
        self.schedule_start = 0
        """Optimizer step at which this run's cosine begins; 0 unless the optimizer comes from another run."""
        self.skipped_steps = 0
        self._pending: PendingSave | None = None
        self._reference: FrozenReference | None = None
        self._memory = DeviceMemory(masters=actor.model.precision == "bf16")
        self._away: set[str] = set()  # parts on the host: weights, grads, state

    # ------------------------------------------------------------------------------------------ start, stop

    def initialize(self) -> int:
        """Join the process group, build the model, load its weights, make the optimizer; collective.

        Returns the model's number of parameters, over all ranks.
        """
        process_groups.join(
            self.actor,
            self.layout,
            rank=self.rank,
            world_size=self.world_size,
            init_method=self.init_method,
            device=self.device,
        )
        from rstar2_megatron.actor.policy import Policy

        self.policy = Policy(self.model_config, self.layout, self.actor, self.model_path, self.device)
        self.policy.sums += tuple(name for name in self._loss_values if name not in SUMS)
        return self.model_config.num_parameters

    def reset_optimizer(self, optim: OptimSettings, lr_sched: LrSchedSettings, max_optimizer_steps: int) -> None:
        """Replace the optimizer by a new one with other settings, at step 0 (between SFT phases and RL); collective.

        The overlap flags, `use_distributed_optimizer` and `optimizer_cpu_offload` keep their values from `initialize`.
        """
        fixed = {
            name: getattr(self.actor.optim, name)
            for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "optimizer_cpu_offload")
        }
        self.policy.finish_gather()
        self.optim, self.lr_sched = optim.model_copy(update=fixed), lr_sched
        self.max_optimizer_steps = max_optimizer_steps
        self.optimizer_steps = self.schedule_start = 0
        self.policy.reset_optimizer(self.optim)

    def keep_optimizer(self) -> None:
        """Start this run's cosine at the step count of the loaded optimizer, whose moments are kept.

        The warm-up is not repeated.
        """
        self.schedule_start = self.optimizer_steps

    def freeze_reference(self) -> None:
        """Copy the current weights as the reference of the KL term; nothing happens when `algorithm.kl_beta` is 0.

        Call it where RL starts: after SFT. A resumed run calls it before it loads the checkpoint.
        """
        if self.algorithm.kl_beta:
            from rstar2_megatron.actor.reference import FrozenReference

            self._reference = FrozenReference(self.policy)

    def close(self) -> None:
        """Finish a pending checkpoint and leave the process group; collective. Safe to call twice."""
        self.finish_checkpoint()
        process_groups.leave()

    # ------------------------------------------------------------------------------------------------ steps

    def train_step(self, sequences: Sequence[TrainSequence], *, mini_batch_rows: int | None = None) -> dict[str, float]:
        """One step of GRPO-RoC on the whole global batch: `n_minibatches` optimizer steps; collective.

        Every rank gets all sequences and selects its share. The loss is normalised by the trained tokens of the
        mini-batch on all ranks, so neither packing nor the number of ranks changes the gradient.
        mini_batch_rows: only for loss_agg_func "released-verl" (see `algorithm.loss.aggregate`).
        Returns metrics, identical on all ranks. Log-prob differences to the engine are measured before the first
        update of the step.
        """
        started = time.monotonic()
        algorithm = self.algorithm
        minibatches = split_minibatches(len(sequences), algorithm.n_minibatches)
        old: FlatLogProbs | None = None
        mismatch: dict[str, float] = {}
        if has_rules(algorithm) or (algorithm.recompute_logprobs and len(minibatches) > 1):
            # A single mini-batch needs no separate scoring pass: see rl_loss.
            old = self._score(sequences, "trained")
            actor = old.to_arrays()
            turns = mismatch_by_turn(sequences, actor)
            mismatch = {f"actor/logprob_diff_turn/{turn}": value for turn, value in turns.items()}
            if has_rules(algorithm):  # the loss sees only the tokens that they leave
                difference = logprob_difference(sequences, actor)
                mismatch |= {f"actor/logprob_diff_{name}": difference[name] for name in ("mean", "max")}
            sequences, shares = without_mismatch(sequences, actor, algorithm)
            mismatch |= {f"actor/{name}": value for name, value in shares.items()}
            if not any(s.num_trained_tokens for s in sequences):
                return {**mismatch, "actor/trained_tokens": 0.0, "actor/skipped_update": 1.0}
        reference = self._score_reference(sequences)

        steps: list[dict[str, float]] = []
        plans: list[MicroBatchPlan] = []
        for indices in minibatches:
            part = [sequences[i] for i in indices]
            plan = self._plan(part)
            weights = aggregate(
                algorithm.loss_agg_func,
                [s.num_trained_tokens for s in part],
                microbatch_of=plan.microbatch_of(len(part)),
                num_microbatches=plan.num_microbatches,
                mini_batch_rows=mini_batch_rows,
            )
            across = self.policy.context_sum
            loss = rl_loss(algorithm, self._loss, weights, self.device, old, reference, indices.start, across)
            plans.append(plan)
            steps.append(self._update(part, plan, loss, temperature=self._temperature))
        return {
            **rl_metrics(steps, with_reference=reference is not None, names=self._loss_values),
            **mismatch,
            "actor/optimizer_steps": float(self.optimizer_steps),
            "actor/skipped_steps": float(self.skipped_steps),
            **self._speed(sequences, plans, time.monotonic() - started),
        }

    def sft_step(self, sequences: Sequence[TrainSequence], lr: float | None = None) -> dict[str, float]:
        """One optimizer step of mean cross entropy over `loss_mask`, at `lr` (None: the schedule's); collective."""
        started = time.monotonic()
        trained = sum(s.num_trained_tokens for s in sequences)
        plan = self._plan(sequences)
        loss = sft_loss(float(trained))
        step = self._update(sequences, plan, loss, temperature=1.0, lr=lr)
        speed = self._speed(sequences, [plan], time.monotonic() - started)
        return sft_metrics(step, trained, self.skipped_steps, speed)

    def sft_validation(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Summed cross entropy of the tokens of `loss_mask` under the current weights; collective, no update."""
        sums = self.policy.measure(sequences, self._plan(sequences), sft_loss(1.0), temperature=1.0)
        return {"loss": sums["pg_loss"], "tokens": float(sum(s.num_trained_tokens for s in sequences))}

    def compute_logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Log-prob of every token under the current weights, at the sampling temperature; collective.

        Returns a float32 array for each sequence with one entry per token, identical on all ranks. Token 0 has no predecessor
        and gets 0.0.
        """
        return self._score(sequences, "all").to_arrays()

    @property
    def _temperature(self) -> float:
        """The temperature of the log-probs that the engine reports; 1 for greedy decoding."""
        return self.algorithm.sampling_params.temperature or 1.0

    def _plan(self, sequences: Sequence[TrainSequence]) -> MicroBatchPlan:
        return self._plan_lengths([s.length for s in sequences])

    def _plan_lengths(self, lengths: list[int]) -> MicroBatchPlan:
        return plan_microbatches(
            lengths,
            self.layout.data,
            max_tokens=self.runner.max_tokens_per_mbs * self.layout.context,
            multiple=self.layout.pipeline if self.layout.virtual > 1 else 1,
            equal=self.layout.expert > 1,
        )

    def _score(self, sequences: Sequence[TrainSequence], wanted: Literal["trained", "all"]) -> FlatLogProbs:
        return self.policy.score(sequences, self._plan(sequences), wanted, temperature=self._temperature)

    def _score_reference(self, sequences: Sequence[TrainSequence]) -> FlatLogProbs | None:
        if not self.algorithm.kl_beta:
            return None
        if self._reference is None:
            raise RuntimeError("algorithm.kl_beta is set, but freeze_reference has not been called")
        with self._reference.in_place():
            return self._score(sequences, "trained")

    def _update(
        self,
        sequences: Sequence[TrainSequence],
        plan: MicroBatchPlan,
        loss: LossFunction,
        *,
        temperature: float,
        lr: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step at rate `lr` (None: the schedule's); advances the step counters."""
        from rstar2_megatron.actor.optimizer import learning_rate

        if lr is None:
            lr = learning_rate(self.optimizer_steps, self.optim, self.lr_sched, self.max_optimizer_steps, self.schedule_start)
        stepped, result = self.policy.update(sequences, plan, loss, temperature=temperature, lr=lr)
        self.optimizer_steps += 1
        self.skipped_steps += not stepped
        return result

    def _speed(self, sequences: Sequence[TrainSequence], plans: list[MicroBatchPlan], seconds: float) -> dict[str, float]:
        lengths = [s.length for s in sequences]
        flops = self.model_config.train_flops(lengths, sum(s.num_trained_tokens for s in sequences))
        tflops = flops / seconds / self.world_size / 1e12
        peak = peak_tflops(torch.cuda.get_device_name()) if self.device == "cuda" else None
        return {
            "actor/total_tokens": float(sum(lengths)),
            "actor/num_microbatches": float(sum(plan.num_microbatches for plan in plans)),
            "actor/imbalance": max(plan.imbalance for plan in plans),
            "actor/seconds": seconds,
            "actor/tflops_per_rank": tflops,
            **({"actor/mfu": tflops / peak} if peak else {}),
        }

    # ---------------------------------------------------------------------------------- memory of the device

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move the parts that `actor.offload_*` name to the host, so that an engine on the same GPU can use the memory.

        keep_weights: the weights stay on the device, which is enough to send or export them. All other methods need
        `reload` first. Parts that are on the host already stay there.
        """
        wanted = {
            "weights": self.actor.offload_weight and not keep_weights,
            "grads": self.actor.offload_grad,
            # With optimizer_cpu_offload the state is always on the host.
            "state": self.actor.offload_optimizer and not self.actor.optim.optimizer_cpu_offload,
        }
        parts = {name for name, go in wanted.items() if go} - self._away
        self.policy.finish_gather()
        self._memory.offload(self.policy.chunks, self.policy.optimizer, parts)
        self._away |= parts

    def reload(self) -> None:
        """Move the parts that `offload` moved back to the device."""
        self._memory.reload(self.policy.chunks, self.policy.optimizer, self._away)
        self._away = set()

    # ------------------------------------------------------------------------------- weights and checkpoints

    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream every weight as (Hugging Face name, full tensor); collective, every rank must exhaust it.

        Every rank receives the tensors. A tensor may share memory with the model: copy it to keep it beyond an update.
        """
        return self.policy.iter_hf_weights()

    def weights_checksum(self) -> dict[str, int]:
        """Checksum of every weight by Hugging Face name (`rstar2_megatron.weights.checksum`); collective."""
        return weights_checksum(self.iter_hf_weights())

    def export_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (safetensors, config, tokenizer) for transformers; collective."""
        from rstar2_megatron.actor.hf_weights import write_hf_directory

        dtype = "bfloat16" if self.actor.model.precision == "bf16" else "float32"
        weights, keys = self.iter_hf_weights(), self.model_config.exported_keys
        with writing(directory):
            write_hf_directory(weights, directory, self.model_path, dtype, write=self.rank == 0, keys=keys)
        dist.barrier()

    def save_checkpoint(self, directory: str | Path, *, wait: bool = True) -> None:
        """Write model, optimizer, schedule and random states; collective.

        The directory appears atomically. With wait=False threads write during the next steps, and the directory appears
        in `finish_checkpoint`.
        """
        from rstar2_megatron.actor import checkpoint

        self.finish_checkpoint()
        self.policy.finish_gather()
        counters = {
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "schedule_start": self.schedule_start,
            "weights_checksum": self.weights_checksum(),
            "form": checkpoint.checkpoint_format(self.actor),
        }
        self._pending = checkpoint.start_save(directory, self.policy.chunks, self.policy.optimizer, counters)
        if wait:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Wait until the pending checkpoint has its final name; collective. Raises OSError when writing failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def load_checkpoint(self, directory: str | Path) -> None:
        """Restore what `save_checkpoint` wrote, also under another parallel layout; collective.

        Raises ValueError when the directory is not a complete checkpoint, when it was saved under settings that give it
        another format, or when a loaded weight differs in any bit from the saved one.
        """
        from rstar2_megatron.actor import checkpoint

        self.finish_checkpoint()
        counters = checkpoint.read_counters(directory)
        checkpoint.check_format(directory, counters, self.actor)
        checkpoint.load(directory, self.policy.chunks, self.policy.optimizer)
        self.optimizer_steps = counters["optimizer_steps"]
        self.skipped_steps = counters["skipped_steps"]
        self.schedule_start = counters["schedule_start"]
        check_same_weights(str(directory), counters["weights_checksum"], self.weights_checksum())
