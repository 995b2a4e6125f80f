"""Section `preference`: rStar-Math's process preference model (arXiv 2501.04519), `runner.task_type: preference`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rstar2_megatron.settings.sections.base import Section


class PreferenceSettings(Section):
    train_data_paths: list[str] = []
    """mcts.jsonl files of `python -m rstar2_megatron.search`, made with the tokenizer of rollout.model.model_path."""
    val_data_paths: list[str] = []
    best: int = Field(2, ge=1)
    """Children of the highest Q, and children of the lowest Q, that a node compares; 2 * best where the other side has one."""
    min_margin: float = Field(0.5, ge=0)
    """Least difference in Q of a pair of siblings."""
    min_distance: int = Field(20, ge=0)
    """Least edit distance of a pair's texts in characters."""
    whole_solutions: bool = True
    """Also compare the `best` right solutions of a problem with the `best` wrong ones, as the paper does."""
    epochs: float = Field(1.0, gt=0)
    batch_size: int = Field(512, ge=1)
    """Comparisons of one optimizer step; a comparison is up to `best` x `best` pairs."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps after which training ends, if the epochs have not ended before."""
    lr: float = Field(7e-6, gt=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    lr_decay_style: Literal["constant", "cosine", "linear"] = "linear"
    shuffle: bool = True
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = Field(0.0, ge=0)
    max_length: int | None = Field(None, ge=8)
    """Tokens of a prefix; a pair with a longer one is left out. null: runner.seq_length."""
    val_interval: int = -1
    """Steps between validations; -1: one before and one after."""
    seed: int = 1234
