"""Imports modules from their text, so that a node without the file runs the same code."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import site
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

_lock = threading.Lock()


class _Text(importlib.abc.ExecutionLoader, importlib.abc.MetaPathFinder):
    """Finds and loads one module. Tracebacks find its lines through `get_source`."""

    def __init__(self, name: str, path: str, text: str) -> None:
        self.name = name
        self.path = path
        self.text = text

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def is_package(self, fullname: str) -> bool:
        return Path(self.path).name == "__init__.py"

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_source(self, fullname: str) -> str:
        return self.text


def import_text(texts: Mapping[str, tuple[str, str]], key: str) -> ModuleType:
    """The module of `texts[""]`, run once a process, also where other code imports it by its name.

    texts: (path, text) by module name; the module may import the others. Raises what the code raises, and ImportError when
    another module has such a name.
    """
    path, text = texts[""]
    beside = {name: found for name, found in texts.items() if name}
    with _lock:
        own = _laid(path, text) or next((name for name, (file, _) in beside.items() if file == path), "")
        own = own or f"rstar2_user_code_{hashlib.sha256((path + key).encode()).hexdigest()[:12]}_{Path(path).stem}"
        for name, (file, written) in beside.items():
            _lay_ready(name, file, written)
        if own not in sys.modules and own not in beside:
            _lay_ready(own, path, text)
        return importlib.import_module(own)


def _laid(path: str, text: str) -> str:
    """The name by which this file is there already, "" where it is not: it is run once, whoever imports it."""
    found = (finder for finder in sys.meta_path if isinstance(finder, _Text))
    return next((finder.name for finder in found if (finder.path, finder.text) == (path, text)), "")


def is_installed(name: str) -> bool:
    """Whether Python or an installed package has this name, which has no dot. Folders of the user do not count."""
    if name in sys.stdlib_module_names:
        return True
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return importlib.machinery.PathFinder.find_spec(name, folders) is not None


def _lay_ready(name: str, path: str, text: str) -> None:
    """Let `import name` find this text; the module runs when it is imported."""
    present = sys.modules.get(name)
    if present is None and "." not in name and is_installed(name):  # whoever imports that would get this
        raise ImportError(f"{path} has the name of an installed package, {name}; rename it")
    if present is None and (other := sys.modules.get(_laid(path, text))) is not None:
        sys.modules[name] = other
        return
    if present is None:
        sys.meta_path.insert(0, _Text(name, path, text))
        return
    loader = getattr(present.__spec__, "loader", None)
    if not isinstance(loader, _Text) or loader.text != text:
        raise ImportError(f"{path} has the name of another module, {getattr(present, '__file__', name)}; rename it")
