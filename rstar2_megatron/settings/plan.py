"""The plan: what a YAML means in trajectories, tokens and gigabytes, before anything starts. Pure arithmetic.

Formulas (N parameters, world = data x tensor x pipeline x context ranks, GB = 1e9 bytes):
- weights 2N/(TP PP) in bf16, gradients 4N/(TP PP) in fp32, optimizer 12N/world (fp32 master, two moments,
  sharded by the distributed optimizer); fp32 training: 4N, 4N and 8N; experts are divided by EP instead of TP;
- activations with full recompute: one input per layer, plus one layer at work; without: every layer's;
- vocabulary head: `log_prob_chunk_tokens` rows of vocab/TP fp32 logits, three times (logits, softmax,
  gradient), and the gradient of its weight, summed in fp32;
- KV cache: 2 x layers x KV heads x head size x bytes a token; capacity = (memory x share x TP - weights) /
  that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rstar2_megatron.actor.model_config import ModelConfig
from rstar2_megatron.settings.known_models import known_model
from rstar2_megatron.settings.placement import Slots, collocated, component_slots, slots_of, visible_gpus
from rstar2_megatron.settings.schema import Settings

GB = 1e9
CUDA_OVERHEAD_GB = 5.0  # context, NCCL buffers, workspaces, fragmentation
# H100 SXM, for the expected times: dense bf16 FLOP/s, memory bandwidth, and the shares that are reached.
PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 3.35e12
TRAIN_SHARE, DECODE_SHARE = 0.4, 0.5


@dataclass(frozen=True, slots=True)
class Memory:
    """GB of one rank while it trains."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    overhead: float = 0.0

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.static + self.activations + self.head + self.overhead


@dataclass
class Plan:
    """What `--dry-run` prints. `problems` say why it does not fit, each with operands and a remedy."""

    title: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    actor_memory: Memory | None = None
    kv_capacity_tokens: int | None = None

    @property
    def fits(self) -> bool:
        return not self.problems

    def add(self, section: str, label: str, value: str) -> None:
        self.rows.append((section, label, value))

    def render(self) -> str:
        """An aligned text table, then notes and problems."""
        left = max((len(section) for section, _, _ in self.rows), default=0)
        middle = max((len(label) for _, label, _ in self.rows), default=0)
        lines = [self.title, "-" * len(self.title)]
        previous = ""
        for section, label, value in self.rows:
            shown = "" if section == previous else section
            lines.append(f"{shown:<{left}}  {label:<{middle}}  {value}")
            previous = section
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"DOES NOT FIT: {problem}" for problem in self.problems] or ["fits"]
        return "\n".join(lines)


def model_of(settings: Settings) -> tuple[ModelConfig | None, str]:
    """(shape, where it comes from); None when the directory is absent and its name says nothing.

    Raises ValueError for a config.json that the actor does not support.
    """
    path = settings.rollout.model.model_path
    if (Path(path) / "config.json").is_file():
        return ModelConfig.from_directory(path), "config.json"
    return known_model(path), "by the directory's name"


def parameters_of_largest_stage(model: ModelConfig, pipeline: int) -> float:
    """Parameters (but for experts) of the pipeline stage that holds most: its layers, an embedding or head."""
    matrix = model.vocab_size * model.hidden_size
    matrices = 1 if model.tie_word_embeddings else 2
    layers = model.num_parameters - model.expert_parameters - matrices * matrix
    return layers + matrices * matrix if pipeline == 1 else layers / pipeline + matrix


