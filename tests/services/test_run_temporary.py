"""A run leaves nothing in the temporary directory but a cache of what torch compiled."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rstar2_megatron.services.run_temporary import RunTemporary


@pytest.mark.parametrize("compiled", [False, True])
def test_only_compiled_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored afterwards
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", None)
    temporary = RunTemporary()
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    cache.mkdir()
    if compiled:
        (cache / "kernel.so").touch()
    temporary.remove()
    temporary.remove()
    assert list(tmp_path.iterdir()) == ([cache] if compiled else [])
