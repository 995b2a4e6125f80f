"""How a trajectory's turns are composed: by tool calls, by an environment of the user, or by a loop of the user."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import math
import reprlib
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rstar2_megatron.extension.positional import misfit, misfit_of_kind
from rstar2_megatron.extension.user_code import UserCode, UserCodeError, is_cancelled
from rstar2_megatron.rollout.dialogue import Dialogue, Left
from rstar2_megatron.rollout.user_call import TookTooLong, UserThread, call_user
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.trajectory import FinishReason, Problem

_GRACE_S = 1.0  # behind the trajectory's deadline, at which engine and tools end themselves


@dataclass(frozen=True)
class TurnLoop:
    """How the turns of one trajectory are composed."""

    problem: Problem  # as the prompt states it
    compose: Callable[[Dialogue], Awaitable[None]]
    """Returns, or leaves the dialogue, when the conversation is over. Raises UserCodeError."""
    label: str = ""  # of the user's code
    opening: str = ""  # what the environment added to the prompt

    async def run(self, dialogue: Dialogue) -> float | None:
        """Compose until the end, or until a step of a search is over. Returns the reward, of code of the user's alone.

        Raises UserCodeError, and what ended the dialogue from below.
        """
        try:
            await self.compose(dialogue)
            dialogue.finish()
        except Left:
            if dialogue.failure is not None:
                raise dialogue.failure from None
        finally:
            dialogue.close()
        if dialogue.ending is FinishReason.ANSWERED and not dialogue.num_turns:
            raise UserCodeError(f"{self.label}: the loop ended without a turn; it awaits dialogue.generate()")
        if dialogue.reward is not None:
            return _finite(dialogue.reward, f"{self.label}: the loop")
        cut = dialogue.ending not in (None, FinishReason.ANSWERED)
        return 0.0 if cut and self.label else None  # a limit ended the loop before it had earned anything


class TurnLoops:
    """Begins a trajectory's conversation, by `agentloop.environment` or `agentloop.loop`. Raises UserCodeError."""

    def __init__(self, settings: AgentLoopSettings) -> None:
        self._settings = settings
        self._code = settings.environment or settings.loop
        self._target: Any = self._code.load() if self._code is not None else None
        if settings.environment is not None:
            _check_environment(settings.environment, self._target, settings.environment_settings)
        elif settings.loop is not None:
            _check_loop(settings.loop, self._target)

    @contextlib.asynccontextmanager
    async def begin(
        self, problem: Problem, deadline: float, note_failed_close: Callable[[str, str], None] = lambda error, kind: None
    ) -> AsyncIterator[TurnLoop]:
        """deadline: of the trajectory, by `time.monotonic`. Behind it the environment is closed."""
        if self._code is None:
            yield TurnLoop(problem, _built_in)
            return
        problem = copy.deepcopy(problem)  # the user's code may change it, and other trajectories have the same
        user = _UsersCode(self._code, self._settings.environment_timeout_s, deadline)
        if self._settings.environment is None:
            yield TurnLoop(problem, functools.partial(_own_loop, user, self._target, problem), user.label)
            return
        environment = await user.call(self._target, **self._settings.environment_settings)
        try:
            observation = await user.call(environment.reset, problem)
            if isinstance(observation, tuple) and len(observation) == 2:  # Gymnasium's (observation, info)
                observation = observation[0]
            words = "" if observation is None else user.text(observation, "reset")
            if words:
                prompt = [dict(message) for message in problem.prompt]
                last = max(i for i, message in enumerate(prompt) if message["role"] == "user")
                prompt[last]["content"] += f"\n\n{words}"
                problem = replace(problem, prompt=prompt)
            yield TurnLoop(problem, functools.partial(_play, user, environment.step), user.label, words)
        finally:
            if callable(closing := getattr(environment, "close", None)):
                try:
                    await replace(user, deadline=math.inf).call(closing)
                except UserCodeError as error:
                    note_failed_close(str(error), error.kind)


async def _built_in(dialogue: Dialogue) -> None:
    """The built-in loop: turns and tool calls, until a turn without a call."""
    await dialogue.generate()
    while await dialogue.call_tools():
        await dialogue.generate()


async def _play(user: _UsersCode, step: Callable[[str], Any], dialogue: Dialogue) -> None:
    """An environment answers each turn that calls no tool."""
    dialogue.reward = 0.0
    while True:
        await _built_in(dialogue)
        observation, reward, done = _step(await user.call(step, dialogue.text), user)
        dialogue.reward += reward
        if done:
            return
        dialogue.append(user.text(observation, "step"))


async def _own_loop(
    user: _UsersCode, loop: Callable[..., Coroutine[Any, Any, Any]], problem: Problem, dialogue: Dialogue
) -> None:
    limit = asyncio.timeout(user.deadline + _GRACE_S - time.monotonic())
    last = asyncio.timeout(user.deadline + 2 * _GRACE_S - time.monotonic())  # for what it has to close
    try:
        async with limit, last:
            reward = await _until_ignored(loop(problem, dialogue, **user.code.arguments), dialogue, last)
        if limit.expired():  # it caught the deadline
            raise TimeoutError from asyncio.CancelledError()
    except BaseException as error:
        if isinstance(error, BaseExceptionGroup) and error.subgroup(Left):  # of an asyncio.TaskGroup
            raise Left from error
        if isinstance(error, Left) or is_cancelled():
            raise
        if dialogue.failure is not None:  # the first cause
            raise Left from error
        if limit.expired() and error.__cause__ is not None:
            place = user.code.blame(error.__cause__)
            raise UserCodeError(f"{user.label} did not end within rollout.trajectory_timeout_s: {place}") from error
        raise user.failed(error) from error
    if reward is not None and dialogue.ending is None:  # at a limit what it had earned before counts, whatever it catches
        dialogue.reward = reward


