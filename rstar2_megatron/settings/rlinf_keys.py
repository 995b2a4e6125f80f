"""RLinf's keys that this project's schema does not have.

RLinf's rstar2 YAML loads unchanged and runs as released. A key that has another name here is translated. A key without
meaning here is accepted and named at start. A YAML of another task of RLinf is refused with the reason, and so is a value
that asks for an algorithm which is not implemented. Any other unknown key is an error in `settings/load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

MISSING: Any = object()


def _keys(section: str, reason: str, names: str) -> list[tuple[str, str]]:
    return [(f"{section}.{name}", reason) for name in names.split()]


# Dotted paths of keys and sections, with the reason why they have no meaning here.
WITHOUT_MEANING: tuple[tuple[str, str], ...] = (
    ("inference", "old log-probs are recomputed by the actor itself"),
    ("critic", "GRPO has no critic"),
    ("profile_data", "no placement search"),
    ("actor.megatron", "Megatron-core is set up from actor.model, actor.optim and the placement"),
    ("actor.tokenizer", "the tokenizer is the model directory's"),
    ("reward.tokenizer", "grading reads text"),
    ("rollout.vllm", "the engine is SGLang"),
    *_keys(
        "rollout",
        "set rollout.sglang.server_args for engine fields",
        "sglang.decode_log_interval sglang.use_torch_compile sglang.torch_compile_max_bs rollout_engine_config "
        "enforce_eager cuda_graph_max_bs disable_log_stats use_fast",
    ),
    *_keys(
        "rollout",
        "the rollout keeps token ids and log-probs as the engine produced them",
        "detokenize padding eos return_logprobs skip_special_tokens",
    ),
    *_keys(
        "rollout",
        "weights are checked by checksum after the first sync",
        "validate_weight validate_weight_first_sync validate_save_dir",
    ),
    ("rollout.distributed_executor_backend", "the engine runs in its own process"),
    ("rollout.print_outputs", "samples are written to trajectories.jsonl"),
    ("runner.task", "one task"),
    ("runner.weight_sync_interval", "weights are synced every step"),
    ("runner.per_worker_log", "logs are shared"),
    ("runner.enable_per_worker_log", "logs are shared"),
    *_keys(
        "algorithm",
        "micro-batches follow runner.max_tokens_per_mbs",
        "training_batch_size_per_gpu rollout_batch_size_per_gpu logprob_forward_micro_batch_size "
        "val_rollout_batch_size_per_gpu",
    ),
    ("algorithm.shuffle_rollout", "the batch is balanced by tokens"),
    ("algorithm.calculate_entropy", "entropy is always logged"),
    ("algorithm.early_stop_imp_ratio", "no early stop inside a step"),
    ("algorithm.use_valid_token_scale", "the loss is normalised by the global count of trained tokens"),
    ("algorithm.clip_log_ratio_min", "the log-ratio is always cut at 20"),
    ("algorithm.clip_log_ratio_max", "the log-ratio is always cut at 20"),
    ("algorithm.loss_scales", "one loss"),
    ("algorithm.advantage_mode", "one advantage per trajectory, or per turn with algorithm.turn_returns"),
    ("algorithm.sampling_params.min_new_tokens", "the model ends its turn when it will"),
    ("data.val_rollout_batch_size", "evaluation runs all its problems at once"),
    ("data.num_workers", "problems are read at start"),
    ("data.apply_chat_template", "the format is agentloop's"),
    ("data.validation_shuffle", "evaluation takes the problems in order"),
    ("data.dataset_name", "the data set is its files"),
    ("data.process_fn", "the data set is its files"),
    ("data.lazy_loading", "problems are read at start"),
    ("agentloop.group_name", "agent loops live in the rollout workers"),
    ("agentloop.max_user_turns", "turns are counted by agentloop.max_assistant_turns"),
    ("agentloop.print_outputs", "samples are written to trajectories.jsonl"),
    ("agentloop.continue_at_tool_failure", "a failed call is always shown to the model"),
    ("agentloop.toolcall_parser", "see agentloop.tool_call_format"),
    ("agentloop.is_dynamic_rollout_batch", "always"),
    ("agentloop.extra_args", "not used"),
    ("tools.mcp_file_system", "the tool is the Code Judge"),
    ("reward.reward_scale", "advantages are normalised, a scale has no effect"),
    ("actor.enable_dp_load_balance", "the batch is always balanced over data-parallel ranks"),
    ("actor.calculate_flops", "always"),
    ("actor.pack_traj", "always"),
    ("actor.mcore_gpt", "always"),
    ("actor.spec_name", "see actor.model.transformer_impl"),
    ("actor.enable_offload", "see actor.offload_weight, offload_grad, offload_optimizer"),
    *_keys(
        "actor.model",
        "taken from the model's config.json or fixed by the layer spec",
        "seq_length encoder_seq_length model_type model_arch activation normalization "
        "add_bias_linear add_qkv_bias position_embedding_type apply_rope_fusion bias_dropout_fusion "
        "persist_layer_norm bias_activation_fusion attention_softmax_in_fp32 batch_p2p_comm variable_seq_lengths "
        "gradient_accumulation_fusion moe_token_dispatcher_type use_cpu_initialization trust_remote_code qk_layernorm",
    ),
    *_keys(
        "actor.optim",
        "follows actor.model.precision; bf16 and fp32 need no loss scale",
        "bf16 fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    ("actor.optim.optimizer_enable_pin", "offloaded state is pinned beside a GPU"),
    ("actor.optim.optimizer_offload_fraction", "actor.optim.optimizer_cpu_offload moves all of it"),
    ("actor.optim.use_precision_aware_optimizer", "master weights, gradients and moments are fp32"),
    ("actor.optim.overlap_param_gather_with_optimizer_step", "not offered by this optimizer"),
    ("actor.lr_sched.lr_warmup_init", "warm-up begins at 0"),
)

# Keys that tell RLinf's other tasks from rstar2's: (path, values here, why another cannot run). The first counts.
_NO_TOOL = "RLinf's reasoning tasks train one answer without a tool, this project trains conversations with the Code Judge"
OTHER_TASKS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward.reward_type", ("rstar2",), _NO_TOOL),
    ("actor.training_backend", ("megatron",), "the actor here is Megatron-core"),
    ("rollout.rollout_backend", ("sglang",), "the engine here is SGLang"),
)

_FIRST_WEIGHTS = "a run starts from rollout.model.model_path, or from a checkpoint of this project in runner.init_checkpoint"
# Keys of which one value is implemented here, or null: path -> (this value, what to do instead).
ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "actor.checkpoint_load_path": (None, _FIRST_WEIGHTS),
    "actor.model.is_lora": (False, "all weights are trained"),
    "actor.model.megatron_checkpoint": (None, _FIRST_WEIGHTS),
    "algorithm.loss_type": ("actor", ""),
    "algorithm.normalize_advantages": (False, ""),
    "algorithm.sampling_params.repetition_penalty": (1, ""),
    "critic.use_critic_model": (False, ""),
    "data.apply_chat_template_kwargs": ({}, "give agentloop.chat_template a template that needs none"),
    "reward.use_reward_model": (False, ""),
    "runner.ckpt_path": (None, "a run goes on by runner.resume_dir"),
    "runner.enable_dynamic_batch_size": (True, ""),
    "runner.only_eval": (False, "runner.max_steps=0 evaluates alone"),
    "runner.use_pipeline": (False, ""),
}


def why_without_meaning(path: str) -> str | None:
    """The reason when `path` (or a section above it) is a known RLinf key without meaning here."""
    return next((reason for key, reason in WITHOUT_MEANING if path == key or path.startswith(key + ".")), None)


def translate(data: dict[str, Any], given: Collection[str] = ()) -> list[str]:
    """Move RLinf's keys to their names here, in place. Returns one note per key that was translated.

    given: keys of the command line, which go before those of the YAML by either name.
    Raises ValueError for a value that is not implemented here.
    """
    for path, here, what in OTHER_TASKS:
        value = get(data, path)
        if value not in (MISSING, None, *here):
            raise ValueError(
                f"{path}={value!r}: {what}. config/rstar2-qwen2.5-7b-megatron.yaml is a start for a run of this project"
            )
    notes: list[str] = []
    for path, (only, instead) in ONLY_VALUES.items():
        value = take(data, path)
        if value is not MISSING and value is not None and value != only:
            instead = instead and f": {instead}"
            raise ValueError(f"{path}={value!r} is not implemented here; the only value is {only!r}{instead}")
    bonus = get(data, "algorithm.entropy_bonus")
    if bonus not in (MISSING, None, 0) and get(data, "algorithm.calculate_entropy") is False:
        raise ValueError(
            f"algorithm.entropy_bonus={bonus!r} with algorithm.calculate_entropy=False: RLinf adds none then; change one"
        )
    scaled = get(data, "reward.reward_scale") not in (MISSING, None, 1)
    if scaled and get(data, "algorithm.adv_type") not in (MISSING, None, "grpo"):
        raise ValueError("reward.reward_scale is only without effect with algorithm.adv_type=grpo; put it into the reward")

    def move(old: str, new: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Give the old key's value to the new key, unless the YAML has the new key too and the command line not the old."""
        value = take(data, old)
        if value is MISSING or value is None:
            return
        if get(data, new) in (MISSING, None) or (old in given and new not in given):
            put(data, new, convert(value))
            notes.append(f"{old}={value!r:.60} read as {new}={convert(value)!r:.60}")
        else:
            notes.append(f"{old}={value!r:.60} not used: {new}={get(data, new)!r:.60} is written too")

    eps = take(data, "algorithm.ratio_clip_eps")
    sides = ("low", "high")
    for side in sides if "algorithm.ratio_clip_eps" in given else ():
        if f"algorithm.clip_ratio_{side}" not in given:
            drop(data, f"algorithm.clip_ratio_{side}")
    written = [get(data, f"algorithm.clip_ratio_{side}") not in (MISSING, None) for side in sides]
    if eps is not MISSING and all(written):
        notes.append(f"algorithm.ratio_clip_eps={eps!r} not used: clip_ratio_low and clip_ratio_high are written")
    for side in sides:
        path = f"algorithm.clip_ratio_{side}"
        if get(data, path) is None or (eps is not MISSING and get(data, path) is MISSING):
            drop(data, path)
            if eps is not MISSING:
                put(data, path, eps)
                notes.append(f"algorithm.ratio_clip_eps={eps!r} read as {path}={eps!r}")

    sampling = "algorithm.sampling_params"
    greedy = take(data, f"{sampling}.use_greedy")
    do_sample = take(data, f"{sampling}.do_sample")
    if greedy is True or do_sample is False:
        put(data, f"{sampling}.temperature", 0.0)
        notes.append(f"greedy sampling read as {sampling}.temperature=0.0")
    if get(data, "runner.max_steps") == -1:
        put(data, "runner.max_steps", 1_000_000)
        notes.append("runner.max_steps=-1 read as: until runner.max_epochs are over")
    if get(data, "data.type") == "rstar2":
        put(data, "data.type", "math")
        notes.append("data.type='rstar2' read as data.type='math'")
        _translate_rstar2(data, notes)
    move("rollout.custom_chat_template", "agentloop.chat_template")
    move("tools.codejudge.concurrency_limit", "tools.codejudge.max_concurrency")
    move("actor.megatron.distributed_timeout_minutes", "actor.distributed_timeout_minutes", float)
    for old in ("model_dir", "model_path"):
        move(f"rollout.{old}", "rollout.model.model_path")
    move("rollout.model_arch", "rollout.model.model_type")
    move("rollout.precision", "rollout.model.precision")
    _translate_schedule(data, notes)
    return notes


