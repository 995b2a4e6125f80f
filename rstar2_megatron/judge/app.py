"""Keeps `uvicorn rstar2_megatron.judge.app:app` working; the HTTP API is in `server/app.py`."""

from __future__ import annotations

from typing import Any

from rstar2_megatron.judge.server.app import create_app


def __getattr__(name: str) -> Any:
    """uvicorn's `app`, made from the environment on first use."""
    if name == "app":
        return create_app()
    raise AttributeError(name)
