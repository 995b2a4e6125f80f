"""The tiny recipe at a size that tests can build."""

from __future__ import annotations

from rstar2_megatron.settings.load import load
from rstar2_megatron.tiny.recipe import CopyCurriculum, TinyRecipe

SMALL = TinyRecipe(
    tokenizer_conversations=600, train_problems=180, heldout_problems=45, conversations=200, copy=CopyCurriculum(rows=400)
)
AGENTLOOP = load("rstar2-tiny-cpu").settings.agentloop
