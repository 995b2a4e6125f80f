"""The YAML's schema: strict, typed, one class per section, a sentence under each field.

Keys keep RLinf's names wherever RLinf has the key, so that an RLinf rstar2 YAML reads the same here. Keys
that RLinf has and that mean nothing here are listed in `settings/rlinf_keys.py` and named at start; any
other key is an error (`settings/load.py` names the nearest valid one).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: unknown keys are errors, attribute docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


# --------------------------------------------------------------------------------------------- cluster


class ClusterSettings(Section):
    """RLinf's cluster section, passed to `rlinf.scheduler.Cluster` as it stands."""

    num_nodes: int = Field(1, ge=1)
    component_placement: Any
    """RLinf placement: {"actor,rollout,reward": "all"}, or per component with ranks or node groups."""
    node_groups: list[dict[str, Any]] | None = None
    """RLinf node groups; the CPU YAML registers its slots here (type CPUSlots)."""


# --------------------------------------------------------------------------------------------- runner


class LoggerSettings(Section):
    log_path: str
    project_name: str = "rstar2"
    experiment_name: str
    logger_backends: list[Literal["tensorboard", "wandb", "swanlab"]] = ["tensorboard"]
    """metrics.jsonl is always written. wandb and swanlab need `requirements/loggers.txt`."""
    wandb_entity: str | None = None
    wandb_proxy: str | None = None
    """wandb runs offline where WANDB_MODE=offline is in the environment."""
    swanlab_mode: Literal["cloud", "local", "offline", "disabled"] = "cloud"


class StopCondition(Section):
    """Ends a run, or a stage of a recipe, before its last step."""

    metric: str
    """A name of metrics.jsonl, e.g. rollout/clip_ratio, or eval/average for evaluations in training."""
    at_least: float | None = None
    at_most: float | None = None
    times: int = Field(1, ge=1)
    """So many values one after the other must satisfy it."""
    average_over: int = Field(1, ge=1)
    """Steps with the metric that are averaged to one value."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> StopCondition:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a condition needs at_least or at_most")
        return self


class RunnerSettings(Section):
    task_type: Literal["reasoning", "sft", "difficulty_filter"] = "reasoning"
    """reasoning: GRPO-RoC (RLinf's name); sft: supervised fine-tuning; difficulty_filter: count how often each
    problem is solved, and leave out those that teach nothing.
    """
    experiment_name: str
    output_dir: str = "results"
    """Everything a run writes lies under {output_dir}/{experiment_name}/."""
    logger: LoggerSettings
    max_epochs: int = Field(1000, ge=1)
    max_steps: int = Field(ge=0)
    """Training steps; 0 only evaluates."""
    save_interval: int = -1
    """Steps between checkpoints; -1 saves only after the last step."""
    keep_checkpoints: int = Field(2, ge=1)
    val_check_interval: int = -1
    """Steps between evaluations in training; -1 evaluates only before and after."""
    resume_dir: str | None = "auto"
    """`auto` (newest complete checkpoint of this experiment), a global_step_N directory, or null."""
    init_checkpoint: str | None = None
    """A global_step_N directory of another run whose model and optimizer this run starts from, at step 0."""
    stop_when: list[StopCondition] = []
    """The run ends, with checkpoint and export, as soon as one of these holds."""
    seq_length: int = Field(ge=8)
    """Longest prompt + response in tokens."""
    enable_dynamic_batch_size: bool = True
    max_tokens_per_mbs: int = Field(ge=8)
    """Token budget of one packed micro-batch."""
    step_timeout_s: float = Field(3600.0, gt=0)
    """A step that is not done by then is a failure, not a hang."""
    save_trajectories_per_step: int = Field(8, ge=0)
    """Trajectories of each step written to trajectories.jsonl, rounded up to whole groups; 0 writes none."""
    save_rollouts: bool = False
    """Lengths, turns and tool times of every trajectory to rollouts.jsonl, for `python -m benchmarks.scheduler`."""
    save_rollout_tokens: bool = False
    """Write every trajectory of each step, token for token, to rollouts/step_N.jsonl.gz of the run."""
    replay_rollouts: str | None = None
    """A directory written by save_rollout_tokens: train on its steps instead of rolling out. The same trajectories
    under two layouts, losses or backends give losses that can be compared number by number."""


# ------------------------------------------------------------------------------------------- algorithm


class DownSamplingConfig(Section):
    reject_equal_reward: bool = True
    roc_error_ratio: bool = True
    roc_answer_format: bool = True
    min_zero_reward_trace_num: int = Field(2, ge=0)
    min_non_zero_reward_trace_num: int = Field(2, ge=0)
    down_sample_to_n: int = Field(ge=1)
    """G: trajectories kept of each group of `algorithm.group_size`."""
    mode: Literal["paper", "released"] = "paper"
    """paper: positives sampled with probability inverse to penalty; released: lowest penalty first."""
    penalty_epsilon: float = Field(0.01, gt=0)
    """Added to the penalty in `paper` mode, so that a clean trajectory has a finite weight."""


class DownSamplingSettings(Section):
    do_down_sampling: bool = True
    down_sampling_config: DownSamplingConfig


class SamplingParams(Section):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(ge=1)
    """Response budget of a trajectory in tokens, tool responses included."""


class RefillSettings(Section):
    """More problems when rejected groups thin a step's batch. Off as released: the step then trains on what is left."""

    enabled: bool = False
    min_share: float = Field(0.5, gt=0, le=1)
    """Groups that must survive rejection, as a share of data.rollout_batch_size."""
    max_extra: float = Field(1.0, gt=0)
    """Most problems added to a step, as a share of data.rollout_batch_size."""


class AlgorithmSettings(Section):
    group_size: int = Field(ge=1)
    """Rollouts per problem before down-sampling (2G)."""
    n_minibatches: int = Field(1, ge=1)
    """Optimizer steps per training step."""
    training_batch_size_per_gpu: int = Field(1, ge=1)
    """Sequences per micro-batch when runner.enable_dynamic_batch_size is off."""
    adv_type: Literal["grpo", "grpo-no-std", "leave-one-out"] = "grpo"
    """grpo: (r - mean) / std over the kept group (the paper); the others leave out the std, or the own reward."""
    loss_agg_func: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "released-verl", "released-rlinf"
    ] = "token-mean"
    """token-mean: over the whole step (the paper); the released ones as `algorithm.loss.aggregate` describes them."""
    recompute_logprobs: bool = False
    """Old log-probs from the actor instead of the engine; works with down-sampling on."""
    clip_ratio_low: float = Field(0.2, gt=0, lt=1)
    clip_ratio_high: float = Field(0.28, gt=0)
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: the loss of a negative-advantage token is bounded by clip_ratio_c * |A|; null turns it
    off.
    """
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL term to the policy that RL started from; GRPO-RoC trains without (0)."""
    kl_penalty_type: Literal["low_var_kl", "k3", "mse", "k2", "kl", "k1", "abs"] = "low_var_kl"
    """Estimator of that term by its name in RLinf: low_var_kl = k3, mse = k2; kl = k1 and abs are refused."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the mean token entropy, subtracted from the loss."""
    importance_sampling_fix: bool = False
    """Truncated importance sampling between engine and actor; needs recompute_logprobs."""
    importance_sampling_clip: float = Field(2.0, gt=0)
    down_sampling: DownSamplingSettings
    refill: RefillSettings = RefillSettings()
    sampling_params: SamplingParams


