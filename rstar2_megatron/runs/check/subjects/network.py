"""Checks of the network: the head, packing, parallel layouts and TransformerEngine, against the plainest way of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rstar2_megatron.runs.check.case import (
    logprob_tolerance,
    longest_sequence,
    make_batch,
    make_case,
    mean_difference,
    tolerance,
)
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.programs.gradients import reference_path
from rstar2_megatron.runs.check.result import Check, CheckFailed, CheckSkipped, Finding
from rstar2_megatron.settings.schema import Settings

_GRADIENTS = "rstar2_megatron.runs.check.programs.gradients:gradients"
_PLAIN_OPTIMIZER = {
    "min_lr": 0.0,
    "lr": 1e-12,  # the step must not change the weights that the gradients are compared at
    "weight_decay": 0.0,
    "clip_grad": 1e9,
    "use_distributed_optimizer": False,  # every rank then holds whole gradients
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "optimizer_cpu_offload": False,
}
_NO_OFFLOAD: dict[str, Any] = {"offload_weight": False, "offload_grad": False, "offload_optimizer": False}


def head_errors(job: Job, hidden_size: int, vocab_size: int, chunk_tokens: int, precision: str) -> dict[str, float]:
    """Relative errors of the head in chunks against log_softmax over all logits at once, and its peak memory in bytes."""
    import torch  # here: the driver reads this file and does no torch work
    import torch.distributed as dist

    from rstar2_megatron.actor.network import logprob

    dist.init_process_group(
        "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl", init_method=job.init_method, rank=0, world_size=1
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # as many tokens as make several chunks: a small vocabulary has large ones
    tokens = max(5 * chunk_tokens // 2, 5 * logprob._MIN_CHUNK_LOGITS // vocab_size // 4)
    hidden = torch.randn(tokens, hidden_size, device=job.device).to(dtype)
    weight = (torch.randn(vocab_size, hidden_size, device=job.device) * 0.02).to(dtype)
    targets = torch.randint(vocab_size, (tokens,), device=job.device)
    by_logprob = torch.randn(tokens, device=job.device)
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    if job.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = logprob.log_prob_entropy(own[0], own[1], targets, temperature=1.0, chunk_tokens=chunk_tokens, group=dist.group.WORLD)
    (out[0] @ by_logprob).backward()
    peak = float(torch.cuda.max_memory_allocated() - before) if job.device == "cuda" else 0.0
    full = [tensor.float().requires_grad_() for tensor in (hidden, weight)]
    right = torch.empty_like(out[0])
    entropy = torch.empty_like(out[0])
    for start in range(0, tokens, 4096):  # in parts that are no part of the head's own
        rows = slice(start, start + 4096)
        log_p = (full[0][rows] @ full[1].t()).log_softmax(-1)
        right[rows] = log_p.gather(-1, targets[rows, None]).squeeze(-1).detach()
        entropy[rows] = -(log_p.exp() * log_p).sum(-1).detach()
        (log_p.gather(-1, targets[rows, None]).squeeze(-1) @ by_logprob[rows]).backward()
    dist.destroy_process_group()

    def error(ours: Any, theirs: Any) -> float:
        return float((ours.float() - theirs.float()).norm() / theirs.float().norm())

    assert all(tensor.grad is not None for tensor in (*own, *full))
    return {
        "log_prob": error(out[0], right),
        "entropy": error(out[1], entropy),
        "hidden_gradient": error(own[0].grad, full[0].grad),
        "weight_gradient": error(own[1].grad, full[1].grad),
        "tokens": float(tokens),
        "peak_bytes": peak,
    }


def head(context: Context) -> Finding:
    model, actor = context.thin_config, context.settings.actor
    figures = context.nodes.one(
        "rstar2_megatron.runs.check.subjects.network:head_errors",
        110.0,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        chunk_tokens=actor.head_chunk_tokens(cpu=context.device == "cpu"),
        precision=actor.model.precision,
    )
    allowed = 1e-3 if actor.model.precision == "fp32" else 0.02
    errors = {k: v for k, v in figures.items() if k not in ("tokens", "peak_bytes")}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    words = f"relative error {errors[worst]:.1e} ({worst}) over {figures['tokens']:.0f} tokens, allowed {allowed:.0e}"
    if figures["peak_bytes"]:
        words += f"; {figures['peak_bytes'] / 1e9:.2f} GB"
    if not errors[worst] <= allowed:
        raise CheckFailed(words, figures)
    return Finding(words, figures)


def plain_case(context: Context, *, max_tokens: int | None = None, **model: Any) -> Settings:
    """An actor whose gradients can be read: plain optimizer, nothing offloaded."""
    return make_case(context, model=model, optim=_PLAIN_OPTIMIZER, max_tokens=max_tokens, **_NO_OFFLOAD)


def reference(context: Context) -> Finding:
    """One rank, the batch packed: what everything else is compared with."""
    result = context.nodes.one(
        _GRADIENTS, 170.0, case=plain_case(context), batch=make_batch(context), keep=reference_path(context.scratch)
    )
    context.found["logprobs"] = result["logprobs"]
    if not 0 < result["grad_norm"] < float("inf"):
        raise CheckFailed(f"the gradient's norm is {result['grad_norm']}")
    figures = {"loss": result["loss"], "grad_norm": result["grad_norm"]}
    return Finding(f"loss {result['loss']:.4f}, gradient norm {result['grad_norm']:.4f}", figures)


def compared(context: Context, case: Settings, ranks: int = 1) -> Finding:
    """Log-probs and gradients of `case` over `ranks` ranks against the reference."""
    result = context.nodes.ranks(
        _GRADIENTS, ranks, 170.0, case=case, batch=make_batch(context), compare=reference_path(context.scratch)
    )[0]
    precision = context.settings.actor.model.precision
    difference = mean_difference(result["logprobs"], context.found["logprobs"])
    figures = {"gradient_error": result["error"], "worst": result["worst"], "logprob_difference": difference}
    words = (
        f"gradient error {result['error']:.1e} (most in {result['worst'].removeprefix('model.')}), log-probs "
        f"{difference:.1e} apart"
    )
    if not (result["error"] <= tolerance(precision) and difference <= logprob_tolerance(precision)):
        raise CheckFailed(f"{words}; allowed {tolerance(precision):.0e} and {logprob_tolerance(precision):.0e}", figures)
    return Finding(words, figures)


def one_at_a_time(context: Context) -> Finding:
    """Micro-batches of one sequence each: those of `make_batch` are longer than half of this budget."""
    return compared(context, plain_case(context, max_tokens=longest_sequence(context)))


_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


def sizes_of(context: Context, *keys: str) -> dict[str, Any]:
    """The YAML's parallel sizes of `keys`, 2 where it has 1, as far as a node has slots. Raises CheckSkipped."""
    model, most = context.settings.actor.model, context.slots_per_node
    sizes = {key: min(max(getattr(model, key), 2), most) for key in keys}
    config, tensor = context.thin_config, sizes.get("tensor_model_parallel_size", 1)
    if config.num_kv_heads % tensor or config.vocab_size % tensor:
        raise CheckSkipped(f"{config.num_kv_heads} key/value heads and {config.vocab_size} words do not divide by {tensor}")
    if sizes.get("expert_model_parallel_size", 1) > 1 and not config.is_moe:
        raise CheckSkipped("the model has no experts")
    return sizes


