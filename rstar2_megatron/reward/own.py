"""A reward function of the user: which form it has, how it is called, and what it may return.

Two forms are recognised by the names of their parameters, or the types Problem and Trajectory:

    (problem: Problem, trajectory: Trajectory, **arguments) -> float | dict | Grade
    (data_source, solution_str, ground_truth, extra_info, **arguments) -> float | dict     verl's compute_score

Both may be async. A dict has `score`; its other numbers are logged by their names.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from rstar2_megatron.algorithm.response_text import response_text
from rstar2_megatron.extension.positional import is_for, misfit, misfit_of_kind
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.reward.pool import Grade
from rstar2_megatron.trajectory import Problem, Trajectory

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")


class OwnReward:
    """A loaded reward function."""

    def __init__(self, code: UserCode, arguments: Mapping[str, Any]) -> None:
        """arguments: keyword arguments of every call. Raises UserCodeError when it cannot be loaded or called."""
        self.code = code
        self.arguments = {**arguments, **code.arguments}
        self.function = code.load()
        if not callable(self.function):
            raise UserCodeError(f"{code.label} is a {type(self.function).__name__}, not a function")
        self.is_async = any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError) as error:
            raise UserCodeError(f"{code.label}: its parameters cannot be read: {error}") from None
        self.is_verls = {"solution_str", "ground_truth"} <= set(signature.parameters)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        self._given = [name for name in _VERL if takes_all or name in signature.parameters]
        fault = _misfit(self.function, signature, self._given if self.is_verls else None, self.arguments)
        if fault:
            raise UserCodeError(
                f"{code.label}{signature} cannot be called with (problem, trajectory), nor with verl's ({', '.join(_VERL)}), "
                f"and reward.arguments={self.arguments}: {fault}"
            )

    def __call__(self, problem: Problem, trajectory: Trajectory) -> Any:
        """What the function returns, or its awaitable. It may change both, which are copies."""
        problem = copy.deepcopy(problem)  # which a group's trajectories share
        if self.is_async:  # a plain function has a copy of the trajectory, in another process
            trajectory = pickle.loads(pickle.dumps(trajectory, pickle.HIGHEST_PROTOCOL))
        if not trajectory.response_text:  # of try_out, or a step of a search
            trajectory.response_text = functools.reduce(
                lambda text, token: text.replace(token, ""), _SPECIAL, response_text(trajectory)
            )
        if not self.is_verls:
            return self.function(problem, trajectory, **self.arguments)
        row = verl_columns(problem)
        # verl counts the prompt and what answers a turn too, and always has an empty dict of scores.
        row["extra_info"] |= {"num_turns": 2 * trajectory.num_turns, "rollout_reward_scores": {}}
        return self.call_as_verl(solution_str=trajectory.response_text, **row)

    def call_as_verl(self, **row: Any) -> Any:
        """A call of a function of verl's form, with those of its four arguments that it takes.

        `solution_str` is the whole response, tool texts included, decoded without special tokens.
        """
        return self.function(**{name: row[name] for name in self._given}, **self.arguments)

    def grade(self, returned: Any) -> Grade:
        """Read a returned value. Raises TypeError or ValueError for what is no finite number, or no text.

        The grade is of plain types alone, because other processes have no classes of the user's.
        """
        if isinstance(returned, Grade):
            return Grade(
                reward=_number(returned.reward, "reward"),
                detail=_text(returned.detail, "detail"),
                answer=None if returned.answer is None else _text(returned.answer, "answer"),
                others={str(name): _number(value, str(name)) for name, value in returned.others.items()},
                failure=_text(returned.failure, "failure"),
                kind=_text(returned.kind, "kind"),
            )
        if isinstance(returned, Mapping):
            if "score" not in returned:
                raise ValueError(f"returned a dict without 'score'; it has {', '.join(map(str, returned)) or 'nothing'}")
            values = {str(name): _scalar(value) for name, value in returned.items()}
            numbers = {name: _number(value, name) for name, value in values.items() if isinstance(value, Real)}
            return Grade(_number(values["score"], "score"), others={n: v for n, v in numbers.items() if n != "score"})
        return Grade(_number(returned, "value"))

    def failed(self, error: BaseException) -> Grade:
        limit = "; reward.function_memory_mb is the limit" if isinstance(error, MemoryError) else ""
        return Grade(failure=f"reward {self.code.label} failed: {self.code.blame(error)}{limit}", kind=type(error).__name__)


def is_reward(function: Any) -> bool:
    """By its parameters: verl's, or a trajectory by name or type, which no tool has. Also of a class, of which none is made."""
    try:
        parameters = inspect.signature(function.__call__ if inspect.isclass(function) else function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.name == "solution_str" or is_for(one, "trajectory") for one in parameters)


def _misfit(function: Any, signature: inspect.Signature, verls: Sequence[str] | None, arguments: Mapping[str, Any]) -> str:
    """Why a reward cannot be called; "" when it can. verls: those of verl's arguments that it takes; None: it has our form."""
    if verls is None or inspect.isclass(function):
        fault = misfit(function, "problem, trajectory", arguments, may_await=True)
        takes_any = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())
        return fault or ("" if takes_any or is_reward(function) else "none of its parameters is named trajectory")
    try:
        signature.bind(**dict.fromkeys(verls), **arguments)
    except TypeError as error:
        return str(error)
    return misfit_of_kind(function, may_await=True)


def _number(value: Any, name: str) -> float:
    value = _scalar(value)
    if not isinstance(value, Real):
        raise TypeError(
            f"returned a {name} of type {type(value).__name__}; a reward is a number, a dict with 'score', or a Grade"
        )
    if not math.isfinite(value):
        raise ValueError(f"returned the {name} {value}; a reward is finite")
    return float(value)


def _scalar(value: Any) -> Any:
    """The Python number of a scalar of numpy or torch; anything else as it is."""
    if isinstance(value, Real) or not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except Exception:  # of more than one element
        return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str | Real):
        raise TypeError(f"returned a {name} of type {type(value).__name__}; it is a text")
    return str.__str__(value) if isinstance(value, str) else str(value)


def verl_columns(problem: Problem) -> dict[str, Any]:
    """`data_source`, `ground_truth` and `extra_info` of verl's compute_score.

    A row without verl's columns gives its task, and its answer: the text when there is one, else the list.
    """
    model = problem.extra.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if truth is None:
        truth = problem.solutions[0] if len(problem.solutions) == 1 else problem.solutions
    info = problem.extra.get("extra_info")
    if isinstance(info, str):  # of a csv file, or a column of JSON
        with contextlib.suppress(ValueError):
            info = json.loads(info)
    return {
        "data_source": problem.extra.get("data_source", problem.task),
        "ground_truth": truth,
        "extra_info": dict(info) if isinstance(info, Mapping) else {},
    }