# --------------------------------------------------------------------------------------------- rollout


class RolloutModelSettings(Section):
    model_path: str
    """Hugging Face directory: weights, config and tokenizer."""
    model_type: str = "qwen2.5"
    precision: Literal["fp32", "bf16"] = "bf16"


class SGLangSettings(Section):
    attention_backend: str = "auto"
    """auto: torch_native on CPU, SGLang's own choice on a GPU."""
    server_args: dict[str, Any] = {}
    """Any further sglang.ServerArgs field."""


class RolloutSettings(Section):
    group_name: str = "RolloutGroup"
    rollout_backend: Literal["sglang"] = "sglang"
    model: RolloutModelSettings
    sglang: SGLangSettings = SGLangSettings()
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: Literal[1] = 1
    max_running_requests: int = Field(64, ge=1)
    max_total_tokens: int | None = None
    """KV cache in tokens; null lets SGLang derive it from memory (set it on CPU)."""
    trajectory_timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one trajectory, all turns and tool calls included."""
    engine_start_timeout_s: float = Field(600.0, gt=0)
    no_progress_timeout_s: float = Field(120.0, gt=0)
    """An engine with work queued and no token for so long counts as lost."""
    max_engine_restarts: int = Field(2, ge=0)
    cpu_threads: int = Field(1, ge=1)
    """OMP threads of an engine that runs on CPU."""
    scheduler: Literal["static", "least_requests", "kv_reserve", "kv_adaptive"] = "kv_adaptive"
    """Who runs where and when: a fixed share of the problems per engine; the engine with the fewest requests;
    what surely fits an engine's KV cache (the paper); or what will in all probability fit, longest first.
    """
    slice_size: int = Field(8, ge=1)
    """Rollouts of one problem that an engine takes at a time; they share its prompt in the prefix cache."""
    tail: Literal["wait", "cut", "carry"] = "wait"
    """The last trajectories of a step: wait for all; cut those that would not change what is kept; or carry them
    over to the next step, where they go on.
    """
    cut_share: float = Field(0.0, ge=0, le=1)
    """tail=cut: how much of a group's kept trajectories (positives against negatives) the cut may change."""
    carry_share: float = Field(0.1, ge=0, lt=1)
    """tail=carry: groups of a step, as a share, that may be unfinished when it ends."""
    max_carry_age: int = Field(1, ge=1)
    """tail=carry: steps that a trajectory may be carried; then its group is waited for."""


