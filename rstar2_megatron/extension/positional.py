"""Whether a function of the user's takes what it will be given by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def misfit(
    function: Callable[..., Any],
    parameters: str,
    given: Mapping[str, Any] | None = None,
    *,
    may_await: bool = False,
    may_yield: bool = False,
) -> str:
    """Why `function` cannot be called by position with `parameters`, their names, "rewards, valid"; "" when it can.

    given: arguments by keyword. The names count, because a function that takes the right number of other things would run,
    and return nonsense. A parameter that has another name is known by its type: `t: Trajectory` is a trajectory.
    """
    if inspect.isclass(function):
        return f"it is a class; make an instance, `name = {function.__name__}(...)`, and name that"
    if fault := misfit_of_kind(function, may_await=may_await, may_yield=may_yield):
        return fault
    names = parameters.split(", ")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""  # a function of C without a signature
    except TypeError as error:
        return str(error)
    try:
        signature.bind(*names, **(given or {}))
    except TypeError as error:
        return str(error)
    found = [known_as(one, names) for one in signature.parameters.values() if one.name not in (given or {})]
    taken = [name for name, one in zip(found, signature.parameters.values()) if one.kind is not one.KEYWORD_ONLY]
    swapped = any(name in names and names.index(name) != place for place, name in enumerate(taken))
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())
    if swapped or (len(names) > 1 and not takes_any and not set(names) & set(taken)):
        return f"its parameters are named otherwise; name them ({parameters}), in this order"
    return ""


def known_as(parameter: inspect.Parameter, names: list[str]) -> str:
    """The one of `names` for which a parameter stands, by its name or its type; else its own name."""
    by_type = _type_name(parameter).lower()
    return by_type if parameter.name not in names and by_type in names else parameter.name


def is_for(parameter: inspect.Parameter, name: str) -> bool:
    """As `known_as`, but for a text or a number of this name, which is a tool's."""
    return known_as(parameter, [name]) == name and _type_name(parameter) not in ("str", "int", "float", "bool")


def _type_name(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    return (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).rpartition(".")[2]


def misfit_of_kind(function: Callable[..., Any], *, may_await: bool = False, may_yield: bool = False) -> str:
    """What is wrong with an async function or a generator; "" where nothing is."""
    outer: list[Any] = [function, type(function).__call__]  # type: ignore[operator]
    inner = [inspect.unwrap(one) for one in outer]
    if any(map(inspect.isasyncgenfunction, inner)) or (any(map(inspect.isgeneratorfunction, inner)) and not may_yield):
        return "it is a generator; return the result in place of `yield`"
    if not any(map(inspect.iscoroutinefunction, inner)):
        return ""
    if not may_await:
        return "it is async; write it as a plain `def`"
    if not any(map(inspect.iscoroutinefunction, outer)):
        return "it wraps an async function and is none itself; write the wrapper as `async def`"
    return ""


def shown_parameters(function: Callable[..., Any]) -> str:
    """For people: `(problem, trajectory)`."""
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
