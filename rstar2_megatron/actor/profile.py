"""A torch profile of what one actor rank does in a step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rstar2_megatron.settings.schema import ProfilerSettings


class TorchProfile:
    """Records from its making until `write`, both in the thread that does the work."""

    def __init__(self, settings: ProfilerSettings) -> None:
        wanted = {getattr(ProfilerActivity, name.upper()) for name in settings.activities}
        if not torch.cuda.is_available():
            wanted.discard(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=wanted,
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            with_flops=settings.with_flops,
            with_modules=settings.with_modules,
        )
        self._profile.start()

    def write(self, path: Path) -> None:
        """End the recording and write it in Chrome's trace format; a name that ends in .gz is compressed."""
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))