@types.coroutine
def _until_ignored(running: Coroutine[Any, Any, Any], dialogue: Dialogue, limit: asyncio.Timeout) -> Generator[Any, Any, Any]:
    """What the loop returns. Where it goes on behind the dialogue's end or behind `limit`, its code is not run on.

    Raises Left at the first, and what ended its wait at the second.
    """
    value, error = None, None
    while True:
        try:
            awaited = running.send(value) if error is None else running.throw(error)
        except StopIteration as end:
            return end.value
        if dialogue.ignored or limit.expired():
            with contextlib.suppress(BaseException):  # it may ignore this too
                running.close()
            raise Left if dialogue.ignored else error or asyncio.CancelledError
        value, error = None, None
        try:
            value = yield awaited
        except BaseException as thrown:
            error = thrown


@dataclass(frozen=True)
class _UsersCode:
    """Code of the user with its limits, and how its failures are told."""

    code: UserCode
    timeout_s: float
    deadline: float
    thread: UserThread = field(default_factory=UserThread)

    @property
    def label(self) -> str:
        return self.code.label

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Within agentloop.environment_timeout_s and the trajectory's deadline. Raises UserCodeError."""
        limit_s = min(self.timeout_s, self.deadline - time.monotonic())
        try:
            return await call_user(function, arguments, named, limit_s, self.failed, thread=self.thread)
        except TookTooLong as error:
            name = getattr(function, "__name__", "it")
            raise UserCodeError(
                f"{self.label}: {name} took longer than agentloop.environment_timeout_s={self.timeout_s:g}, or than the "
                "rest of rollout.trajectory_timeout_s"
            ) from error

    def failed(self, error: BaseException) -> UserCodeError:
        if isinstance(error, UserCodeError):  # the dialogue's word about how it was used
            return error
        return UserCodeError(f"{self.label} failed: {self.code.blame(error)}")

    def text(self, value: Any, method: str) -> str:
        if not isinstance(value, str):
            kind = type(value).__name__
            raise UserCodeError(f"{self.label}: {method} returned an observation of type {kind}, not a text")
        return str.__str__(value)  # without a class of the user's, which other processes do not know

    def flag(self, value: Any, name: str) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise UserCodeError(f"{self.label}: step returned {name}={reprlib.repr(value)}; it is True or False")
        return bool(value)


def _step(returned: Any, user: _UsersCode) -> tuple[Any, float, bool]:
    """(observation, reward, done) of what `step` returned: with an info dict, or Gymnasium's five values."""
    if not isinstance(returned, tuple) or len(returned) not in (3, 4, 5):
        raise UserCodeError(
            f"{user.label}: step returned {type(returned).__name__}; it returns (observation, reward, done), "
            "(observation, reward, done, info), or Gymnasium's (observation, reward, terminated, truncated, info)"
        )
    observation, reward, done = returned[0], _finite(returned[1], f"{user.label}: step"), user.flag(returned[2], "done")
    if len(returned) == 5:
        done |= user.flag(returned[3], "truncated")
    elif len(returned) == 4 and not isinstance(returned[3], dict | None):
        raise UserCodeError(f"{user.label}: step returned info={reprlib.repr(returned[3])}; it is a dict, or left out")
    return observation, reward, done


def _finite(value: Any, where: str) -> float:
    """Raises UserCodeError, which begins with `where`, for what is no finite number."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # of a type of numpy or torch, or an integer beyond all floats
        number = math.nan
    if not math.isfinite(number):
        raise UserCodeError(f"{where} gave the reward {reprlib.repr(value)}, which is no finite number")
    return number


def _check_environment(code: UserCode, target: Any, settings: dict[str, Any]) -> None:
    missing = [name for name in ("reset", "step") if not callable(getattr(target, name, None))]
    if not inspect.isclass(target) or missing:
        kind = f"class without {' and '.join(missing)}" if inspect.isclass(target) else type(target).__name__
        raise UserCodeError(f"{code.label} is a {kind}; an environment is a class with reset(problem) and step(text)")
    if abstract := sorted(getattr(target, "__abstractmethods__", ())):
        raise UserCodeError(f"{code.label} is an abstract class; write its {', '.join(abstract)}")
    if code.arguments:
        raise UserCodeError(f"{code.label}: arguments of an environment are agentloop.environment_settings")
    made: Any = target
    _check_call(code, target, (), settings, "agentloop.environment_settings")
    _check_call(code, made.reset, (None, None), {}, "reset(problem)")
    if "seed" in list(inspect.signature(made.reset).parameters)[:2]:  # as Gymnasium's, which gets no problem
        raise UserCodeError(f"{code.label}: reset gets the problem in place of a seed; write reset(self, problem)")
    _check_call(code, made.step, (None, ""), {}, "step(text)")
    if callable(getattr(made, "close", None)):
        _check_call(code, made.close, (None,), {}, "close()")


def _check_loop(code: UserCode, target: Any) -> None:
    if not inspect.iscoroutinefunction(target):
        raise UserCodeError(f"{code.label} is no async function; a loop is `async def loop(problem, dialogue)`")
    if fault := misfit(target, "problem, dialogue", code.arguments, may_await=True):
        raise UserCodeError(f"{code.label} cannot be called with (problem, dialogue): {fault}")


def _check_call(code: UserCode, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], what: str) -> None:
    if fault := misfit_of_kind(function, may_await=True):
        raise UserCodeError(f"{code.label} cannot be called with {what}: {fault}")
    try:
        inspect.signature(function).bind(*arguments, **named)
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"{code.label} cannot be called with {what}: {error}") from None
