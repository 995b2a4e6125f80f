"""Code of a user for the tests: a file with one function, as a YAML would name it."""

from __future__ import annotations

from pathlib import Path

from rstar2_megatron.extension.user_code import FOLDERS, UserCode


def own(folder: Path, text: str, name: str = "f") -> UserCode:
    (folder / "own.py").write_text(text)
    return UserCode.model_validate(f"own.py:{name}", context={FOLDERS: [folder]})
