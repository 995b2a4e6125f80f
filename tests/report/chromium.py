"""A headless Chromium for pages: the document after its scripts ran, and a screenshot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


needs_chromium = pytest.mark.skipif(
    find_chromium() is None,
    reason=f"no Chromium here (looked for {', '.join(NAMES)} and $CHROMIUM); Debian: apt-get install chromium",
)


def _run(page: Path, address: str, profile: Path, *flags: str) -> bytes:
    program = find_chromium()
    assert program is not None
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions", "--hide-scrollbars"]
    command += ["--virtual-time-budget=3000", *flags, f"{page.resolve().as_uri()}{address}"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout


def document(page: Path, address: str, profile: Path) -> str:
    """The document as HTML once its scripts have run; `address` is what follows the file's name, e.g. `#a=b`."""
    return _run(page, address, profile, "--dump-dom").decode()


def screenshot(page: Path, address: str, profile: Path, target: Path, size: tuple[int, int] = (1280, 1000)) -> None:
    _run(page, address, profile, f"--screenshot={target.resolve()}", f"--window-size={size[0]},{size[1]}")
