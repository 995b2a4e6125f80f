"""Sections `cluster` and `runner`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rstar2_megatron.settings.sections.base import Section

Steps = Annotated[
    list[Annotated[int, Field(ge=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, int) and not isinstance(value, bool) else value),
]
"""Step numbers from 1; a single number is read as a list."""


def _one_name(name: str) -> str:
    """A directory of that name is the run's own. Raises ValueError."""
    if not name.strip() or name in (".", "..") or "/" in name:
        raise ValueError("give one name, without /: the run's directory is {output_dir}/{experiment_name}")
    return name


class AssumedNode(Section):
    """The node that a plan is made for where no GPU is visible; a machine's own GPUs and memory take its place."""

    gpus: int = Field(8, ge=1)
    gpu_gb: float = Field(80.0, gt=0)
    """Memory of each GPU, 1e9 bytes."""
    host_gb: float = Field(1900.0, gt=0)
    """Host memory, 1e9 bytes; a machine of 8 H100 comes with 1.9 to 2 TB."""


class ClusterSettings(Section):
    """RLinf's cluster section, passed to `rlinf.scheduler.Cluster` but for the project's own keys (`OWN_KEYS`)."""

    OWN_KEYS: ClassVar[tuple[str, ...]] = ("node_wait_timeout_s", "assumed_node")

    num_nodes: int = Field(1, ge=1)
    component_placement: Any
    """RLinf placement: {"actor,rollout,reward": "all"}, or per component with ranks or node groups."""
    node_groups: list[dict[str, Any]] | None = None
    """RLinf node groups; the CPU YAML registers its slots here (type CPUSlots)."""
    node_wait_timeout_s: float = Field(60.0, gt=0)
    """How long a run waits for the nodes of the Ray cluster that RAY_ADDRESS names."""
    assumed_node: AssumedNode = AssumedNode()


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
    """Number of consecutive values that must satisfy the condition."""
    average_over: int = Field(1, ge=1)
    """Steps with the metric that are averaged to one value."""
    times_first: int | None = Field(None, ge=1)
    """The bounds are factors of the mean over the first so many steps with the metric, if that is not 0."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> StopCondition:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a condition needs at_least or at_most")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least={self.at_least:g} is above at_most={self.at_most:g}, so that it never holds")
        return self


class ProfilerSettings(Section):
    """Torch profiles of chosen steps; the names are those of RLinf's PyTorchProfiler."""

    steps: Steps = []
    """A step, or a list of steps, that every actor rank records whole and every engine from its beginning on."""
    output_dir: str | None = None
    """Default: profiles/ of the run."""
    activities: list[Literal["cpu", "cuda"]] = Field(["cpu", "cuda"], min_length=1)
    """cuda is left out where there is no GPU."""
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    """This key and the two below: on the actor only."""
    with_flops: bool = False
    with_modules: bool = False
    engine_forwards: int = Field(64, ge=1)
    """Forward passes that an engine records: each is some hundred kernels."""


class RunnerSettings(Section):
    task_type: Literal["reasoning", "sft", "difficulty_filter", "search", "preference"] = "reasoning"
    """reasoning: GRPO-RoC (RLinf's name); sft: supervised fine-tuning; difficulty_filter: drop the problems that the
    model always solves; search: trees of data.train_data_paths; preference: train a process preference model on such trees.
    """
    experiment_name: Annotated[str, AfterValidator(_one_name)]
    output_dir: str = "results"
    """A run writes to {output_dir}/{experiment_name}/."""
    logger: LoggerSettings
    max_epochs: int = Field(1000, ge=1)
    max_steps: int = Field(ge=0)
    """Training steps; 0: only evaluation."""
    save_interval: int = -1
    """Steps between checkpoints; -1: only after the last step."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints to keep; checkpoints without an update since the previous one do not count."""
    keep_best: bool = True
    """Also keep the best checkpoint, by held-out score if there is one, else by pass rate."""
    max_empty_steps: int = Field(3, ge=0)
    """Consecutive steps without a group to train on that end the run with the reason; 0: any number is allowed."""
    user_code_errors: Literal["drop", "stop"] = "drop"
    """What an exception in code of yours (reward, tool, environment) does: drops the trajectory, within
    rollout.max_dropped_share of a step, or ends the run.
    """
    check_after_resume: bool = True
    """End a run whose pass rate or log-probs fall sharply in the first steps after a resume."""
    val_check_interval: int = -1
    """Steps between evaluations in training; -1: only before and after."""
    resume_dir: str | None = "auto"
    """`auto` (newest complete checkpoint of this experiment), a global_step_N directory, or null."""
    init_checkpoint: str | None = None
    """A global_step_N directory of another run whose model and optimizer this run starts from, at step 0."""
    stop_when: list[StopCondition] = []
    """The run ends, with checkpoint and export, as soon as one of these conditions holds."""
    warn_when: list[StopCondition] | None = None
    """The run says when one of these conditions begins to hold; null: signs of a collapse (docs/metrics.md)."""
    corridor: str | None = None
    """A file of `python -m rstar2_megatron.report.corridor`: the run says when a metric leaves the band of earlier seeds."""
    seq_length: int = Field(ge=8)
    """Longest prompt + response in tokens."""
    max_tokens_per_mbs: int = Field(ge=8)
    """Token budget of one packed micro-batch."""
    step_timeout_s: float = Field(3600.0, gt=0)
    """Deadline of a step; a run whose step takes longer fails."""
    save_trajectories_per_step: int = Field(8, ge=0)
    """Trajectories of each step written to trajectories.jsonl, rounded up to whole groups; 0 writes none."""
    save_rollouts: bool = False
    """Lengths, turns and tool times of every trajectory to rollouts.jsonl, for `python -m benchmarks.rollout.scheduler`."""
    save_rollout_tokens: bool = False
    """Write every trajectory of each step, token for token, to rollouts/step_N.jsonl.gz of the run."""
    metrics_port: int | None = Field(None, ge=1, le=65535)
    """Port of an HTTP server with the run's metrics for Prometheus; on loopback unless the run has several nodes."""
    trace: Steps = []
    """A step, or a list of steps, to write to traces/step_N.json of the run, which Perfetto opens and
    `python -m rstar2_megatron.report.timeline RUN` draws."""
    profiler: ProfilerSettings = ProfilerSettings()
    keep_rollouts: int | None = Field(None, ge=1)
    """Number of newest steps whose files in rollouts/ are kept; null: all."""
    max_file_mb: int = Field(1024, ge=1)
    """Largest trajectories.jsonl and rollouts.jsonl: the rows of the oldest steps are dropped. Also the largest log in
    logs/, of which one older part is kept beside it."""
    replay_rollouts: str | None = None
    """A directory written by save_rollout_tokens: train on its steps instead of rolling out. The same trajectories
    under two layouts, losses or backends give losses that can be compared number by number."""
