"""One rank's share of the policy, or of a reward model: model chunks, optimizer, forward and backward passes.

Methods are collective over the actor's ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from rstar2_megatron.actor.hf_weights import iter_hf_weights, load_hf_weights
from rstar2_megatron.actor.layout import Layout
from rstar2_megatron.actor.losses import MAXIMA, SUMS, FlatLogProbs, LossFunction
from rstar2_megatron.actor.network.attention import rotary_frequencies
from rstar2_megatron.actor.network.layer_spec import choose_implementation
from rstar2_megatron.actor.network.microbatch import PackContext, Wanted, build_microbatch
from rstar2_megatron.actor.network.model import build_chunks, forward_wanted, unwrap
from rstar2_megatron.actor.optimizer import build_optimizer, optimizer_step, wrap_ddp
from rstar2_megatron.actor.packing import MicroBatchPlan
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.cpu import megatron as cpu_megatron
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import ActorSettings, OptimSettings


class Policy:
    """The sharded model under training. Needs Megatron's process groups (`process_groups.join`)."""

    def __init__(self, model: ModelConfig, layout: Layout, actor: ActorSettings, model_path: str, device: str) -> None:
        """Build this rank's chunks, read their weights from the Hugging Face directory, build the optimizer."""
        self.model, self.layout, self.device = model, layout, device
        self.sums: tuple[str, ...] = SUMS
        """Named values of loss functions that are summed over micro-batches and ranks."""
        self._trained: Wanted = "last" if model.scores else "trained"
        self.precision, self.chunk_tokens = (actor.model.precision, actor.head_chunk_tokens(cpu=device == "cpu"))
        implementation = choose_implementation(actor.model.transformer_impl, device)
        cpu_megatron.repair_router_without_engine()
        config, chunks = build_chunks(model, actor.model, implementation, device)
        load_hf_weights([unwrap(chunk) for chunk in chunks], model, model_path)
        self.chunks = wrap_ddp(config, chunks, actor.optim)
        self.reset_optimizer(actor.optim)
        self.context = PackContext(
            frequencies=rotary_frequencies(model).to(device),
            dtype=config.params_dtype,
            device=device,
            tensor_parallel=layout.tensor,
            sequence_parallel=config.sequence_parallel,
            context_parallel=layout.context,
            context_rank=parallel_state.get_context_parallel_rank(),
            implementation=implementation,
        )

    def reset_optimizer(self, optim: OptimSettings) -> None:
        """Build a new optimizer for the current weights."""
        self.optim = optim
        self.optimizer: Any = None  # free the old state before the new one is allocated
        self.optimizer = build_optimizer(self.chunks, optim, self.precision)

    # -------------------------------------------------------------------------------------- running

    def context_sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks of context parallelism, which share their sequences; with gradient, collective over them."""
        if self.layout.context == 1 or not values.numel():
            return values
        summed: Tensor = all_reduce(values, group=parallel_state.get_context_parallel_group())
        return summed

    def update(
        self, sequences: Sequence[TrainSequence], plan: MicroBatchPlan, loss: LossFunction, *, temperature: float, lr: float
    ) -> tuple[bool, dict[str, float]]:
        """Forward, backward and optimizer step on one mini-batch.

        Returns whether the optimizer stepped (it skips a gradient that is not finite), and the reduced sums and maxima of
        the loss function with `grad_norm` (before clipping) and `lr`.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self._run(sequences, plan, loss, self._trained, temperature, forward_only=False)
        result = self._reduced(results)
        stepped, result["grad_norm"] = optimizer_step(self.optimizer, lr, self.optim)
        result["lr"] = lr
        return stepped, result

    @torch.no_grad()
    def measure(
        self, sequences: Sequence[TrainSequence], plan: MicroBatchPlan, loss: LossFunction, *, temperature: float
    ) -> dict[str, float]:
        """The loss function's reduced sums and maxima under the current weights; nothing is updated."""
        return self._reduced(self._run(sequences, plan, loss, self._trained, temperature, forward_only=True))

    @torch.no_grad()
    def score(
        self, sequences: Sequence[TrainSequence], plan: MicroBatchPlan, wanted: Wanted, *, temperature: float
    ) -> FlatLogProbs:
        """Log-probs (of a reward model: scores) of the wanted tokens, 0.0 for other tokens, identical on all ranks."""
        scores = FlatLogProbs([s.length for s in sequences], self.device)

        def keep(batch: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            scores.put(batch.sequence, batch.place, output[0])
            return output.new_zeros(()), {}

        self._run(sequences, plan, keep, wanted, temperature, forward_only=True)
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            scores.values.zero_()  # tensor-parallel ranks hold equal values: count only rank 0
        dist.all_reduce(scores.values)
        return scores

    def _run(
        self,
        sequences: Sequence[TrainSequence],
        plan: MicroBatchPlan,
        loss: LossFunction,
        wanted: Wanted,
        temperature: float,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Run this rank's micro-batches through the pipeline. Returns the named values of `loss` for each micro-batch."""
        for chunk in self.chunks:
            chunk.train(not forward_only)
        own = plan.microbatches[parallel_state.get_data_parallel_rank()]
        each = (build_microbatch(sequences, members, self.context, wanted) for members in own)  # built when it is needed
        first = next(each)
        batches = itertools.chain([first], each)
        no_tokens = torch.zeros([], dtype=torch.int, device=self.device)  # the loss is already normalised

        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)

            def normalised(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                value, sums = loss(batch, output)
                return value, no_tokens, sums

            return forward_wanted(chunk, batch, temperature, self.chunk_tokens), normalised

        virtual = len(self.chunks) > 1
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(itertools.tee(batches, len(self.chunks))) if virtual else batches,
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=len(own),
            seq_length=first.input_ids.size(1),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        assert isinstance(results, list)
        return results

    def _reduced(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums and maxima over micro-batches and ranks, identical on all ranks."""
        zero = torch.zeros((), device=self.device)
        sums = torch.stack([sum((r.get(k, zero).float() for r in results), zero) for k in self.sums]).double()
        maxima = torch.stack([max((r.get(k, zero).float() for r in results), default=zero) for k in MAXIMA])
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            sums.zero_()  # tensor-parallel ranks hold equal values: count only rank 0
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return dict(zip((*self.sums, *MAXIMA), [*sums.tolist(), *maxima.tolist()]))

    # -------------------------------------------------------------------------------------- weights

    def finish_gather(self) -> None:
        """Finish a pending overlapped parameter gather; before that, weights read outside a step are stale."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream every weight as (Hugging Face name, full tensor); every rank must exhaust the iterator."""
        self.finish_gather()
        return iter_hf_weights([unwrap(chunk) for chunk in self.chunks], self.model)
