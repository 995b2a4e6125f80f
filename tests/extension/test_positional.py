"""Functions that take other things than they will be given are found by the names and types of their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rstar2_megatron.extension.positional import misfit
from rstar2_megatron.trajectory import Problem, Trajectory


class Length:
    def __call__(self, problem: Any, trajectory: Any) -> bool:
        return True


def typed(row: Problem, rollout: Trajectory) -> None: ...
def one_known(question: Any, trajectory: Any) -> None: ...
def with_more(problem: Any, trajectory: Any, *, weight: float = 1.0) -> None: ...
def anything(*arguments: Any, **named: Any) -> None: ...
def settings_first(weight: float, problem: Any, trajectory: Any) -> None: ...
def swapped(trajectory: Any, problem: Any) -> None: ...
def swapped_types(t: Trajectory, p: Problem) -> None: ...
def of_texts(prediction: str, target: str) -> None: ...
def too_few(trajectory: Any) -> None: ...
async def awaited(problem: Any, trajectory: Any) -> None: ...


@functools.wraps(awaited)
def wrapping(*arguments: Any) -> Any:
    return awaited(*arguments)


def yielding(problem: Any, trajectory: Any) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [typed, one_known, with_more, anything, Length(), functools.partial(settings_first, 1.0)])
def test_what_fits(function: Callable[..., Any]) -> None:
    assert misfit(function, "problem, trajectory") == ""


def test_one_parameter_may_have_any_name() -> None:
    assert misfit(lambda t: t, "tokens") == ""
    assert (
        misfit(yielding, "problem, trajectory", may_yield=True) == misfit(awaited, "problem, trajectory", may_await=True) == ""
    )


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (swapped, "its parameters are named otherwise; name them (problem, trajectory), in this order"),
        (swapped_types, "its parameters are named otherwise"),
        (of_texts, "its parameters are named otherwise"),
        (settings_first, "missing a required argument: 'trajectory'"),
        (too_few, "too many positional arguments"),
        (Length, "it is a class; make an instance, `name = Length(...)`, and name that"),
        (awaited, "it is async; write it as a plain `def`"),
        (wrapping, "it is async; write it as a plain `def`"),
        (yielding, "it is a generator; return the result in place of `yield`"),
    ],
)
def test_what_does_not(function: Callable[..., Any], said: str) -> None:
    assert said in misfit(function, "problem, trajectory")


def test_a_plain_wrapper_of_an_async_function() -> None:
    assert "wraps an async function and is none itself" in misfit(wrapping, "problem, trajectory", may_await=True)
