"""A tool that the user has written: a typed, documented function, or a class with an instance for each trajectory.

Plain functions run in threads, because one that never returns must hold up neither the loop nor the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rstar2_megatron.data.json_text import json_type
from rstar2_megatron.extension import ToolError
from rstar2_megatron.extension.positional import misfit_of_kind
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.rollout.tool import CallContext, Judge, LimitedTool, Malformed
from rstar2_megatron.rollout.user_call import TookTooLong, UserThread
from rstar2_megatron.settings.schema import AgentLoopSettings, OwnToolSettings
from rstar2_megatron.tools import ToolSchema
from rstar2_megatron.trajectory import Problem, ToolOutcome

_PROBLEM = "problem"
_NAME = re.compile(r"[\w.-]+")  # OpenAI's, and the dots of a namespace
_LISTED = re.compile(r"(?m)^( {0,3}(?:Args|Arguments|Params|Parameters)(?:( *: *)|\n *-{3,} *)$)")
"""The header of a docstring's list of parameters: `Args:`, or NumPy's with a line below."""
_ENTRY = re.compile(r" *[-*]* *(\w+(?: *, *\w+)*) *(?:\(.+?\))? *(?::|$) *(.*)")  # `x (int): what`, `- x: what`, `x, y : int`
_FIELD = re.compile(r"(?ms)^ *[:@](?:param(?:eter)?|arg(?:ument)?)(?: [^:\n]+?)? (\w+) *: *(.+?)(?=^ *[:@]\w|^ *$|\Z)")
_SECTION = re.compile(
    r"(?m)^(?:[:@](?:param(?:eter)?|arg(?:ument)?|type|returns?|rtype|raises?|yields?)\b.*|(?:Returns|Yields|Raises) *: *$"
    r"|(?:Returns|Yields|Raises|Examples?|Notes?) *\n *-{3,} *$)"
)
"""Where the description of what the tool does ends, in a docstring without a list of parameters."""
_IDLE_S = 3600.0  # state of a trajectory that went on elsewhere is closed after this time


@dataclass(slots=True)
class _State:
    """One trajectory's instance."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # its calls run one after another
    instance: Any = None
    thread: UserThread = field(default_factory=UserThread)
    used: float = field(default_factory=time.monotonic)


class Timeout(Exception):
    """By this name it is counted that an instance did not open in time."""


