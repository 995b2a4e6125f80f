"""Code that a user names in the YAML: `path/to/file.py:name` or `package.module:name`.

A file's text is read once, where the YAML is loaded, and travels inside the settings to every process and node that loads it.
A package must be installed on every node.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from rstar2_megatron.extension.in_memory import import_text, is_installed

FOLDERS = "folders"
"""Key of the validation context: the folders from which a relative path counts, in order (`Path`)."""
COPIES = "code"
"""Folder beside a saved configuration in which the named files lie, below the start of their sha256."""


class UserCodeError(ValueError):
    """Code of the user is missing, wrong or has failed. The message names the user's file and the remedy."""

    @property
    def kind(self) -> str:
        """The name of the user's own exception, by which failures are counted."""
        return type(self.__cause__).__name__ if self.__cause__ is not None else "UserCodeError"


class UserCode(BaseModel):
    """One name of the user's code. It is validated from its text in the YAML, or from what a saved configuration holds."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reference: str
    """As written, a path made absolute."""
    sha256: str = ""
    """Of the file and of what it imports from beside it; of a package, of the module's file."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of every call of a function of `algorithm`, of `data.rows`, a reward or a loop."""
    _texts: dict[str, tuple[str, str]] = PrivateAttr(default_factory=dict)
    """(path, text) by module name: the file first, under the name "", then those beside it."""

    @model_serializer(mode="wrap")
    def _written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without arguments as before there were any, so that what an earlier version has saved is the same code."""
        return {name: value for name, value in whole(self).items() if name != "arguments" or value}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"reference": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> UserCode:
        if self._texts:
            return self
        if not self._where or not self.name.isidentifier():
            raise ValueError(f"{self.reference!r} is neither path/to/file.py:name nor package.module:name")
        if not self.is_file:
            self.sha256 = _hash([_source_of_package(self._where)])
            return self
        folders = [Path(folder) for folder in (info.context or {}).get(FOLDERS, [Path.cwd()])]
        path = self._find(folders)
        self.reference = f"{path}:{self.name}"
        texts = {"": (str(path), _text(path))}
        _add_siblings(path.parent, texts)
        found = _hash([text for _, text in texts.values()])
        if self.sha256 not in ("", found):
            raise ValueError(
                f"{path} has changed since this configuration was saved (sha256 {self.sha256[:12]} then, {found[:12]} now); "
                "write the reference without sha256 to use the file as it is"
            )
        self._texts, self.sha256 = texts, found
        return self

    def _find(self, folders: list[Path]) -> Path:
        tried = [(folder / Path(self._where).expanduser()).resolve() for folder in folders]
        if self.sha256:  # of a saved configuration: its copy is what ran, whatever became of the file
            tried = [(folder / COPIES / self.sha256[:12] / Path(self._where).name).resolve() for folder in folders] + tried
        for path in tried:
            if path.is_file():
                return path
        near = difflib.get_close_matches(tried[-1].name, [p.name for p in tried[-1].parent.glob("*.py")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"there is no file {' or '.join(dict.fromkeys(map(str, tried)))}{hint}")

    @property
    def _where(self) -> str:
        return self.reference.rpartition(":")[0]

    @property
    def is_file(self) -> bool:
        return self._where.endswith(".py")

    @property
    def name(self) -> str:
        return self.reference.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Short, for people: `file.py:name`."""
        return f"{Path(self._where).name}:{self.name}" if self.is_file else self.reference

    def __str__(self) -> str:
        return self.label

    @property
    def paths(self) -> list[str]:
        """Of the file and of those beside it that it imports; of a package, its module's file."""
        if self.is_file:
            return [path for path, _ in self._texts.values()]
        spec = importlib.util.find_spec(self._where)
        return [spec.origin] if spec is not None and spec.origin else []

    def load(self) -> Any:
        """What the name stands for. The code is run once a process. Raises UserCodeError."""
        try:
            if self.is_file:
                module = import_text(self._texts, self.sha256)
            else:
                module = importlib.import_module(self._where)
        except (Exception, SystemExit) as error:
            relative = isinstance(error, ImportError) and "attempted relative import" in str(error)
            remedy = "; import what lies beside it by its name alone, without the dot" if relative else ""
            raise UserCodeError(f"{self.label} cannot be loaded: {self.blame(error)}{remedy}") from error
        if not self.is_file and (here := _hash([_source_of_package(self._where)])) != self.sha256:
            raise UserCodeError(
                f"{self.reference} differs between nodes (sha256 {self.sha256[:12]} where the run was started, "
                f"{here[:12]} here, {module.__file__}); install the same version everywhere"
            )
        if not hasattr(module, self.name):
            names = [name for name in vars(module) if not name.startswith("_")]
            near = difflib.get_close_matches(self.name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(names) or 'no public name'}"
            raise UserCodeError(f"{self._where} has no {self.name!r}{hint}")
        return getattr(module, self.name)

    def save(self, folder: Path) -> None:
        """Copy the files below `folder`/code, from where `UserCode` reads them when a saved configuration is loaded."""
        target = folder / COPIES / self.sha256[:12]
        for path, text in self._texts.values():
            file = target / Path(path).relative_to(Path(self._where).parent)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def blame(self, error: BaseException) -> str:
        """One line: the last place in the user's own files that the error passed through, and the error.

        An error that passed through none of them (a missing package, say) is shown alone.
        """
        paths = self.paths
        if isinstance(error, SyntaxError) and error.filename in paths:
            return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if code.co_filename in paths:
                inside = "" if code.co_name == "<module>" else f", in {code.co_name}"
                place = f"{code.co_filename}:{line}{inside}: "
        try:
            text = " ".join(str(error).split())
        except Exception:  # its own `__str__` fails
            text = ""
        return f"{place}{type(error).__name__}{': ' + text if text else ''}"


