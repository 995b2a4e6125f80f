"""How a trajectory's turns are composed: by tool calls, by an environment of the user, or by a loop of the user."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.rollout.dialogue import Dialogue
from rstar2_megatron.rollout.user_call import TookTooLong, call_user
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.trajectory import Problem


class Conversation:
    """One trajectory's: turns and tool calls, until a turn without a call."""

    label = ""  # of the user's code

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    async def opening(self) -> Problem:
        """The problem as the prompt states it."""
        return self.problem

    async def run(self, dialogue: Dialogue) -> None:
        """Return when the conversation is over. Raises UserCodeError."""
        while True:
            await dialogue.generate()
            if not await dialogue.call_tools():
                return dialogue.finish()


class EnvironmentConversation(Conversation):
    """An environment answers each turn that calls no tool."""

    def __init__(self, problem: Problem, user: _UsersCode, settings: dict[str, Any]) -> None:
        super().__init__(problem)
        self._user = user
        self._settings = settings
        self._environment: Any = None
        self.label = user.code.label

    async def opening(self) -> Problem:
        """The problem, whose last user message ends with what `reset` returned."""
        self._environment = await self._user.call(self._user.target, **self._settings)
        observation = await self._user.call(self._environment.reset, self.problem)
        if isinstance(observation, tuple):  # Gymnasium's (observation, info)
            observation = observation[0]
        if observation in (None, ""):
            return self.problem
        prompt = [dict(message) for message in self.problem.prompt]
        last = max(i for i, message in enumerate(prompt) if message["role"] == "user")
        prompt[last]["content"] += f"\n\n{self._user.text(observation, 'reset')}"
        return replace(self.problem, prompt=prompt)

    async def run(self, dialogue: Dialogue) -> None:
        dialogue.reward = 0.0
        while True:
            text = await dialogue.generate()
            if await dialogue.call_tools():
                continue
            observation, reward, done = _step(await self._user.call(self._environment.step, text), self._user)
            dialogue.reward += reward
            if done:
                return dialogue.finish()
            dialogue.append(self._user.text(observation, "step"))


class OwnConversation(Conversation):
    """A loop of the user composes the turns."""

    def __init__(self, problem: Problem, user: _UsersCode) -> None:
        super().__init__(problem)
        self._user = user
        self.label = user.code.label

    async def run(self, dialogue: Dialogue) -> None:
        try:
            reward = await self._user.target(self.problem, dialogue)
        except Exception as error:
            raise self._user.failed(error) from error
        dialogue.finish(None if reward is None else self._user.number(reward, "the loop"))


class Conversations:
    """Makes a trajectory's conversation, by `agentloop.environment` or `agentloop.loop`. Raises UserCodeError."""

    def __init__(self, settings: AgentLoopSettings) -> None:
        self._settings = settings
        self._environment = _UsersCode.environment(settings) if settings.environment is not None else None
        self._loop = _UsersCode.loop(settings) if settings.loop is not None else None

    def begin(self, problem: Problem, deadline: float) -> Conversation:
        """deadline: of the trajectory, by `time.monotonic`."""
        if self._environment is not None:
            return EnvironmentConversation(problem, self._environment.until(deadline), self._settings.environment_settings)
        if self._loop is not None:
            return OwnConversation(problem, self._loop.until(deadline))
        return Conversation(problem)


class _UsersCode:
    """Code of the user with its limits, and how its failures are told."""

    def __init__(self, code: UserCode, target: Any, timeout_s: float, deadline: float = float("inf")) -> None:
        self.code = code
        self.target = target
        self._timeout_s = timeout_s
        self._deadline = deadline

    @classmethod
    def environment(cls, settings: AgentLoopSettings) -> _UsersCode:
        code = settings.environment
        assert code is not None
        target: Any = code.load()
        missing = [name for name in ("reset", "step") if not callable(getattr(target, name, None))]
        if not inspect.isclass(target) or missing:
            kind = f"class without {' and '.join(missing)}" if inspect.isclass(target) else type(target).__name__
            raise UserCodeError(f"{code.label} is a {kind}; an environment is a class with reset(problem) and step(text)")
        made: Any = target
        _check_call(code, target, (), settings.environment_settings, "agentloop.environment_settings")
        _check_call(code, made.reset, (None, None), {}, "reset(problem)")
        _check_call(code, made.step, (None, ""), {}, "step(text)")
        return cls(code, target, settings.environment_timeout_s)

    @classmethod
    def loop(cls, settings: AgentLoopSettings) -> _UsersCode:
        code = settings.loop
        assert code is not None
        target = code.load()
        if not inspect.iscoroutinefunction(target):
            raise UserCodeError(f"{code.label} is no async function; a loop is `async def loop(problem, dialogue)`")
        _check_call(code, target, (None, None), {}, "(problem, dialogue)")
        return cls(code, target, settings.environment_timeout_s)

    def until(self, deadline: float) -> _UsersCode:
        return _UsersCode(self.code, self.target, self._timeout_s, deadline)

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Within agentloop.environment_timeout_s and the trajectory's deadline. Raises UserCodeError."""
        limit_s = min(self._timeout_s, self._deadline - time.monotonic())
        try:
            return await call_user(function, arguments, named, limit_s, self.failed)
        except TookTooLong as error:
            name = getattr(function, "__name__", "it")
            raise UserCodeError(
                f"{self.code.label}: {name} took longer than agentloop.environment_timeout_s={self._timeout_s:g}, or than the "
                "rest of rollout.trajectory_timeout_s"
            ) from error

    def failed(self, error: BaseException) -> UserCodeError:
        if isinstance(error, UserCodeError):  # the dialogue's word about how it was used
            return error
        return UserCodeError(f"{self.code.label} failed: {self.code.blame(error)}")

    def text(self, value: Any, method: str) -> str:
        if not isinstance(value, str):
            kind = type(value).__name__
            raise UserCodeError(f"{self.code.label}: {method} returned an observation of type {kind}, not a text")
        return value

    def number(self, value: Any, method: str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if number - number != 0:  # also of infinity
            raise UserCodeError(f"{self.code.label}: {method} gave the reward {value!r}, which is no finite number")
        return number


def _step(returned: Any, user: _UsersCode) -> tuple[Any, float, bool]:
    """(observation, reward, done) of what `step` returned: with an info dict, or Gymnasium's five values."""
    if not isinstance(returned, tuple) or len(returned) not in (3, 4, 5):
        raise UserCodeError(
            f"{user.code.label}: step returned {type(returned).__name__}; it returns (observation, reward, done), "
            "(observation, reward, done, info), or Gymnasium's (observation, reward, terminated, truncated, info)"
        )
    done = bool(returned[2]) or (len(returned) == 5 and bool(returned[3]))
    return returned[0], user.number(returned[1], "step"), done


def _check_call(code: UserCode, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], what: str) -> None:
    try:
        inspect.signature(function).bind(*arguments, **named)
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"{code.label} cannot be called with {what}: {error}") from None
