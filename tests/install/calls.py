"""Every call that source files make into other packages, and whether the installed signatures take it.

The calls are read from the source, so a change of ours or of a version is seen without running it, which is the only way for
the lines that need a GPU. A call is known where its callee is imported by name or is `super()` of an imported class; methods of
objects run in the tests of actor and engine, on a CPU. Values are not known: only number and names of arguments are bound.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Call:
    """One use of something imported: a call, or with `arguments` None a mere mention."""

    where: str
    """file:line"""
    callee: str
    """dotted, e.g. torch.cuda.Stream or megatron.core.optimizer.OptimizerConfig"""
    arguments: tuple[int, tuple[str, ...], bool] | None = None
    """positional ones, keywords, whether * or ** adds unknown ones"""
    method: bool = False
    """of `super()`: `self` comes first"""

    def __str__(self) -> str:
        if self.arguments is None:
            return f"{self.where}: {self.callee}"
        count, keywords, is_open = self.arguments
        words = [*("_" for _ in range(count)), *(f"{k}=" for k in keywords), *(["..."] if is_open else [])]
        return f"{self.where}: {self.callee}({', '.join(words)})"


def calls_of(
    path: Path, packages: Iterable[str], versions: Mapping[str, str] = {}, absent: set[str] | None = None
) -> Iterator[Call]:
    """The calls into `packages` of one source file; relative imports are taken as the file's own and left out.

    versions: {"is_te_min_version": "2.11.0"} decides branches on such a function, the other branch is not looked at; a bare
    name among them is true. What a `try` with `except ImportError` imports may be missing: it is added to `absent`, and the
    rest of that `try` is left out.
    """
    tree = _Dead(tuple(packages), versions, absent if absent is not None else set()).visit(ast.parse(path.read_text()))
    finder = _Finder(path, tuple(packages))
    finder.imports(tree)
    finder.visit(tree)
    yield from finder.found


class _Dead(ast.NodeTransformer):
    """Takes out what does not run with the installed versions."""

    def __init__(self, packages: tuple[str, ...], versions: Mapping[str, str], absent: set[str]) -> None:
        self.packages, self.versions, self.absent = packages, versions, absent

    def _decided(self, test: ast.expr) -> bool | None:
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in self.versions:
            wanted = ast.literal_eval(test.args[0])
            return Version(self.versions[test.func.id]) >= Version(wanted)
        if isinstance(test, ast.Name) and test.id in self.versions:
            return True
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = [self._decided(value) for value in test.values]
            ends = isinstance(test.op, ast.Or)  # one of these decides the whole
            if ends in parts:
                return ends
            return None if None in parts else not ends
        return None

    def visit_If(self, node: ast.If) -> Any:
        decided = self._decided(node.test)
        self.generic_visit(node)
        return node if decided is None else (node.body if decided else node.orelse) or ast.Pass()

    def visit_Try(self, node: ast.Try) -> Any:
        if any("ImportError" in ast.unparse(h.type) for h in node.handlers if h.type):
            missing = [name for line in node.body for name in self._imported(line) if not _is_there(name)]
            if missing:
                self.absent.update(missing)
                node.body = [ast.Pass()]
        self.generic_visit(node)
        return node

    def _imported(self, line: ast.stmt) -> list[str]:
        if not isinstance(line, ast.ImportFrom) or not line.module or line.level:
            return []
        return [f"{line.module}.{x.name}" for x in line.names if line.module.partition(".")[0] in self.packages]


def _is_there(dotted: str) -> bool:
    try:
        find(dotted)
    except (AttributeError, ImportError):
        return False
    return True


class _Finder(ast.NodeVisitor):
    def __init__(self, path: Path, packages: tuple[str, ...]) -> None:
        self.path, self.packages = path, packages
        self.names: dict[str, str] = {}
        self.bases: list[str | None] = []
        self.found: list[Call] = []

    def imports(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    if root in self.packages:
                        self.names[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                if node.module.partition(".")[0] not in self.packages:
                    continue
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self._add(node, f"{node.module}.{alias.name}")

    def _add(self, node: Any, callee: str, call: ast.Call | None = None, *, method: bool = False) -> None:
        arguments = None
        if call is not None:
            plain = [x for x in call.args if not isinstance(x, ast.Starred)]
            keywords = tuple(k.arg for k in call.keywords if k.arg is not None)
            is_open = len(plain) < len(call.args) or len(keywords) < len(call.keywords)
            arguments = (len(plain), keywords, is_open)
        self.found.append(Call(f"{self.path}:{node.lineno}", callee, arguments, method))

    def _dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            inner = self._dotted(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        known = [base for base in map(self._dotted, node.bases) if base]
        self.bases.append(known[0] if known else None)
        self.generic_visit(node)
        self.bases.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted and isinstance(node.ctx, ast.Store):
            return  # what is set need not be there
        if dotted:
            self._add(node, dotted)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        target = node.func
        dotted = self._dotted(target)
        if dotted:
            self._add(node, dotted, node)
        elif isinstance(target, ast.Attribute):
            owner = target.value
            of_super = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            if of_super and self.bases and self.bases[-1]:
                self._add(node, f"{self.bases[-1]}.{target.attr}", node, method=True)
            else:
                self.visit(owner)
        else:
            self.visit(target)
        for argument in [*node.args, *node.keywords]:
            self.visit(argument)


def find(dotted: str) -> Any:
    """The object of a dotted name. Raises AttributeError or ImportError where it is not there."""
    words = dotted.split(".")
    for cut in range(len(words), 0, -1):
        try:
            value = importlib.import_module(".".join(words[:cut]))
        except ModuleNotFoundError as error:
            if not error.name or not ".".join(words[:cut]).startswith(error.name):
                raise  # a module of the package wants another one that is not there
            continue
        for word in words[cut:]:
            value = getattr(value, word)
        return value
    raise ImportError(f"no module {words[0]}")


def problem(call: Call) -> str | None:
    """Why the installed packages do not take the call, or None.

    Of functions in C torch's operators are bound to their schemas; the others need only be there.
    """
    try:
        target = find(call.callee)
    except (AttributeError, ImportError) as error:
        return f"{call}: {error}"
    if call.arguments is None:
        return None
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return _operator_problem(call)
    count, keywords, is_open = call.arguments
    first = [None] if call.method and _takes_self(call.callee) else []
    bind = signature.bind_partial if is_open else signature.bind
    try:
        bind(*first, *[None] * count, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{call}: {error}; the installed signature is {signature}"
    return None


def schemas(call: Call) -> list[Any]:
    """The overloads of the torch operator that the callee names; none for other functions."""
    if not call.callee.startswith("torch."):
        return []
    import torch  # here: reading calls needs no torch

    name = call.callee.removeprefix("torch.").removeprefix("nn.functional.").replace(".", "_")
    return list(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _operator_problem(call: Call) -> str | None:
    overloads = schemas(call)
    if not overloads or any(_takes(overload, call) for overload in overloads):
        return None
    return f"{call}: no overload takes it; there are {'; '.join(map(str, overloads))}"


def _takes(overload: Any, call: Call) -> bool:
    assert call.arguments is not None
    count, keywords, is_open = call.arguments
    names = [x.name for x in overload.arguments if not x.kwarg_only]
    if len(names) == 1 and str(overload.arguments[0].type) in ("List[int]", "List[SymInt]"):
        count = min(count, 1)  # sizes may be given one by one
    given = {*names[:count], *keywords} - {"requires_grad"}  # every factory's
    needed = {x.name for x in overload.arguments if not x.has_default_value() and x.name != "out"}
    known = {x.name for x in overload.arguments}
    return count <= len(names) and given <= known and (is_open or needed <= given)


def has_signature(call: Call) -> bool:
    if call.arguments is not None and schemas(call):
        return True
    try:
        inspect.signature(find(call.callee))
    except (TypeError, ValueError, AttributeError, ImportError):
        return False
    return call.arguments is not None


def _takes_self(dotted: str) -> bool:
    owner, _, name = dotted.rpartition(".")
    kind = inspect.getattr_static(find(owner), name, None)
    return not isinstance(kind, staticmethod | classmethod)
