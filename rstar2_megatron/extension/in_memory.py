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
    """The module of `texts[""]`, run once a process for each path and `key`, or text where it has its file's name.

    texts: (path, text) by module name; the module may import the others. Raises what the code raises, and ImportError when
    another module has such a name.
    """
    path, text = texts[""]
    with _lock:
        own = Path(path).stem
        if not _may_be_named(own, path, text):
            own = f"rstar2_user_code_{hashlib.sha256((path + key).encode()).hexdigest()[:12]}_{own}"
        if own not in sys.modules:
            for name, (file, written) in texts.items():
                _lay_ready(name or own, file, written)
        return importlib.import_module(own)


def _may_be_named(name: str, path: str, text: str) -> bool:
    """Whether the file can be the module of its own name, by which files beside it import it: it is then run once for both."""
    if name in sys.modules:
        known = getattr(sys.modules[name].__spec__, "loader", None)
    else:
        known = next((finder for finder in sys.meta_path if isinstance(finder, _Text) and finder.name == name), None)
        if known is None:
            return name.isidentifier() and name != "__init__" and not is_installed(name)
    return isinstance(known, _Text) and (known.path, known.text) == (path, text)


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
    if present is None:
        sys.meta_path.insert(0, _Text(name, path, text))
        return
    loader = getattr(present.__spec__, "loader", None)
    if not isinstance(loader, _Text) or loader.text != text:
        raise ImportError(f"{path} has the name of another module, {getattr(present, '__file__', name)}; rename it")
