"""What the rank processes run: top-level functions, because they are pickled by name."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.algorithm.batch import TrainSequence


def _actor(rank: int, world_size: int, init_method: str, config: Any, model_path: Any) -> MegatronActor:
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    actor = MegatronActor(
        *config, model_path=str(model_path), rank=rank, world_size=world_size, init_method=init_method
    )
    actor.initialize()
    return actor


def train(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    batches: list[list[TrainSequence]],
) -> list[dict[str, float]]:
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        return [actor.train_step(batch) for batch in batches]
    finally:
        actor.close()
