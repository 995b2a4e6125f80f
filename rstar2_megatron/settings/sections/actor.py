"""Section `actor`: the policy under training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rstar2_megatron.settings.sections.base import Section


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
    """full: layers are computed a second time in the backward pass, which saves their activations; null: none."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full. uniform: all layers, of which every recompute_num_layers-th input is kept; block: the first
    recompute_num_layers of each pipeline stage.
    """
    recompute_num_layers: int | None = None

    @property
    def ranks_of_copy(self) -> int:
        """Ranks that together hold the model once."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class OptimSettings(Section):
    optimizer: Literal["adam"] = "adam"
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, gt=0)
    use_distributed_optimizer: bool = True
    optimizer_cpu_offload: bool = False
    """Keep fp32 master weights and moments in host memory and update them on the CPU. It saves 12 bytes a parameter on the
    GPUs and costs some seconds a step. Needs use_distributed_optimizer.
    """
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


class LrSchedSettings(Section):
    """In optimizer steps: a training step takes `algorithm.n_minibatches` of them."""

    lr_warmup_iters: int = Field(20, ge=0)
    lr_decay_style: Literal["constant", "cosine"] = "constant"
    lr_decay_iters: int | None = None
    """Optimizer steps until the cosine reaches min_lr; null: those of runner.max_steps."""


class WeightSyncSettings(Section):
    """How weights reach the engines after an update."""

    route: Literal["auto", "cuda_ipc", "shared_memory", "broadcast", "disk"] = "auto"
    """auto: CUDA IPC on shared GPUs, shared memory on one node, otherwise a broadcast (NCCL, gloo); disk when those
    fail.
    """
    bucket_mb: int = Field(512, ge=1)
    """MiB of weights that travel at a time."""
    directory: str | None = None
    """For the disk route, on a file system of all nodes; null: {output_dir}/{experiment_name}/weights."""


class ActorSettings(Section):
    group_name: str = "ActorGroup"
    training_backend: Literal["megatron"] = "megatron"
    seed: int = 1234
    offload_optimizer: bool = False
    """This key and the two below: out of the GPU while the engines have it, for actors and engines on the same GPUs."""
    offload_weight: bool = False
    offload_grad: bool = False
    model: ActorModelSettings = ActorModelSettings()
    optim: OptimSettings = OptimSettings()
    lr_sched: LrSchedSettings = LrSchedSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    log_prob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens of the vocabulary head computed at a time, so that no full fp32 logits exist; null: 2048 on a GPU, where a
    chunk's matrix products must outweigh the weight that each of them reads, 512 on a CPU.
    """
    distributed_timeout_minutes: float = Field(30.0, gt=0)
    cpu_threads: int = Field(1, ge=1)
    """Threads of a rank that runs on CPU."""

    @property
    def offloads(self) -> bool:
        """Whether the actor offloads a part. On the slots of engines it then sleeps in turn with them."""
        return self.offload_weight or self.offload_grad or self.offload_optimizer

    def head_chunk_tokens(self, *, cpu: bool) -> int:
        """`log_prob_chunk_tokens`, or its default on this kind of device."""
        return self.log_prob_chunk_tokens or (512 if cpu else 2048)