# ------------------------------------------------------------------------------------------------ data


class DataSettings(Section):
    type: Literal["math"] = "math"
    train_data_paths: list[str]
    val_data_paths: list[str] = []
    prompt_key: str = "prompt"
    answer_key: str = "solutions"
    max_prompt_length: int = Field(ge=1)
    filter_prompt_by_length: bool = True
    rollout_batch_size: int = Field(ge=1)
    """Problems per training step."""
    shuffle: bool = True
    seed: int = 1234


# ----------------------------------------------------------------------------------------------- actor


class ActorModelSettings(Section):
    precision: Literal["fp32", "bf16"] = "bf16"
    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts of a layer (mixture-of-experts models); an expert is never cut."""
    expert_tensor_parallel_size: Literal[1] = 1
    sequence_parallel: bool = False
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None


class OptimSettings(Section):
    optimizer: Literal["adam"] = "adam"
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = Field(1.0, gt=0)
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


class LrSchedSettings(Section):
    lr_warmup_iters: int = Field(20, ge=0)
    lr_decay_style: Literal["constant", "cosine"] = "constant"
    lr_decay_iters: int | None = None
    """Steps of the cosine; null takes runner.max_steps."""


class WeightSyncSettings(Section):
    """How weights reach the engines after an update."""

    route: Literal["auto", "cuda_ipc", "shared_memory", "broadcast", "disk"] = "auto"
    """auto: CUDA IPC on shared GPUs, shared memory on one node, otherwise a broadcast (NCCL, gloo); disk when those
    fail at the first sync.
    """
    bucket_mb: int = Field(512, ge=1)
    """MiB of weights that travel at a time."""
    directory: str | None = None
    """For the disk route, on a file system of all nodes; null takes {output_dir}/{experiment_name}/weights."""


class ActorSettings(Section):
    group_name: str = "ActorGroup"
    training_backend: Literal["megatron"] = "megatron"
    seed: int = 1234
    offload_optimizer: bool = False
    offload_weight: bool = False
    offload_grad: bool = False
    model: ActorModelSettings = ActorModelSettings()
    optim: OptimSettings = OptimSettings()
    lr_sched: LrSchedSettings = LrSchedSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    log_prob_chunk_tokens: int = Field(512, ge=1)
    """Tokens of the vocabulary head computed at a time, so that no full fp32 logits exist."""
    distributed_timeout_minutes: float = Field(30.0, gt=0)
    cpu_threads: int = Field(1, ge=1)
    """Threads of a rank that runs on CPU."""


# --------------------------------------------------------------------------- reward, agent loop, tools


class RewardSettings(Section):
    group_name: str = "RewardGroup"
    reward_type: Literal["rstar2"] = "rstar2"
    mode: Literal["paper", "released"] = "paper"
    """paper: the last box inside the model's last <answer>; released: either of two graders on the whole response."""
    timeout_s: float = Field(2.0, gt=0)
    """Time limit for grading one answer."""
    num_workers: int = Field(1, ge=1)
    """Grading processes of one reward worker."""


class AgentLoopSettings(Section):
    tools: list[str] = ["python_code_with_standard_io"]
    """Tools offered to the model, of those in rollout/tools.py."""
    use_data_system_prompt: bool = False
    """A system message in the data replaces the system prompt (it must then describe the tools itself)."""
    max_assistant_turns: int = Field(5, ge=1)
    max_parallel_calls: int = Field(1, ge=1)
    max_tool_response_length: int = Field(256, ge=16)
    """Characters of a tool response shown to the model."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    max_identical_calls: int | None = Field(None, ge=2)
    """End a trajectory that makes the same call, arguments included, so many times in a row; null never does."""
    max_malformed_turns: int | None = Field(None, ge=1)
    """End a trajectory after so many turns in a row without a call that can be run; null never does."""
    system_prompt: str | None = None
    """null takes rStar2's system prompt; {tools} is replaced by the JSON tool schema."""
    user_prefix: str | None = None
    """Put before the problem; null takes rStar2's."""
    generation_prefix: str | None = None
    """Opens every assistant turn; null takes rStar2's `<reason>` prefix."""


