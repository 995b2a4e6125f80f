"""What the tests of settings share: shipped YAMLs composed once, other ones written, plans for a node of 80 GB GPUs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.settings.load import Loaded, load
from rstar2_megatron.settings.placement import Slots
from rstar2_megatron.settings.planning.plan import make_plan
from rstar2_megatron.settings.planning.table import RunPlan

H100 = Slots(8, 80.0)


@functools.cache
def loaded(name: str, *overrides: str) -> Loaded:
    """`load(name, overrides)`; not to be changed."""
    return load(name, overrides)


def written(path: Path, data: dict[str, Any]) -> str:
    """The name of a YAML file with this content."""
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)


def plan_of(name: str, *overrides: str, slots: Slots = H100) -> RunPlan:
    return make_plan(loaded(name, *overrides).settings, slots=slots)
