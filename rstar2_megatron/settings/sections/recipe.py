"""Sections `sft`, `difficulty_filter` and `cold_start`: the stages around reinforcement learning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rstar2_megatron.settings.sections.base import Section

BUILT_PREFIXES = ("tiny:", "chained:", "chained-noisy:", "smollm2:")
"""Begin the path of what `cold_start.builder` makes."""


class SFTPhaseSettings(Section):
    """One phase of supervised fine-tuning through the Megatron actor."""

    name: str
    data_path: str
    """jsonl of {"messages"...} or {"segments": [[text, trained], ...]} rows (docs/inputs.md)."""
    steps: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    lr: float = Field(gt=0)
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    warmup_steps: int = Field(50, ge=0)
    decay: Literal["constant", "cosine", "linear"] = "cosine"
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    shuffle: bool = True
    """False keeps the order of the file (a curriculum)."""


class SFTSettings(Section):
    """Supervised fine-tuning, `runner.task_type: sft`; the paper's settings by default."""

    train_data_paths: list[str] = []
    """jsonl of {"messages": [...], "tools": [...]} rows (data_process/build_sft_dataset.py) or of {"segments"...}."""
    val_data_paths: list[str] = []
    epochs: float = Field(3.0, gt=0)
    batch_size: int = Field(128, ge=1)
    """Conversations of one optimizer step."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps after which training ends, if the epochs have not ended before."""
    lr: float = Field(5e-6, gt=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    warmup_ratio: float = Field(0.04, ge=0, le=1)
    """Share of the steps; the decay to min_lr_ratio covers all steps."""
    lr_decay_style: Literal["constant", "cosine", "linear"] = "cosine"
    shuffle: bool = True
    """False keeps the order of the files (a curriculum)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    max_length: int | None = Field(None, ge=8)
    """Tokens of a conversation; longer ones are truncated. null: runner.seq_length."""
    val_interval: int = -1
    """Steps between validations; -1: one before and one after."""
    seed: int = 1234


class DifficultyFilterSettings(Section):
    """`runner.task_type: difficulty_filter`: attempts at every problem of data.train_data_paths."""

    num_samples: int = Field(8, ge=1)
    """Attempts at each problem, sampled as in training."""
    drop_always_solved: bool = True
    drop_never_solved: bool = False
    num_problems: int = Field(-1, ge=-1)
    """Only the first N problems; -1: all."""


class ColdStartSettings(Section):
    """SFT before RL. The result is cached under its configuration's hash."""

    enabled: bool = False
    cache_dir: str = ".cache/rstar2"
    builder: Literal["tiny", "chained", "chained-noisy", "smollm2"] | None = None
    """The project makes model, problems and SFT data when they are absent. tiny: a model from nothing; chained: the
    same with problems of three dependent tool calls; chained-noisy: and with calls that fail (agentloop.tool_noise);
    smollm2: a pretrained one from a registry package (requirements/smollm2.txt)."""
    seed: int = 0
    phases: list[SFTPhaseSettings] = []