def layout(*keys: str) -> Callable[[Context], Finding]:
    """A check of one way to split the model, over as many ranks as the YAML splits it."""

    def run(context: Context) -> Finding:
        sizes = sizes_of(context, *keys)
        config, settings = context.thin_config, context.settings
        sequence = "tensor_model_parallel_size" in sizes and (settings.actor.model.sequence_parallel or config.is_moe)
        ranks = max(sizes.values(), default=2)
        found = compared(context, plain_case(context, **sizes, sequence_parallel=sequence), ranks)
        return Finding(f"{found.words}; {ranks} ranks", found.figures | {"ranks": ranks})

    return run


def whole_layout(context: Context) -> Finding:
    """All of the YAML's sizes together on every slot of a node; the rest is data parallel."""
    model, ranks = context.settings.actor.model, context.slots_per_node
    sizes = {key: getattr(model, key) for key in _LAYOUT}
    if ranks % model.ranks_of_copy:
        raise CheckSkipped(f"a copy of the model takes {model.ranks_of_copy} slots, a node has {ranks}")
    case = plain_case(
        context,
        **sizes,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
    )
    found = compared(context, case, ranks)
    shown = ", ".join(f"{key.split('_')[0]} {size}" for key, size in sizes.items() if size > 1)
    words = f"{found.words}; {ranks} ranks" + (f" with {shown}" if shown else "")
    return Finding(words, found.figures | {"ranks": ranks, **sizes})


def engine_layers(context: Context) -> Finding:
    """TransformerEngine's layers against megatron-core's local ones."""
    if context.settings.actor.model.transformer_impl == "local":
        raise CheckSkipped("actor.model.transformer_impl=local")
    other = context.nodes.one("rstar2_megatron.runs.check.subjects.network:implementation", 60.0)
    if other == "local":
        raise CheckSkipped("TransformerEngine is not installed: bash scripts/setup_env.sh --transformer-engine")
    return compared(context, plain_case(context, transformer_impl="local"))


def implementation(job: Job) -> str:
    """The implementation that `transformer_impl: auto` chooses in this process."""
    # here, because it imports megatron-core
    from rstar2_megatron.actor.network.layer_spec import choose_implementation

    return str(choose_implementation("auto", job.device))


BUG = "a wrong result here is a bug of this project or of a library: please report it with the report file"
AFTER = ("thin model", "one rank")
CHECKS = [
    Check("head in chunks", head, BUG, after=("thin model",)),
    Check("one rank", reference, BUG, deadline_s=180.0, after=("thin model",)),
    Check("packed attention", one_at_a_time, f"actor.model.transformer_impl=local avoids the fused kernel; {BUG}",
          deadline_s=180.0, after=AFTER),
    Check("TransformerEngine", engine_layers, f"actor.model.transformer_impl=local trains without it; {BUG}",
          deadline_s=240.0, after=AFTER, gpu=True),
    Check("data parallel", layout(), BUG, deadline_s=180.0, after=AFTER, ranks=2),
    *(Check(f"{key.split('_')[0]} parallel", layout(key), BUG, deadline_s=180.0, after=AFTER, ranks=2)
      for key in _LAYOUT),
    Check("whole layout", whole_layout, BUG, deadline_s=180.0, after=AFTER, ranks=2),
]  # fmt: skip
