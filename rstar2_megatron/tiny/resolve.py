"""Replaces the names of the cold start's builder (`tiny:model`, `tiny:train`, ...) by paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.settings.sections.recipe import BUILT_PREFIX
from rstar2_megatron.tiny.build import build_tiny


def resolve_tiny(settings: Settings, progress: Callable[[str], None] = print) -> Settings:
    """Build the tiny recipe if the YAML asks for it (cached), and replace its names by paths.

    Returns the settings unchanged when `cold_start.builder` is not `tiny`. Raises ValueError for an unknown name.
    """
    if settings.cold_start.builder != "tiny":
        return settings

    paths = build_tiny(
        settings.cold_start.cache_dir,
        settings.cold_start.seed,
        agentloop=settings.agentloop,
        progress=progress,
    )
    known = {
        name: str(getattr(paths, name)) for name in ("model", "train", "heldout", "copy", "conversations")
    }

    def replace(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(BUILT_PREFIX):
            name = value.removeprefix(BUILT_PREFIX)
            if name not in known:
                raise ValueError(f"{value!r} is not a part of the tiny recipe; its parts are {sorted(known)}")
            return known[name]
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replace(item) for item in value]
        return value

    return Settings.model_validate(replace(settings.model_dump()))
