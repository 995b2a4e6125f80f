"""A YAML value that is the name of a built-in or the user's own function by path, and the function behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BeforeValidator, ValidationError, ValidationInfo

from rstar2_megatron.extension.positional import misfit, shown_parameters
from rstar2_megatron.extension.user_code import UserCode, UserCodeError

F = TypeVar("F", bound=Callable[..., Any])


def name_or_code(*names: str) -> BeforeValidator:
    """Reads a field of type `str | UserCode`: one of `names`, or a path or module with a name behind a colon."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if value in names or isinstance(value, UserCode):
            return value
        if not isinstance(value, dict) and ":" not in str(value):
            known = f"{', '.join(names)}, or " if names else ""
            raise ValueError(f"expected {known}a function of your own, path/to/file.py:name or package.module:name")
        try:
            return UserCode.model_validate(value, context=info.context)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None

    return BeforeValidator(read)


def resolve(key: str, value: str | UserCode, known: Mapping[str, F], parameters: str) -> F:
    """The function that `value` names: of `known`, or the user's own, as `own_function`."""
    if isinstance(value, UserCode):
        return own_function(key, value, parameters)
    if value not in known:
        raise ValueError(f"{key}={value}: expected {', '.join(known)}, or a function of your own, path/to/file.py:name")
    return known[value]


def own_function(key: str, code: UserCode, parameters: str, *, may_yield: bool = False) -> Any:
    """The user's function of the key `key`. Whatever it raises becomes a UserCodeError of one sentence.

    parameters: their names, "rewards, valid", by which it is called in this order. may_yield: whether a generator will do.
    Raises UserCodeError for what cannot be loaded, is no plain function, or takes other arguments.
    """
    function = code.load()
    shown = f"{key}={code.label}"
    if not callable(function):
        raise UserCodeError(f"{shown} is of type {type(function).__name__}; write def {code.name}({parameters})")
    if fault := misfit(function, parameters, code.arguments, may_yield=may_yield):
        named = ", ".join([parameters, *(f"{name}=..." for name in code.arguments)])
        raise UserCodeError(
            f"{shown} takes {shown_parameters(function)}, but is called by ({named}): {fault}; "
            f"write def {code.name}({', '.join([parameters, *code.arguments])})"
        )

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments, **code.arguments)
        except (Exception, SystemExit) as error:
            raise UserCodeError(f"{shown} failed: {code.blame(error)}") from error

    return called
