"""Every shipped YAML, composed once for all tests of this package."""

from __future__ import annotations

import functools

from rstar2_megatron.settings.load import Loaded, load


@functools.cache
def loaded(name: str) -> Loaded:
    """`load(name)`; not to be changed."""
    return load(name)
