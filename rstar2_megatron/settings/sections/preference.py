"""Section `preference`: rStar-Math's process preference model (arXiv 2501.04519), `runner.task_type: preference`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rstar2_megatron.settings.sections.recipe import SFTSettings


class PreferenceSettings(SFTSettings):
    """Supervised training on comparisons: what SFT has, with other defaults, and the choice of the pairs."""

    train_data_paths: list[str] = []
    """mcts.jsonl files of `python -m rstar2_megatron.search`, made with the tokenizer of rollout.model.model_path."""
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
    lr: float = Field(7e-6, gt=0)
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    lr_decay_style: Literal["constant", "cosine", "linear"] = "linear"
    weight_decay: float = Field(0.0, ge=0)
    max_length: int | None = Field(None, ge=8)
    """Tokens of a prefix; a pair with a longer one is left out. null: runner.seq_length."""
