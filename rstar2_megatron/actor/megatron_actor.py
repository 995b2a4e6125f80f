"""The policy under training: one object per Megatron rank, all ranks called with the same arguments.

Needs neither Ray nor RLinf: it joins torch.distributed by the address it is given. Every method that touches
the model is collective, so all ranks must call it. A step reads from top to bottom in `train_step`.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor.flops import peak_tflops
from rstar2_megatron.actor.layout import Layout, check_layout
from rstar2_megatron.actor.losses import (
    MAXIMA,
    SUMS,
    FlatLogProbs,
    LossFunction,
    rl_loss,
    rl_metrics,
    sft_loss,
)
from rstar2_megatron.actor.model_config import ModelConfig
from rstar2_megatron.actor.packing import Plan, make_plan, split_minibatches
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.algorithm.loss import aggregate
from rstar2_megatron.cpu import megatron as cpu_megatron
from rstar2_megatron.settings.schema import (
    ActorSettings,
    AlgorithmSettings,
    LrSchedSettings,
    OptimSettings,
    RunnerSettings,
)
from rstar2_megatron.weights_checksum import weights_checksum

if TYPE_CHECKING:
    from rstar2_megatron.actor.checkpoint import PendingSave


class MegatronActor:
    """Trains, scores, exports and checkpoints the policy under one parallel layout."""

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
        """Only remembers its arguments and checks the layout; `initialize` starts things.

        init_method: e.g. "tcp://127.0.0.1:29500", the same on all ranks. device "cuda" uses the current CUDA
        device. Raises ValueError for a model or layout that cannot be trained.
        """
        self.actor, self.runner, self.algorithm = actor, runner, algorithm
        self.model_path, self.rank, self.world_size = model_path, rank, world_size
        self.init_method, self.device = init_method, device
        self.model_config = ModelConfig.from_directory(model_path)
        self.layout: Layout = check_layout(actor, self.model_config, world_size, runner)
        self.optim, self.lr_sched, self.max_steps = actor.optim, actor.lr_sched, runner.max_steps
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self._pending: PendingSave | None = None

    # ------------------------------------------------------------------------------------------ start, stop

    def initialize(self) -> dict[str, float]:
        """Join the process group, build the model, load its weights, make the optimizer; collective."""
        started = time.monotonic()
        if self.device == "cpu":
            torch.set_num_threads(self.actor.cpu_threads)
            cpu_megatron.install()
            # What is absent here is known, and one line per rank and call about it drowns the log.
            warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        timeout = timedelta(minutes=self.actor.distributed_timeout_minutes)
        dist.init_process_group(
            "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=self.init_method,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            self.layout.tensor,
            self.layout.pipeline,
            self.layout.virtual if self.layout.virtual > 1 else None,
            context_parallel_size=self.layout.context,
            distributed_timeout_minutes=max(1, math.ceil(self.actor.distributed_timeout_minutes)),
        )
        self.state = parallel_state
        self.set_seed(self.actor.seed)
        self._build()
        parameters = sum(p.numel() for chunk in self.chunks for p in chunk.parameters())
        return {
            "actor/parameters": float(self.model_config.num_parameters),
            "actor/parameters_this_rank": float(parameters),
            "actor/initialize_seconds": time.monotonic() - started,
        }

    def _build(self) -> None:
        from rstar2_megatron.actor.hf_weights import load_hf_weights
        from rstar2_megatron.actor.layer_spec import choose_implementation
        from rstar2_megatron.actor.microbatch import PackContext
        from rstar2_megatron.actor.model import bare, build_chunks
        from rstar2_megatron.actor.optimizer import build_optimizer, wrap_ddp

        settings = self.actor.model
        implementation = choose_implementation(settings.transformer_impl, self.device)
        config, chunks = build_chunks(self.model_config, settings, implementation, self.device)
        load_hf_weights([bare(chunk) for chunk in chunks], self.model_config, self.model_path)
        cpu_megatron.repair_torch_adam_checkpoints()
        self.chunks = wrap_ddp(config, chunks, self.optim)
        self.optimizer = build_optimizer(self.chunks, self.optim, settings.precision)
        self.pack_context = PackContext(
            head_dim=self.model_config.head_dim,
            rope_theta=self.model_config.rope_theta,
            dtype=config.params_dtype,
            device=self.device,
            tensor_parallel=self.layout.tensor,
            sequence_parallel=config.sequence_parallel,
            context_parallel=self.layout.context,
            context_rank=self.state.get_context_parallel_rank(),
            implementation=implementation,
        )

    def set_seed(self, seed: int) -> None:
        """Seed the generators; tensor-parallel ranks get different streams where Megatron wants them so."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def reset_optimizer(self, optim: OptimSettings, lr_sched: LrSchedSettings, max_steps: int) -> None:
        """Forget moments and step count and go on with new settings (between SFT phases and RL); collective.

        The overlap flags and `use_distributed_optimizer` stay as they were at `initialize`.
        """
        from rstar2_megatron.actor.optimizer import build_optimizer

        fixed = {
            name: getattr(self.actor.optim, name)
            for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        }
        self._sync_parameters()
        self.optim, self.lr_sched, self.max_steps = optim.model_copy(update=fixed), lr_sched, max_steps
        self.optimizer_steps = 0
        self.optimizer = build_optimizer(self.chunks, self.optim, self.actor.model.precision)

    def offload(self) -> None:
        """Move to the host what `actor.offload_*` name, so that an engine on the same GPU can use the memory.

        The next call must be `reload`. On CPU it does nothing.
        """
        if self.device == "cuda":
            from rstar2_megatron.actor.offload import offload

            self._sync_parameters()
            offload(self.chunks, self.optimizer, **self._offloaded)

    def reload(self) -> None:
        """Bring back what `offload` moved away; needed before any other use."""
        if self.device == "cuda":
            from rstar2_megatron.actor.offload import reload

            reload(self.chunks, self.optimizer, **self._offloaded)

    @property
    def _offloaded(self) -> dict[str, bool]:
        return {
            "weights": self.actor.offload_weight,
            "grads": self.actor.offload_grad,
            "state": self.actor.offload_optimizer,
            "masters": self.actor.model.precision == "bf16",
        }

    def close(self) -> None:
        """Finish a pending checkpoint and leave the process group; collective. Safe to call twice."""
        if dist.is_initialized():
            from megatron.core import parallel_state

            self.finish_checkpoint()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    # ------------------------------------------------------------------------------------------------ steps

    def train_step(
        self, sequences: Sequence[TrainSequence], *, mini_batch_rows: int | None = None
    ) -> dict[str, float]:
        """One step of GRPO-RoC on the whole global batch: `n_minibatches` optimizer steps; collective.

        Every rank gets all sequences and picks its share. The loss is normalised over the mini-batch's
        trained tokens on all ranks: neither the micro-batching nor the number of ranks changes the gradient.
        mini_batch_rows: only for loss_agg_func "released-verl" (see `algorithm.loss.aggregate`).
        Returns metrics, identical on all ranks; log-prob differences to the engine are those before the first
        update of the step. Raises ValueError for an empty batch.
        """
        if not sequences:
            raise ValueError("train_step got no sequences: skip the step when every group was rejected")
        started = time.monotonic()
        algorithm = self.algorithm
        minibatches = split_minibatches(len(sequences), algorithm.n_minibatches)
        old: FlatLogProbs | None = None
        if algorithm.recompute_logprobs and len(minibatches) > 1:
            # With one mini-batch the policy that is scored is the one being trained: see _rl_loss.
            old = self._score(sequences, "trained")

        steps: list[dict[str, float]] = []
        plans: list[Plan] = []
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
            loss = rl_loss(algorithm, weights, self.device, old, first=indices.start)
            plans.append(plan)
            steps.append(self._update(part, plan, loss, temperature=self._temperature))
        metrics = rl_metrics(steps)
        if self._pending is not None and self._pending.written_everywhere():
            self.finish_checkpoint()
        metrics["actor/optimizer_steps"] = float(self.optimizer_steps)
        metrics["actor/skipped_steps"] = float(self.skipped_steps)
        return {**metrics, **self._speed(sequences, plans, time.monotonic() - started)}

    def sft_step(
        self, sequences: Sequence[TrainSequence], lr: float | None = None, *, denominator: float | None = None
    ) -> dict[str, float]:
        """One optimizer step of cross entropy on the tokens of `loss_mask`; collective.

        lr: None takes the schedule's. denominator: what the summed loss is divided by; None takes the number
        of trained tokens (token mean). Batches bucketed by length want a constant one, so that short
        conversations do not weigh more.
        """
        started = time.monotonic()
        trained = sum(s.num_trained_tokens for s in sequences)
        if not trained:
            raise ValueError(f"sft_step got {len(sequences)} sequences without a trained token")
        divisor = denominator or float(trained)

        plan = self._plan(sequences)
        step = self._update(sequences, plan, sft_loss(divisor), temperature=1.0, lr=lr)
        return {
            "sft/loss": step["loss"],
            "sft/token_loss": step["pg_loss"] / trained,
            "sft/entropy": step["entropy"] / trained,
            "sft/grad_norm": step["grad_norm"],
            "sft/lr": step["lr"],
            "sft/trained_tokens": float(trained),
            "sft/skipped_steps": float(self.skipped_steps),
            **{
                f"sft/{k[6:]}": v
                for k, v in self._speed(sequences, [plan], time.monotonic() - started).items()
            },
        }

    @torch.no_grad()
    def sft_validation(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Summed cross entropy of the tokens of `loss_mask` under the current weights; collective, no update."""
        for chunk in self.chunks:
            chunk.eval()
        plan = self._plan(sequences)
        sums = self._reduce(self._run(sequences, plan, sft_loss(1.0), "trained", 1.0, forward_only=True))
        return {"loss": sums["pg_loss"], "tokens": float(sum(s.num_trained_tokens for s in sequences))}

    @torch.no_grad()
    def compute_logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        """Log-prob of every token under the current weights, at the sampling temperature; collective.

        One list per sequence with one entry per token; token 0 has no predecessor and gets 0.0. The same on
        all ranks.
        """
        return self._score(sequences, "all").to_lists()

    @property
    def _temperature(self) -> float:
        """What the engine divides logits by before it samples and reports log-probs; greedy reports at 1."""
        return self.algorithm.sampling_params.temperature or 1.0

    def _plan(self, sequences: Sequence[TrainSequence]) -> Plan:
        dynamic = self.runner.enable_dynamic_batch_size
        return make_plan(
            [s.length for s in sequences],
            self.layout.data,
            max_tokens=self.runner.max_tokens_per_mbs * self.layout.context if dynamic else None,
            count=self.algorithm.training_batch_size_per_gpu,
            multiple=self.layout.pipeline if self.layout.virtual > 1 else 1,
        )

    def _update(
        self,
        sequences: Sequence[TrainSequence],
        plan: Plan,
        loss: LossFunction,
        *,
        temperature: float,
        lr: float | None = None,
    ) -> dict[str, float]:
        """Forward, backward, optimizer step on one mini-batch; reduced sums and maxima, grad_norm and lr."""
        from rstar2_megatron.actor.optimizer import learning_rate, optimizer_step

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        result = self._reduce(self._run(sequences, plan, loss, "trained", temperature, forward_only=False))
        if lr is None:
            lr = learning_rate(self.optimizer_steps, self.optim, self.lr_sched, self.max_steps)
        stepped, result["grad_norm"] = optimizer_step(self.optimizer, lr, self.optim)
        result["lr"] = lr
        self.optimizer_steps += 1
        self.skipped_steps += not stepped
        return result

    def _run(
        self,
        sequences: Sequence[TrainSequence],
        plan: Plan,
        loss: LossFunction,
        wanted: Literal["trained", "all"],
        temperature: float,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Run this rank's micro-batches through the pipeline; the sums that `loss` returned for each."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rstar2_megatron.actor.microbatch import build_microbatch
        from rstar2_megatron.actor.model import forward_log_probs

        own = plan.microbatches[self.state.get_data_parallel_rank()]
        batches = [build_microbatch(sequences, members, self.pack_context, wanted) for members in own]
        chunk_tokens = self.actor.log_prob_chunk_tokens
        no_tokens = torch.zeros([], dtype=torch.int, device=self.device)  # the loss is normalised already

        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)

            def normalised(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                value, sums = loss(batch, output)
                return value, no_tokens, sums

            return forward_log_probs(chunk, batch, temperature, chunk_tokens), normalised

        iterators = [iter(batches) for _ in self.chunks]
        virtual = len(self.chunks) > 1
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if virtual else iterators[0],
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.size(1),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        assert isinstance(results, list)
        return results

    def _speed(
        self, sequences: Sequence[TrainSequence], plans: list[Plan], seconds: float
    ) -> dict[str, float]:
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

    # ---------------------------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def _score(self, sequences: Sequence[TrainSequence], wanted: Literal["trained", "all"]) -> FlatLogProbs:
        scores = FlatLogProbs([s.length for s in sequences], self.device)
        for chunk in self.chunks:
            chunk.eval()

        def keep(batch: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            scores.put(batch.sequence, batch.place, output[0])
            return output.new_zeros(()), {}

        self._run(sequences, self._plan(sequences), keep, wanted, self._temperature, forward_only=True)
        if self.state.get_tensor_model_parallel_rank() != 0:
            scores.values.zero_()  # tensor-parallel ranks hold the same: count one of them
        dist.all_reduce(scores.values)
        return scores

    def _reduce(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums and maxima over micro-batches and ranks, the same on all ranks."""
        zero = torch.zeros((), device=self.device)
        counted = self.state.get_tensor_model_parallel_rank() == 0
        sums = torch.stack([sum((r.get(k, zero).float() for r in results), zero) for k in SUMS]).double()
        maxima = torch.stack([max((r.get(k, zero).float() for r in results), default=zero) for k in MAXIMA])
        if not counted:
            sums.zero_()
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return dict(zip((*SUMS, *MAXIMA), [*sums.tolist(), *maxima.tolist()]))

    # --------------------------------------------------------------------------------------------- weights

    def _sync_parameters(self) -> None:
        """Finish a pending overlapped parameter gather: until then weights read outside a step are stale."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream every weight as (Hugging Face name, full tensor); collective, every rank must exhaust it.

        Valid on all ranks. A tensor may share memory with the model: copy it to keep it beyond an update.
        """
        from rstar2_megatron.actor.hf_weights import iter_hf_weights
        from rstar2_megatron.actor.model import bare

        self._sync_parameters()
        return iter_hf_weights([bare(chunk) for chunk in self.chunks], self.model_config)

    def weights_checksum(self) -> dict[str, int]:
        """Checksum of every weight by Hugging Face name (`rstar2_megatron.weights_checksum`); collective."""
        return weights_checksum(self.iter_hf_weights())

    def export_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (safetensors, config, tokenizer) for transformers; collective."""
        from rstar2_megatron.actor.hf_weights import write_hf_directory

        dtype = "bfloat16" if self.actor.model.precision == "bf16" else "float32"
        write_hf_directory(self.iter_hf_weights(), directory, self.model_path, dtype, write=self.rank == 0)
        dist.barrier()

    def save_checkpoint(self, directory: str | Path, *, wait: bool = True) -> None:
        """Write model, optimizer, schedule and random states; collective.

        The directory appears whole or not at all. With wait=False training goes on while threads write; the
        directory then appears at the end of a later `train_step`, or in `finish_checkpoint`.
        """
        from rstar2_megatron.actor import checkpoint

        self.finish_checkpoint()
        self._sync_parameters()
        counters = {"optimizer_steps": self.optimizer_steps, "skipped_steps": self.skipped_steps}
        self._pending = checkpoint.start_save(directory, self.chunks, self.optimizer, counters)
        if wait:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint being written is in place; collective. Raises OSError when it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def load_checkpoint(self, directory: str | Path) -> None:
        """Restore what `save_checkpoint` wrote, also under another parallel layout; collective.

        Raises ValueError when the directory is not a complete checkpoint.
        """
        from rstar2_megatron.actor import checkpoint

        self.finish_checkpoint()
        counters = checkpoint.load(directory, self.chunks, self.optimizer)
        self.optimizer_steps = counters["optimizer_steps"]
        self.skipped_steps = counters["skipped_steps"]
