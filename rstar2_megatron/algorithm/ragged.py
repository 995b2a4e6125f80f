"""Groups of different sizes as one padded tensor and a mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_rows(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """(values, valid), float64 and bool, both `[len(rows), longest row]`; rows are padded with 0 at the end."""
    width = max(map(len, rows), default=0)
    values = [[*row, *([0.0] * (width - len(row)))] for row in rows]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    valid = torch.arange(width) < lengths[:, None]
    return torch.tensor(values, dtype=torch.float64).reshape(len(rows), width), valid