def is_cancelled() -> bool:
    """Whether the running task is asked to end. Without that, a CancelledError comes from the user's own tasks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def all_user_code(value: Any, key: str = "") -> Iterator[tuple[str, UserCode]]:
    """(dotted key, code) of everything that settings name, or a part of them at `key`."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, UserCode):
        yield key, value
    elif isinstance(value, BaseModel):
        parts = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, list):
        parts = list(enumerate(value))
    for name, part in parts:
        yield from all_user_code(part, f"{key}.{name}" if key else name)


# ------------------------------------------------------------------------------------------------ reading


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows write a mark before the text
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _add_siblings(folder: Path, texts: dict[str, tuple[str, str]]) -> None:
    """Add the modules and packages of `folder` that the texts import, and that these import."""
    waiting = list(texts.values())
    while waiting:
        path, text = waiting.pop()
        try:
            tree = ast.parse(text, path)
        except SyntaxError as error:
            raise ValueError(f"{path}:{error.lineno}: {error.msg}") from None
        for module, file in (found for name in _imported(tree) for found in _beside(folder, name)):
            if module not in texts:
                texts[module] = (str(file), _text(file))
                waiting.append(texts[module])


def _beside(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """(module, file) of the module `name` of a folder, or of all modules of such a package."""
    if (folder / f"{name}.py").is_file():
        yield name, folder / f"{name}.py"
    elif name == __name__.partition(".")[0]:
        return
    elif (folder / name / "__init__.py").is_file():
        for file in sorted((folder / name).rglob("*.py")):
            yield ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"), file
    elif any((folder / name).glob("*.py")) and not is_installed(name):
        raise ValueError(f"{folder / name} is imported and has no __init__.py; add an empty one, so that it goes to every node")


def _imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of the absolute imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _source_of_package(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if not module.startswith(f"{error.name}."):  # its package imports what is missing
            raise ValueError(f"{module} cannot be imported: {error}") from error
        spec = None
    except (Exception, SystemExit) as error:  # of the package's own code
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    if spec is None:
        raise ValueError(f"no module {module!r} is installed for {sys.executable}; a file is named path/to/file.py:name")
    return Path(spec.origin).read_bytes().decode(errors="replace") if spec.origin and Path(spec.origin).is_file() else ""


def _hash(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()
