"""State that checks share: the YAML, the nodes, the thin model, and results of earlier checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.runs.check.nodes import Nodes
from rstar2_megatron.settings.placement import Slots
from rstar2_megatron.settings.schema import Settings


@dataclass
class Context:
    """One run of `--check`."""

    settings: Settings
    slots: Slots
    nodes: Nodes
    scratch: Path
    """Removed at the end; on several nodes a file system of all of them, as for checkpoints."""
    found: dict[str, Any] = field(default_factory=dict)
    """Results that checks keep for later ones, by name."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.slots.is_cpu else "cuda"

    @property
    def slots_per_node(self) -> int:
        return len(self.nodes.slots)

    @property
    def thin(self) -> Path:
        """Directory of the thin model, made by the check `thin model`."""
        return self.scratch / "thin"

    @property
    def thin_config(self) -> ModelConfig:
        return ModelConfig.from_directory(self.thin)
