"""Rows of cells as aligned text, for terminals and text files. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The rows under each other, a rule under the first. Of the columns, the first `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths))] for row in rows]
    lines = ["  ".join(row).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
