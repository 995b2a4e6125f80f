"""`precision: auto`: bf16 on GPUs and processors that multiply in it; fp32 on others, where bf16 takes four times as long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rstar2_megatron.settings.rlinf_keys import get, put

_KEYS = ("actor.model.precision", "rollout.model.precision")
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one of aarch64
_CPUINFO = Path("/proc/cpuinfo")


def resolve_precision(data: dict[str, Any]) -> list[str]:
    """Replace `auto` in a composed configuration; returns a note for each replaced key."""
    automatic = [key for key in _KEYS if get(data, key) == "auto"]
    if not automatic:
        return []
    if _has_cpu_slots(data):
        precision = host_precision()
        reason = f"this processor {'has' if precision == 'bf16' else 'lacks'} bf16 instructions"
    else:
        precision, reason = "bf16", "of GPUs"
    for key in automatic:
        put(data, key, precision)
    return [f"{', '.join(automatic)}: {precision} ({reason})"]


def host_precision() -> str:
    """bf16 where the processor multiplies in it: elsewhere it is slower than fp32."""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return "fp32"
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return "bf16" if line is not None and _INSTRUCTIONS & set(line.group(1).split()) else "fp32"


def _has_cpu_slots(data: dict[str, Any]) -> bool:
    groups = get(data, "cluster.node_groups")
    return isinstance(groups, list) and any(
        (group.get("hardware") or {}).get("type") == "CPUSlots" for group in groups if isinstance(group, dict)
    )