class OwnTool(LimitedTool):
    """Raises UserCodeError when it is made from code that is no tool; the message says what to write."""

    def __init__(self, settings: OwnToolSettings, agentloop: AgentLoopSettings) -> None:
        self.code: UserCode = settings.use
        self._given = given = settings.settings
        label, target = self.code.label, self.code.load()
        if self.code.arguments:
            raise UserCodeError(f"{label}: arguments of a tool are its `settings`")
        self._target = target
        self.has_session = inspect.isclass(target)
        # Of a class without such a method it is its constructor, which is no function.
        self._call = inspect.getattr_static(target, "__call__") if self.has_session else target
        self.is_async = inspect.iscoroutinefunction(self._call)
        name = getattr(target, "__name__", "")
        if not callable(target) or not name or (self.has_session and not inspect.isfunction(self._call)):
            kind = "class without __call__" if self.has_session else type(target).__name__
            raise UserCodeError(f"{label} is a {kind}; a tool is a function, or a class with __call__")
        if missing := sorted(getattr(target, "__abstractmethods__", ())):
            raise UserCodeError(f"{label} is an abstract class; write its {', '.join(missing)}")
        if fault := misfit_of_kind(self._call, may_await=True):
            raise UserCodeError(f"{label} cannot be called: {fault}")
        name = getattr(target, "name", name) if self.has_session else name
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise UserCodeError(f"{label} has the name {name!r}; a tool's name is of letters, digits, _, - and .")
        try:
            inspect.signature(target).bind(**given) if self.has_session else inspect.signature(target).bind_partial(**given)
        except (TypeError, ValueError) as error:
            raise UserCodeError(f"the settings of {label} do not fit its parameters: {error}") from None
        for method in ("open", "close") if self.has_session else ():
            _check_method(label, target, method)
        parameters = _parameters(label, self._call, method=self.has_session)
        self._takes_problem = [n for n, one in parameters.items() if n == _PROBLEM or _is_problem(one.annotation)]
        annotation = parameters[_PROBLEM].annotation if _PROBLEM in parameters else Any
        if annotation not in (Any, inspect.Parameter.empty) and not _is_problem(annotation):
            raise UserCodeError(
                f"parameter {_PROBLEM!r} of {label} gets the Problem, which the model does not see, and has the type "
                f"{_shown(annotation)}; rename it where the model is to write it"
            )
        hidden = [*self._takes_problem, *([] if self.has_session else given)]
        shown = {n: one for n, one in parameters.items() if n not in hidden}
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        properties: dict[str, dict[str, Any]] = {}
        for n, one in shown.items():
            if one.annotation is one.empty:
                raise UserCodeError(f"parameter {n!r} of {label} has no type; write e.g. `{n}: str`")
            try:
                self._adapters[n] = TypeAdapter(one.annotation)
                properties[n] = _form(self._adapters[n].json_schema())
            except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
                raise UserCodeError(f"parameter {n!r} of {label} has the type {one.annotation}, which no JSON fits") from None
            except Exception as error:  # pydantic runs code of the types, which may be the user's
                kind, said = f"parameter {n!r} of {label} has the type {_shown(one.annotation)}", str(error).partition("\n")[0]
                raise UserCodeError(f"{kind}, of which no schema can be made: {said}") from error
            if isinstance(one.default, FieldInfo):  # Python would give the function this object
                raise UserCodeError(
                    f"parameter {n!r} of {label} has a Field in place of its default; write "
                    f"`{n}: Annotated[{_shown(one.annotation)}, Field(...)]`, and behind it `= ` and the default, if it has one"
                )
        called = f"__call__ of {label}" if self.has_session else label
        doc = inspect.getdoc(self._call) or ""  # a base class's too, of which the last one is `type`
        doc = "" if doc == type.__call__.__doc__ else doc
        super().__init__(_schema(called, name, doc, shown, properties), settings, agentloop)
        self._states: dict[str, _State] = {}

    # ------------------------------------------------------------------------------------------ one call

    async def run(self, arguments: dict[str, Any], context: CallContext) -> tuple[ToolOutcome, str]:
        values = self._validated(arguments)
        if self._takes_problem:  # a copy, which the user's code may change
            values |= dict.fromkeys(self._takes_problem, copy.deepcopy(context.problem))
        if not self.has_session:
            return self._answer(await self._limited(self._call, {**self._given, **values}))
        old = time.monotonic() - _IDLE_S
        for session in [s for s, state in self._states.items() if state.used < old and not state.lock.locked()]:
            with contextlib.suppress(UserCodeError):  # of another trajectory
                await self.close(session, context.judge)
        state = self._states.setdefault(context.session, _State())
        async with state.lock:
            state.used = time.monotonic()
            if state.instance is None:
                state.instance = await self._opened(context, state.thread)
            return self._answer(await self._limited(state.instance, values, state.thread))

    async def _opened(self, context: CallContext, thread: UserThread) -> Any:
        try:
            instance = await self._limited(self._target, self._given, thread)
            if callable(opening := getattr(instance, "open", None)):
                takes = {_PROBLEM: copy.deepcopy(context.problem)} if _PROBLEM in inspect.signature(opening).parameters else {}
                await self._limited(opening, takes, thread)
        except TookTooLong:  # the model has no part in it
            said = f"tool {self.code.label} was not open within {self.limits.timeout_s:g} s"
            raise UserCodeError(said) from Timeout()
        return instance

    async def _limited(self, function: Callable[..., Any], values: dict[str, Any], thread: UserThread | None = None) -> Any:
        """Raises ToolError, TookTooLong, UserCodeError."""

        def failed(error: BaseException) -> Exception:
            if isinstance(error, ToolError):
                return error
            return UserCodeError(f"tool {self.code.label} failed: {self.code.blame(error)}")

        return await self.limited(function, values, failed, thread)

    def __str__(self) -> str:
        return f"{self.code.label}, of which {self.running} calls were running (max_concurrency={self.limits.max_concurrency})"

    def _answer(self, value: Any) -> tuple[ToolOutcome, str]:
        try:
            if isinstance(value, str):
                return ToolOutcome.OK, str.__str__(value)  # without a class of the user's
            return ToolOutcome.OK, json.dumps(to_jsonable_python(value, fallback=_listed), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            said = f"tool {self.code.label} returned a {type(value).__name__}, which is not JSON ({error})"
            raise UserCodeError(f"{said}; a tool returns a text, or what JSON can hold") from error

    def _validated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        values = {}
        for name, value in arguments.items():
            try:
                values[name] = self._adapters[name].validate_python(value)
            except ValidationError as error:
                with contextlib.suppress(ValueError):  # strict types read a date or a tuple from JSON alone
                    values[name] = self._adapters[name].validate_json(json.dumps(value))
                    continue
                first = error.errors()[0]
                place = ".".join(str(part) for part in (name, *first["loc"]))
                said = first["msg"].removeprefix("Value error, ")
                raise Malformed(f'Argument "{place}": {said[:1].lower()}{said[1:]}, got {json_type(first["input"])}.') from None
            except Exception as error:  # of a validator of the user's
                raise UserCodeError(f"argument {name!r} of {self.code.label}: {self.code.blame(error)}") from error
        return values

    # ------------------------------------------------------------------------------------ trajectory's state

    def is_open(self, session: str) -> bool:
        return session in self._states

    async def close(self, session: str, judge: Judge) -> None:
        state = self._states.pop(session, None)
        if state is not None and callable(closing := getattr(state.instance, "close", None)):
            try:
                await self._limited(closing, {}, state.thread)
            except (ToolError, TookTooLong) as error:
                raise UserCodeError(f"tool {self.code.label} was not closed: {error}") from error


# ---------------------------------------------------------------------------------------------- its schema


def _parameters(label: str, function: Callable[..., Any], *, method: bool) -> dict[str, inspect.Parameter]:
    """Parameters with their types resolved. Raises UserCodeError for those that a call by name cannot fill."""
    try:
        parameters = inspect.signature(function).parameters
        inner = inspect.unwrap(function)
        written = {n: kind for n, kind in inner.__annotations__.items() if n != "return"}  # which may name what is not imported
        # A Field of Annotated has limits and a description.
        hints = get_type_hints(SimpleNamespace(__annotations__=written), inner.__globals__, include_extras=True)
    except Exception as error:  # annotations that are texts are run
        raise UserCodeError(f"the parameters of {label} cannot be read: {error}") from error
    found = {}
    for name, one in list(parameters.items())[int(method) :]:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise UserCodeError(f"{label} takes `{one}`, which no model can fill by name; write each parameter with its type")
        found[name] = one.replace(kind=one.KEYWORD_ONLY, annotation=hints.get(name, one.empty))
    return found


def _check_method(label: str, target: type, name: str) -> None:
    """`open` may take the problem, by this name; `close` takes nothing."""
    method = getattr(target, name, None)
    if not callable(method):
        return
    instance = (None,) if inspect.isfunction(inspect.getattr_static(target, name)) else ()
    try:
        signature = inspect.signature(method)
        signature.bind(*instance, **({_PROBLEM: None} if name == "open" and _PROBLEM in signature.parameters else {}))
    except (TypeError, ValueError) as error:
        takes = "self, or self and problem" if name == "open" else "self alone"
        raise UserCodeError(f"{name} of {label} takes {takes}: {error}") from None
    if fault := misfit_of_kind(method, may_await=True):
        raise UserCodeError(f"{name} of {label} cannot be called: {fault}")


def _is_problem(annotation: Any) -> bool:
    """Also `Problem | None`."""
    return annotation is Problem or Problem in get_args(annotation)


def _listed(value: Any) -> Any:
    """The Python value of a scalar or an array of numpy or torch."""
    if not callable(getattr(value, "tolist", None)):
        raise TypeError("nor a value of numpy or torch")
    return value.tolist()


def _shown(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def _form(schema: Any) -> Any:
    """A type's schema as tools are described to models: `type` first, and `nullable` for `X | None`.

    A call's argument is then checked against the type of X. pydantic sorts the keys and lists null as one more type.
    """
    if isinstance(schema, list):
        return [_form(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _form(schema[key]) for key in sorted(schema, key=lambda key: key != "type")}
    if schema.get("additionalProperties") is True:  # of a dict without types, as everywhere where nothing is said
        del schema["additionalProperties"]
    kinds = schema.get("anyOf", [])
    others = [kind for kind in kinds if kind != {"type": "null"}]
    if len(others) == len(kinds) or (len(others) == 1 and "$ref" in others[0]):
        return schema
    inner = others[0] if len(others) == 1 else {"anyOf": others}
    return {**inner, "nullable": True, **{key: value for key, value in schema.items() if key != "anyOf"}}


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """(what the tool does, what each parameter is), of a docstring in Google's, NumPy's or Sphinx's style."""
    if len(parts := _LISTED.split(doc, maxsplit=1)) == 1:
        fields = {name: " ".join(text.split()) for name, text in _FIELD.findall(doc)}
        return _SECTION.split(doc, maxsplit=1)[0].strip(), fields
    before, header, is_google, behind = parts
    entries: list[list[str]] = []  # first line, and those that belong to it
    for line in filter(str.strip, behind.splitlines()):
        depth = _depth(line)
        if is_google and depth <= _depth(header):
            break
        if not is_google and set(line.strip()) == {"-"}:  # below the name of NumPy's next section
            del entries[-1:]
            break
        if entries and depth > _depth(entries[0][0]):
            entries[-1].append(line.strip())
        else:
            entries.append([line])
    found: dict[str, str] = {}
    for first, *more in entries:
        if entry := _ENTRY.match(first):
            said = [entry[2], *more] if is_google else more  # behind NumPy's colon stands the type
            found |= dict.fromkeys(re.split(r" *, *", entry[1]), " ".join(filter(None, said)))
    return before.strip(), found


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _schema(
    label: str, name: str, doc: str, parameters: Mapping[str, inspect.Parameter], properties: dict[str, dict[str, Any]]
) -> ToolSchema:
    """properties: the JSON schema of each parameter, which a Field or a class may describe."""
    does, about = _described(doc)
    if not does:
        raise UserCodeError(f"{label} has no docstring; write what the tool does, and under `Args:` what each parameter is")
    for n, one in parameters.items():
        in_type = [text for text in getattr(one.annotation, "__metadata__", ()) if isinstance(text, str)]
        said = about.get(n) or " ".join(in_type) or properties[n].get("description")
        if not said:
            raise UserCodeError(f"the docstring of {label} has no line `{n}: what it is` under `Args:`")
        properties[n]["description"] = said
    form: dict[str, Any] = {"type": "object", "properties": properties}
    if needed := [n for n, one in parameters.items() if one.default is one.empty]:
        form["required"] = needed
    return {"type": "function", "function": {"name": name, "description": does, "parameters": form}}
