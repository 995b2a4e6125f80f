"""Imports modules from their text, so that a node without the file runs the same code."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType

_lock = threading.Lock()


class _Text(importlib.abc.InspectLoader):
    """Loads one module. Tracebacks find its lines through `get_source`."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


def import_text(texts: Mapping[str, tuple[str, str]], key: str) -> ModuleType:
    """The module of `texts[""]`, run once a process for each path and `key`.

    texts: (path, text) by module name; the module may import the others. Raises what the code raises, and ImportError when
    another module has such a name.
    """
    path, text = texts[""]
    own = f"rstar2_user_code_{hashlib.sha256((path + key).encode()).hexdigest()[:12]}_{Path(path).stem}"
    with _lock:
        if own in sys.modules:
            return sys.modules[own]
        begun: list[str] = []
        try:
            for name, (sibling, source) in texts.items():
                if name:
                    _lay_ready(name, sibling, source, begun)
            return _run(own, path, text, begun)
        except BaseException:
            for name in begun:
                sys.modules.pop(name, None)
            raise


def _lay_ready(name: str, path: str, text: str, begun: list[str]) -> None:
    """Let `import name` find this text; the module runs when it is imported."""
    present = sys.modules.get(name)
    if present is not None:
        loader = getattr(present.__spec__, "loader", None)
        if isinstance(loader, _Text) and loader.text == text:
            return
        raise ImportError(f"{path} has the name of another module, {getattr(present, '__file__', name)}; rename it")
    sys.meta_path.insert(0, _Finder(name, _Text(path, text)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, loader: _Text) -> None:
        self.name = name
        self.loader = loader

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return _spec(fullname, self.loader)


def _spec(name: str, loader: _Text) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(name, loader, origin=loader.path)
    spec.has_location = True  # so that the module has `__file__`
    return spec


def _run(name: str, path: str, text: str, begun: list[str]) -> ModuleType:
    loader = _Text(path, text)
    module = importlib.util.module_from_spec(_spec(name, loader))
    sys.modules[name] = module
    begun.append(name)
    loader.exec_module(module)
    return module