def training_memory(settings: Settings, model: ModelConfig, world: int, *, cpu: bool) -> Memory:
    """Memory of the fullest actor rank of `world`."""
    parallel, optim = settings.actor.model, settings.actor.optim
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    bf16 = parallel.precision == "bf16"
    width = 2 if bf16 else 4
    ep = parallel.expert_model_parallel_size
    dense, experts = parameters_of_largest_stage(model, pp) / tp, model.expert_parameters / (ep * pp)
    per_rank = dense + experts
    state = 12 if bf16 else 8
    sharded = dense / max(world // (tp * pp), 1) + experts / max(world // (ep * pp), 1)
    if not optim.use_distributed_optimizer:
        sharded = per_rank

    tokens = settings.runner.max_tokens_per_mbs
    if not settings.runner.enable_dynamic_batch_size:
        tokens = settings.algorithm.training_batch_size_per_gpu * settings.runner.seq_length
    tokens = -(-tokens // cp)
    split = tp if parallel.sequence_parallel else 1
    hidden = width * tokens * model.hidden_size / split
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    mlp = 3 * model.intermediate_size
    if model.is_moe:  # a token's copies for its experts, where experts are chosen evenly
        mlp = model.experts_per_token * (3 * model.expert_intermediate_size + 2 * model.hidden_size)
    layer = 6 * hidden + width * tokens * (2 * q + 2 * kv + mlp) / tp
    layers = -(-model.num_layers // pp)
    in_flight = pp  # micro-batches that the first stage holds under 1F1B
    if parallel.recompute_granularity == "full":
        every = parallel.recompute_num_layers or 1
        if parallel.recompute_method == "block":
            recomputed = min(every, layers)
            activations = in_flight * (recomputed * hidden + (layers - recomputed) * layer) + layer
        else:
            activations = in_flight * (-(-layers // every)) * hidden + every * layer
    else:
        activations = in_flight * layers * layer
    head = 3 * 4 * settings.actor.log_prob_chunk_tokens * model.vocab_size / tp
    head += (6 if bf16 else 4) * model.vocab_size * model.hidden_size / tp
    return Memory(
        weights=width * per_rank / GB,
        gradients=4 * per_rank / GB,
        optimizer=state * sharded / GB,
        activations=activations / GB,
        head=head / GB,
        overhead=0.0 if cpu else CUDA_OVERHEAD_GB,
    )


def kv_bytes_per_token(model: ModelConfig, precision: str) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * (2 if precision == "bf16" else 4)


def kv_capacity(settings: Settings, model: ModelConfig, gpu_gb: float | None) -> int:
    """Tokens of KV cache of one engine; negative when its weights do not fit."""
    rollout = settings.rollout
    width = 2 if rollout.model.precision == "bf16" else 4
    if gpu_gb is None:  # on CPU SGLang must be told
        return rollout.max_total_tokens or 0
    room = gpu_gb * GB * rollout.gpu_memory_utilization * rollout.tensor_parallel_size
    room -= width * model.num_parameters
    capacity = int(room // kv_bytes_per_token(model, rollout.model.precision))
    return min(capacity, rollout.max_total_tokens or capacity)


def make_plan(
    settings: Settings,
    *,
    slots: Slots | None = None,
    find_gpus: Callable[[], tuple[int, float]] = visible_gpus,
) -> Plan:
    """The plan of a YAML. Without `slots` the machine is asked; without GPUs 8 x 80 GB a node are assumed.

    Raises ValueError for a placement or a model that cannot be planned at all.
    """
    if slots is None:
        slots = slots_of(settings.cluster, find_gpus())
    plan = Plan(f"Plan of {settings.runner.experiment_name}")
    places = component_slots(settings.cluster, slots.count)
    model, source = model_of(settings)
    _plan_placement(plan, settings, slots, places)
    world = len(places.get("actor", range(slots.count)))
    task = settings.runner.task_type
    if task == "sft":
        _plan_sft(plan, settings)
    else:
        _plan_batch(plan, settings, world)
    if model is None:
        plan.notes.append(
            f"rollout.model.model_path={settings.rollout.model.model_path} is absent and of no known name: "
            "memory cannot be planned"
        )
        return plan
    plan.add("model", "parameters", f"{_parameters(model.num_parameters)} ({source})")
    if task != "difficulty_filter":
        _plan_training(plan, settings, slots, model, world)
    if task == "sft":
        return plan
    _plan_rollout(plan, settings, slots, model, len(places.get("rollout", range(slots.count))))
    if not slots.is_cpu and task == "reasoning":
        if collocated(settings.cluster, slots):
            _plan_sharing(plan, settings, slots, model)
        _plan_times(plan, settings, model, world)
    return plan


# ----------------------------------------------------------------------------------------------- sections


def _plan_placement(plan: Plan, settings: Settings, slots: Slots, places: dict[str, list[int]]) -> None:
    kind = "CPU slots" if slots.is_cpu else f"GPUs of {slots.memory_gb:.0f} GB"
    if slots.assumed:
        kind += " (assumed: none visible here)"
    plan.add("placement", "slots", f"{slots.count} {kind} on {settings.cluster.num_nodes} node(s)")
    for component in ("actor", "rollout", "reward"):
        ranks = places.get(component)
        plan.add("placement", component, "by node group" if ranks is None else _ranges(ranks))


def _plan_sft(plan: Plan, settings: Settings) -> None:
    sft = settings.sft
    plan.add(
        "batch",
        "step",
        f"{sft.batch_size} conversations of at most {sft.max_length or settings.runner.seq_length} tokens, packed to "
        f"{settings.runner.max_tokens_per_mbs} tokens a micro-batch",
    )
    plan.add(
        "batch",
        "schedule",
        f"{sft.epochs:g} epochs, lr {sft.lr:g}, {sft.warmup_ratio:.1%} warm-up, then {sft.lr_decay_style}",
    )


def _plan_batch(plan: Plan, settings: Settings, world: int) -> None:
    algorithm, parallel = settings.algorithm, settings.actor.model
    problems, rollouts = settings.data.rollout_batch_size, algorithm.group_size
    sampling = algorithm.down_sampling
    kept = sampling.down_sampling_config.down_sample_to_n if sampling.do_down_sampling else rollouts
    data_parallel = world // (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    plan.add(
        "batch",
        "step",
        f"{problems} problems x {rollouts} rollouts = {problems * rollouts} trajectories, "
        f"at most {problems * kept} kept ({kept} a group)",
    )
    plan.add("batch", "updates a step", str(algorithm.n_minibatches))
    plan.add(
        "batch",
        "parallel",
        f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size} x "
        f"context {parallel.context_parallel_size} x data {data_parallel}"
        + (
            f", experts {parallel.expert_model_parallel_size}"
            if parallel.expert_model_parallel_size > 1
            else ""
        ),
    )
    tokens = settings.runner.max_tokens_per_mbs
    longest = settings.runner.seq_length
    if settings.runner.enable_dynamic_batch_size:
        per_mbs = max(tokens // longest, 1)
        count = -(-problems * kept // (per_mbs * max(data_parallel, 1)))
        plan.add(
            "batch",
            "micro-batch",
            f"up to {tokens} tokens packed ({per_mbs} of the longest trajectories); at most {count} a rank",
        )
    else:
        rows = algorithm.training_batch_size_per_gpu
        plan.add("batch", "micro-batch", f"{rows} trajectories of up to {longest} tokens")
    plan.add(
        "batch",
        "trajectory",
        f"prompt {settings.data.max_prompt_length} + response {algorithm.sampling_params.max_new_tokens} "
        f"<= {longest} tokens, {settings.agentloop.max_assistant_turns} turns",
    )


def _plan_training(plan: Plan, settings: Settings, slots: Slots, model: ModelConfig, world: int) -> None:
    memory = training_memory(settings, model, world, cpu=slots.is_cpu)
    plan.actor_memory = memory
    parts = (
        f"weights {_gb(memory.weights)} + gradients {_gb(memory.gradients)} + optimizer {_gb(memory.optimizer)} "
        f"+ activations {_gb(memory.activations)} + vocabulary head {_gb(memory.head)}"
    )
    if memory.overhead:
        parts += f" + CUDA {memory.overhead:.0f}"
    plan.add("training", "GB per rank", f"{_gb(memory.total)} = {parts}")
    flops = model.train_flops([settings.runner.seq_length]) / settings.runner.seq_length
    plan.add(
        "training",
        "FLOP per token",
        f"{flops / 1e9:.3g} G at full length" if flops >= 1e8 else f"{flops / 1e6:.3g} M at full length",
    )
    if slots.memory_gb is None or memory.total <= slots.memory_gb:
        return
    name = Path(settings.rollout.model.model_path).name
    tp = settings.actor.model.tensor_model_parallel_size
    if memory.static + memory.overhead > slots.memory_gb:
        cause = f"{memory.static:.0f} GB per GPU for weights, gradients and optimizer"
    else:
        tokens = settings.runner.max_tokens_per_mbs
        cause = f"{memory.total:.0f} GB per GPU with the activations of {tokens} tokens"
    plan.problems.append(
        f"{name} at TP {tp} needs {cause}, has {slots.memory_gb:.0f}; "
        f"{_remedy(settings, model, world, slots.memory_gb)}"
    )


def _remedy(settings: Settings, model: ModelConfig, world: int, gpu_gb: float) -> str:
    """The smallest change that makes training fit."""

    def fits(**changes: object) -> bool:
        changed = settings.model_copy(deep=True)
        for key, value in changes.items():
            section = changed.runner if key == "max_tokens_per_mbs" else changed.actor.model
            setattr(section, key, value)
        return training_memory(changed, model, world, cpu=False).total <= gpu_gb

    parallel = settings.actor.model
    if parallel.recompute_granularity != "full" and fits(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ):
        return (
            "set actor.model.recompute_granularity=full actor.model.recompute_method=uniform "
            "actor.model.recompute_num_layers=1"
        )
    ep, pp = parallel.expert_model_parallel_size, parallel.pipeline_model_parallel_size
    for larger in range(ep + 1, world // pp + 1) if model.is_moe else ():
        divides = model.num_experts % larger == 0 and world % (larger * pp) == 0
        if divides and fits(expert_model_parallel_size=larger):
            return f"set actor.model.expert_model_parallel_size={larger}"
    tp = parallel.tensor_model_parallel_size
    others = pp * parallel.context_parallel_size
    for larger in range(tp + 1, world // others + 1):
        divides = model.num_kv_heads % larger == 0 and world % (larger * others) == 0
        if divides and fits(tensor_model_parallel_size=larger, sequence_parallel=True):
            return f"set actor.model.tensor_model_parallel_size={larger} actor.model.sequence_parallel=True"
    tokens = settings.runner.max_tokens_per_mbs
    while tokens // 2 >= settings.runner.seq_length:
        tokens //= 2
        if fits(max_tokens_per_mbs=tokens):
            return f"set runner.max_tokens_per_mbs={tokens}"
    return "place the actor on more GPUs or use a smaller model"


def _plan_rollout(plan: Plan, settings: Settings, slots: Slots, model: ModelConfig, num_slots: int) -> None:
    rollout = settings.rollout
    engines = max(num_slots // rollout.tensor_parallel_size, 1)
    trajectories = settings.data.rollout_batch_size * settings.algorithm.group_size
    longest = settings.runner.seq_length
    plan.add("rollout", "engines", f"{engines} x TP {rollout.tensor_parallel_size}")
    if slots.is_cpu and rollout.max_total_tokens is None:
        plan.problems.append(
            "rollout.max_total_tokens is null, but on CPU the KV cache has no natural size; set it, e.g. "
            f"rollout.max_total_tokens={max(65536, 8 * longest)}"
        )
        return
    capacity = kv_capacity(settings, model, slots.memory_gb)
    plan.kv_capacity_tokens = capacity
    if capacity < longest:
        weights = model.num_parameters * (2 if rollout.model.precision == "bf16" else 4) / GB
        memory = "" if slots.memory_gb is None else f" and {slots.memory_gb:.0f} GB per GPU"
        plan.problems.append(
            f"an engine of TP {rollout.tensor_parallel_size} has room for {max(capacity, 0)} KV tokens "
            f"beside {weights:.1f} GB of weights, a trajectory may need {longest} (gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization}{memory}); raise rollout.gpu_memory_utilization, "
            "rollout.tensor_parallel_size or rollout.max_total_tokens"
        )
        return
    per_token = kv_bytes_per_token(model, rollout.model.precision)
    plan.add(
        "rollout",
        "KV cache an engine",
        f"{capacity:,} tokens of {per_token / 1024:.0f} KiB ({capacity * per_token / GB:.1f} GB): "
        f"{capacity // longest} trajectories at full length",
    )
    plan.add(
        "rollout",
        "trajectories an engine",
        f"{-(-trajectories // engines)} a step; in flight {min(rollout.max_running_requests, capacity // longest)} that "
        f"surely fit, {min(rollout.max_running_requests, 2 * capacity // longest)} at half length "
        f"(rollout.max_running_requests={rollout.max_running_requests})",
    )


def _plan_times(plan: Plan, settings: Settings, model: ModelConfig, world: int) -> None:
    """Expected seconds of a step on H100s at half the longest length, from the formulas above."""
    if plan.kv_capacity_tokens is None or settings.actor.model.precision != "bf16":
        return
    length = settings.runner.seq_length // 2
    algorithm, rollout = settings.algorithm, settings.rollout
    sampling = algorithm.down_sampling
    kept = sampling.down_sampling_config.down_sample_to_n
    if not sampling.do_down_sampling:
        kept = algorithm.group_size
    problems = settings.data.rollout_batch_size
    train_s = model.train_flops([length]) * problems * kept / (world * PEAK_FLOPS * TRAIN_SHARE)
    running = max(min(rollout.max_running_requests, plan.kv_capacity_tokens // length), 1)
    read = 2 * model.num_parameters + running * length / 2 * kv_bytes_per_token(model, "bf16")
    per_engine = running * PEAK_BYTES_PER_S * rollout.tensor_parallel_size / read * DECODE_SHARE
    tokens = problems * algorithm.group_size * length
    rollout_s = tokens / (per_engine * max(world // rollout.tensor_parallel_size, 1))
    plan.add(
        "expected",
        "seconds a step",
        f"rollout {rollout_s:.0f} + training {train_s:.0f}, before the tail and tool latency (H100, {length} "
        f"tokens a trajectory, {TRAIN_SHARE:.0%} of peak FLOP/s, {DECODE_SHARE:.0%} of bandwidth)",
    )


def _plan_sharing(plan: Plan, settings: Settings, slots: Slots, model: ModelConfig) -> None:
    """Actor and engines on the same GPUs: what each phase of a step needs of one."""
    memory, gpu_gb, rollout = plan.actor_memory, slots.memory_gb, settings.rollout
    if memory is None or gpu_gb is None:
        return
    actor = settings.actor
    engine = rollout.gpu_memory_utilization * gpu_gb
    stays = memory.overhead
    stays += 0 if actor.offload_weight else memory.weights
    stays += 0 if actor.offload_grad else memory.gradients
    stays += 0 if actor.offload_optimizer else memory.optimizer
    width = 2 if rollout.model.precision == "bf16" else 4
    weights = width * model.num_parameters / rollout.tensor_parallel_size / GB
    turns = actor.offload_weight or actor.offload_grad or actor.offload_optimizer
    if turns:
        sync = stays + (memory.weights if actor.offload_weight else 0) + weights
        plan.add(
            "sharing a GPU",
            "GB in turns",
            f"training {_gb(memory.total)}, weight sync {_gb(sync)}, rollout {_gb(engine + stays)} (engine "
            f"{_gb(engine)} + actor {_gb(stays)})",
        )
        if sync > gpu_gb:
            plan.problems.append(
                f"the weight sync needs {sync:.0f} GB per GPU ({sync - weights:.0f} of the actor, {weights:.0f} of the "
                f"engine's weights), has {gpu_gb:.0f}; set actor.offload_grad=True actor.offload_optimizer=True or "
                "raise rollout.tensor_parallel_size"
            )
    else:
        stays = memory.total
        plan.add("sharing a GPU", "GB at all times", f"{_gb(engine + stays)} (nothing is offloaded)")
    if engine + stays > gpu_gb:
        plan.problems.append(
            f"collocated: the engine takes {engine:.0f} GB (rollout.gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization}) beside {stays:.0f} GB of the actor, has {gpu_gb:.0f}; set "
            + (
                f"rollout.gpu_memory_utilization={int(100 * (1 - stays / gpu_gb)) / 100}"
                if turns and stays < gpu_gb
                else "actor.offload_weight=True actor.offload_grad=True actor.offload_optimizer=True"
            )
        )


def _parameters(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def _gb(value: float) -> str:
    """Two decimals, three below 0.1 GB, so that a tiny model's parts are seen too."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _ranges(ranks: list[int]) -> str:
    """0-3,6 for [0, 1, 2, 3, 6]."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)