class CodeJudgeSettings(Section):
    host_addr: str | None = None
    """null: start our own on loopback; otherwise the judge that is already running."""
    host_port: int | None = None
    """null: a free port."""
    redis_uri: str | None = None
    """null: start a Redis on loopback; otherwise the running one, e.g. redis://host:6379/0."""
    num_workers: int = Field(2, ge=1)
    """Execution slots of the judge that we start."""
    time_limit_s: float = Field(4.0, gt=0)
    memory_mb: int = Field(512, ge=64)
    request_timeout_s: float = Field(60.0, gt=0)
    max_outage_s: float = Field(120.0, ge=0)
    """How long an unreachable judge is waited for before trajectories are given up."""
    max_concurrency: int = Field(128, ge=1)


class ToolsSettings(Section):
    codejudge: CodeJudgeSettings = CodeJudgeSettings()


# ---------------------------------------------------------------------------------------------- recipe


class SFTPhaseSettings(Section):
    """One phase of supervised fine-tuning through the Megatron actor."""

    name: str
    data_path: str
    """jsonl of {"messages"...} or {"segments": [[text, trained], ...]} rows."""
    steps: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    lr: float = Field(gt=0)
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    warmup_steps: int = Field(50, ge=0)
    decay: Literal["constant", "cosine"] = "cosine"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    weight_decay: float = 0.01
    shuffle: bool = True
    """False keeps the order of the file (a curriculum)."""


class SFTSettings(Section):
    """A whole supervised fine-tuning, `runner.task_type: sft`; the paper's settings by default."""

    train_data_paths: list[str] = []
    """jsonl of {"messages": [...], "tools": [...]} rows (data_process/build_sft_dataset.py) or of {"segments"...}."""
    val_data_paths: list[str] = []
    epochs: float = Field(3.0, gt=0)
    batch_size: int = Field(128, ge=1)
    """Conversations of one optimizer step."""
    max_steps: int | None = Field(None, ge=1)
    """Ends before the epochs do."""
    lr: float = Field(5e-6, gt=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    warmup_ratio: float = Field(0.04, ge=0, le=1)
    """Share of the steps; the decay to min_lr_ratio runs over all of them."""
    lr_decay_style: Literal["constant", "cosine"] = "cosine"
    shuffle: bool = True
    """False keeps the order of the files (a curriculum)."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = Field(0.01, ge=0)
    max_length: int | None = Field(None, ge=8)
    """Tokens of a conversation; longer ones are cut. null takes runner.seq_length."""
    val_interval: int = -1
    """Steps between validation losses; -1 takes one before and one after."""
    seed: int = 1234


class DifficultyFilterSettings(Section):
    """`runner.task_type: difficulty_filter`: attempts at every problem of data.train_data_paths."""

    num_samples: int = Field(8, ge=1)
    """Attempts at each problem, sampled as in training."""
    drop_always_solved: bool = True
    drop_never_solved: bool = False
    num_problems: int = Field(-1, ge=-1)
    """Only the first so many problems; -1 takes all."""


class ColdStartSettings(Section):
    """SFT before RL. The result is cached under its configuration's hash."""

    enabled: bool = False
    cache_dir: str = ".cache/rstar2"
    builder: Literal["tiny"] | None = None
    """`tiny`: the project makes tokenizer, model, problems and SFT data when they are absent."""
    seed: int = 0
    phases: list[SFTPhaseSettings] = []


class EvaluationSettings(Section):
    before_and_after: bool = True
    num_problems: int = Field(-1, ge=-1)
    """Problems of data.val_data_paths used; -1 takes all."""
    num_samples: int = Field(1, ge=1)
    """k of avg@k."""
    temperature: float = Field(0.6, ge=0)
    max_assistant_turns: int | None = None
    max_new_tokens: int | None = None
    save_trajectories: bool = True
    """Every trajectory of each evaluation of a run, in evaluation/{when}.jsonl."""


class Settings(Section):
    """A whole run."""

    cluster: ClusterSettings
    runner: RunnerSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    data: DataSettings
    actor: ActorSettings = ActorSettings()
    reward: RewardSettings = RewardSettings()
    agentloop: AgentLoopSettings = AgentLoopSettings()
    tools: ToolsSettings = ToolsSettings()
    cold_start: ColdStartSettings = ColdStartSettings()
    sft: SFTSettings = SFTSettings()
    difficulty_filter: DifficultyFilterSettings = DifficultyFilterSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
