"""The devices of a run with CPU slots."""

from __future__ import annotations

import os


def hide_gpus() -> None:
    """Hide the machine's GPUs from this process and its children, which would use them. Call it before torch looks for them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
