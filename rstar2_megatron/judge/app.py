"""Keeps `uvicorn rstar2_megatron.judge.app:app` working; the HTTP API is in `server/app.py`."""

from __future__ import annotations

from rstar2_megatron.judge.server.app import create_app

app = create_app()