def _translate_rstar2(data: dict[str, Any], notes: list[str]) -> None:
    """RLinf's rstar2 has no switch: its code is the released one, and its token mean is of each micro-batch."""
    if get(data, "algorithm.variant") in (MISSING, None):
        put(data, "algorithm.variant", "released-rlinf")
        notes.append("data.type='rstar2' read as algorithm.variant='released-rlinf'")
    per_micro_batch = get(data, "algorithm.use_valid_token_scale") is False
    if get(data, "algorithm.loss_agg_func") == "token-mean" and per_micro_batch:
        put(data, "algorithm.loss_agg_func", "released-rlinf")
        notes.append("loss_agg_func='token-mean' with use_valid_token_scale=False read as 'released-rlinf'")


def _translate_schedule(data: dict[str, Any], notes: list[str]) -> None:
    """RLinf's scheduler has its own rates and a warm-up fraction, which override those of the optimizer."""
    sched = "actor.lr_sched"
    fraction = take(data, f"{sched}.lr_warmup_fraction")
    if fraction not in (MISSING, None) and get(data, f"{sched}.lr_warmup_iters") in (MISSING, None, 0):
        steps = get(data, f"{sched}.lr_decay_iters")
        if steps in (MISSING, None):
            steps, updates = get(data, "runner.max_steps"), get(data, "algorithm.n_minibatches")
            if isinstance(steps, int) and isinstance(updates, int):
                steps *= updates  # the schedule counts optimizer steps
        if isinstance(steps, int) and isinstance(fraction, int | float):
            warmup = round(fraction * steps)
            put(data, f"{sched}.lr_warmup_iters", warmup)
            notes.append(f"{sched}.lr_warmup_fraction={fraction!r} of {steps} steps read as lr_warmup_iters={warmup}")
    for theirs, ours in (("max_lr", "lr"), ("min_lr", "min_lr")):
        value = take(data, f"{sched}.{theirs}")
        if value in (MISSING, None):
            continue
        written = get(data, f"actor.optim.{ours}")
        if written is MISSING or float(written) != float(value):
            put(data, f"actor.optim.{ours}", value)
            notes.append(f"{sched}.{theirs}={value!r} read as actor.optim.{ours}={value!r}")


# ---------------------------------------------------------------------------- dotted paths in nested dicts


def get(data: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, or MISSING."""
    node: Any = data
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return MISSING
        node = node[name]
    return node


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, making sections that are absent."""
    *sections, last = path.split(".")
    node = data
    for name in sections:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value


def drop(data: dict[str, Any], path: str) -> None:
    """Remove the value at a dotted path if it is there."""
    parent, _, last = path.rpartition(".")
    node = get(data, parent) if parent else data
    if isinstance(node, dict):
        node.pop(last, None)


def take(data: dict[str, Any], path: str) -> Any:
    """Remove and return the value at a dotted path, or MISSING."""
    value = get(data, path)
    if value is not MISSING:
        drop(data, path)
    return value
