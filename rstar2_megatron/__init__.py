"""rstar2_megatron: the Megatron training backend for rStar2-Agent-style models inside RLinf."""

__version__ = "0.2.0"
