"""Replaces the names of the cold start's builder (`tiny:model`, `smollm2:train`, ...) by paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.settings.sections.recipe import BUILT_PREFIXES
from rstar2_megatron.tiny.build import build_tiny


def resolve_tiny(settings: Settings, progress: Callable[[str], None] = print) -> Settings:
    """Build a demonstration if the YAML asks for it (cached), and replace its names by paths.

    Returns the settings unchanged without `cold_start.builder`. Raises ValueError for an unknown name.
    """
    builder = settings.cold_start.builder
    if builder is None or not _names_parts(settings):
        return settings

    paths = build_tiny(
        settings.cold_start.cache_dir, settings.cold_start.seed, agentloop=settings.agentloop, base=builder, progress=progress
    )
    known = {name: str(getattr(paths, name)) for name in ("model", "train", "heldout", "copy", "conversations")}

    def replace(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(BUILT_PREFIXES):
            maker, _, name = value.partition(":")
            if maker != builder or name not in known:
                raise ValueError(
                    f"{value!r} is no part of what cold_start.builder={builder} makes: "
                    f"{', '.join(f'{builder}:{part}' for part in sorted(known))}"
                )
            return known[name]
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replace(item) for item in value]
        return value

    return Settings.model_validate(replace(settings.model_dump()))


def _names_parts(settings: Settings) -> bool:
    """Whether anything that is used has a builder's name; the phases of a cold start that is off are not used."""
    used = settings.model_dump()
    if not settings.cold_start.enabled:
        used["cold_start"]["phases"] = []
    return any(f'"{prefix}' in json.dumps(used) for prefix in BUILT_PREFIXES)
