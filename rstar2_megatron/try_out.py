"""Tries a tool, a reward, an environment or a loop of yours without a model: calls with their times, and their failures.

    python -m rstar2_megatron.try_out my_tools.py:search --args '{"query": "x"}'
    python -m rstar2_megatron.try_out my_reward.py:score --args '{"response": "It is \\\\boxed{4}.", "solutions": ["4"]}'
    python -m rstar2_megatron.try_out my_game.py:Game --args '{"response": "I say 3", "solutions": ["4"]}'

Further `--args` are further calls, of a tool in the same trajectory; of an environment or loop they are the model's next turns.
Exit code 1: a call failed by the code's fault; 2: it is none of these.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from pydantic import ValidationError

from rstar2_megatron.extension.positional import is_for
from rstar2_megatron.extension.user_code import FOLDERS, UserCode, UserCodeError
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.trajectory_row import trajectory_of
from rstar2_megatron.reward.own import is_reward
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.rollout.dialogue import Dialogue
from rstar2_megatron.rollout.own_tool import OwnTool
from rstar2_megatron.rollout.stats import RolloutStats
from rstar2_megatron.rollout.tool import Judge
from rstar2_megatron.rollout.tool_call import CallStatus, ParsedCall, check_call
from rstar2_megatron.rollout.tool_runner import ToolRunner
from rstar2_megatron.rollout.turn_loops import TurnLoops
from rstar2_megatron.settings.load import users_path
from rstar2_megatron.settings.schema import AgentLoopSettings, OwnToolSettings, RewardSettings
from rstar2_megatron.tools import required_parameters
from rstar2_megatron.trajectory import FinishReason, HeldTokens, Problem, ToolCall, ToolOutcome, Trajectory

_DEADLINE_S = 3600.0
_LATE_S = 0.2  # for which an async tool may hold up the loop
_WRONG: dict[str, Any] = {"string": 1, "integer": "x", "number": "x", "boolean": "x", "array": "x", "object": "x"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rstar2_megatron.try_out", description=__doc__.partition("\n")[0])
    parser.add_argument("code", help="path/to/file.py:name or package.module:name")
    parser.add_argument("--args", type=_object, action="append", default=[], metavar="JSON", help="arguments of a call")
    parser.add_argument(
        "--settings",
        type=_object,
        default={},
        metavar="JSON",
        help="a tool's `settings`, `reward.arguments`, `agentloop.environment_settings`, a loop's `arguments`",
    )
    parser.add_argument("--extra", type=_object, default={}, metavar="JSON", help="own columns of the problem")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--trajectories", type=Path, metavar="FILE", help="a run's trajectories.jsonl, for a reward to score")
    words = parser.parse_args(argv)
    read_as = ""
    try:
        code = UserCode.model_validate(words.code, context={FOLDERS: [users_path(".").resolve()]})
        kind = "reward" if is_reward(code.load()) else _loop_kind(code.load())
        if kind:
            _check_keys(words.args)
        if kind == "reward":
            limits = {"arguments": words.settings, "function_timeout_s": words.timeout_s}
            with Rewards(RewardSettings(function=code, **limits)) as rewards:
                if words.trajectories is not None:
                    return asyncio.run(_score(rewards, words.trajectories, words.extra))
                return asyncio.run(_try_reward(rewards, code, words.args, words.extra))
        if words.trajectories is not None:
            raise ValueError(f"--trajectories are for a reward to score, and {words.code} is none")
        if kind:
            limits = {"environment_timeout_s": words.timeout_s}
            if kind == "loop":
                code.arguments = words.settings
            else:
                limits |= {"environment_settings": words.settings}
            loops = TurnLoops(AgentLoopSettings.model_validate({kind: code, **limits}))
            return asyncio.run(_try_turns(loops, words.args, words.extra))
        read_as = (
            " (read as a tool: a reward has the parameters problem and trajectory, or verl's; losses, advantages, rules and "
            "rows are tried before a run starts)"
        )
        settings = OwnToolSettings(use=code, settings=words.settings, timeout_s=words.timeout_s)
        tool = OwnTool(settings, AgentLoopSettings())
    except ValueError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else error
        print(f"error: {said}{read_as}", file=sys.stderr)
        return 2
    print(json.dumps(tool.schema, indent=2, ensure_ascii=False))
    return asyncio.run(_try(tool, words.args, Problem("try_out", [{"role": "user", "content": ""}], [], extra=words.extra)))


def _loop_kind(code: Any) -> str:
    """environment, loop, or "". Also of what is none yet, so that the refusal says what is missing."""
    if hasattr(code, "reset") and hasattr(code, "step"):
        return "environment"
    if inspect.isclass(code) or not callable(code):
        return ""
    parameters = list(inspect.signature(code).parameters.values())
    untyped = [one.annotation for one in parameters[1:]] == [inspect.Parameter.empty]  # a tool's parameters have types
    is_loop = inspect.iscoroutinefunction(code) and [one.name for one in parameters[:1]] == ["problem"] and untyped
    return "loop" if is_loop or any(is_for(one, "dialogue") for one in parameters) else ""


class _Turns:
    """Turns that are given, in place of a model's (`rollout.dialogue.EngineSide`)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.trajectory = Trajectory("try_out", 0)
        self.template: Any = SimpleNamespace(schemas=[], user_turn_ids=self._answer)
        self.budget, self.max_turns, self.one_turn = sys.maxsize, len(texts), None
        self._texts = texts
        self._asked = time.perf_counter()

    async def assistant_turn(self) -> str:
        text = self._texts[self.trajectory.num_turns]
        print(f"\nturn {json.dumps(text, ensure_ascii=False)}")
        self.trajectory.assistant_texts.append(text)
        self._asked = time.perf_counter()
        return "stop"

    def _answer(self, text: str) -> list[int]:
        print(f"  in {1000 * (time.perf_counter() - self._asked):.1f} ms: {text}")
        return [0]

    def check_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        return ParsedCall(CallStatus.VALID, name, arguments)

    async def run_tools(self, calls: list[ParsedCall]) -> NoReturn:
        raise UserCodeError("try_out runs no tools for a loop; try them by themselves")

    def degenerate_ending(self, calls: list[ParsedCall]) -> None: ...

    def report_progress(self, more: int) -> None: ...

    def seconds_left(self) -> float:
        return _DEADLINE_S


def _check_keys(calls: Sequence[dict[str, Any]]) -> None:
    """Of `--args` for a reward or a conversation. Raises ValueError."""
    if unknown := [key for given in calls for key in given if key not in ("response", "solutions")]:
        raise ValueError(
            f"--args takes response and solutions here, not {unknown[0]!r}; columns of the problem go into --extra, "
            "arguments of the code into --settings"
        )


def _solutions(given: dict[str, Any]) -> list[str]:
    """Of `--args`; a text or a number is the only one."""
    value = given.get("solutions", [])
    return [str(one) for one in (value if isinstance(value, list) else [value])]


async def _try_turns(loops: TurnLoops, calls: Sequence[dict[str, Any]], extra: dict[str, Any]) -> int:
    solutions = next((_solutions(given) for given in calls if "solutions" in given), [])
    problem = Problem("try_out", [{"role": "user", "content": "(the problem)"}], solutions, extra=extra)
    try:
        turns = _Turns([str(given.get("response", "")) for given in calls])
        deadline = time.monotonic() + _DEADLINE_S
        async with loops.begin(problem, deadline, turns.trajectory.note_failed_close) as turn_loop:
            print(turn_loop.problem.prompt[-1]["content"])
            dialogue = Dialogue(turns, turn_loop.label)
            reward = await turn_loop.run(dialogue)
    except UserCodeError as error:
        print(f"\nthe trajectory is dropped:\n    {error}")
        return 1
    over = dialogue.ending is FinishReason.ANSWERED
    print(f"\n{'over' if over else 'not over: give the next turn by --args'}; reward {reward}")
    if reward is None:
        print("    With reward.function=environment the trajectory is dropped: the loop set no reward.")
    if turns.trajectory.error:
        print(f"    {turns.trajectory.error}")
    return int(bool(turns.trajectory.error))


async def _try_reward(rewards: Rewards, code: UserCode, calls: Sequence[dict[str, Any]], extra: dict[str, Any]) -> int:
    failed = False
    for given in calls or [{"response": "The answer is \\boxed{4}.", "solutions": ["4"]}]:
        problem = Problem("try_out", [{"role": "user", "content": ""}], _solutions(given), extra=extra)
        text = str(given.get("response", ""))
        trajectory = Trajectory("try_out", 0, assistant_texts=[text], finish_reason=FinishReason.ANSWERED)
        tokens = len(text) // 4 + 1  # about as many as a tokenizer makes; in a run too they stay with the rollout worker
        trajectory.held = HeldTokens(0, 0, 1, tokens, [(0, tokens)], 0.0)
        begun = time.perf_counter()
        await rewards.grade([(problem, trajectory)])
        took_ms = 1000 * (time.perf_counter() - begun)
        said = f"the trajectory is dropped:\n    {trajectory.error}"
        if not trajectory.error:
            others = {name: value for name, value in trajectory.reward_terms.items() if name != code.name}
            said = f"reward {trajectory.reward:g} {others or ''}"
        print(f"\n{code.label} {json.dumps(given, ensure_ascii=False)}\n  in {took_ms:.1f} ms: {said}")
        failed |= bool(trajectory.error)
    return int(failed)


async def _score(rewards: Rewards, path: Path, extra: dict[str, Any]) -> int:
    """A line for each trajectory of the file, and the means."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a run's is RUN/trajectories.jsonl")
    rows = [row for _, row in JsonlFile(path).numbered_rows() if row and row.get("finish_reason") not in (None, "cut")]
    if not rows:
        raise ValueError(f"{path} has no ended trajectory")
    try:
        items = [(replace(problem, extra=extra), trajectory) for problem, trajectory in map(trajectory_of, rows)]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: a row is no trajectory of a run ({type(error).__name__}: {error})") from None
    await rewards.grade(items)
    for row, (_, t) in zip(rows, items, strict=True):
        print(f"{t.query_id}#{t.rollout_index}: was {row['reward']}, {t.error or f'now {t.reward:g}'}")
    scored = [t.reward for _, t in items if t.reward is not None]
    before = [row["reward"] for row in rows if row["reward"] is not None]
    means = (f"{sum(values) / len(values):.4g}" if values else "none" for values in (before, scored))
    print("{} trajectories: mean reward was {}, now {}; {} failed".format(len(rows), *means, len(rows) - len(scored)))
    return int(len(scored) < len(rows))


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text).items())
    except (ValueError, AttributeError):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object") from None


async def _try(tool: OwnTool, calls: Sequence[dict[str, Any]], problem: Problem) -> int:
    runner = ToolRunner(cast(Judge, None), AgentLoopSettings(), [tool])  # an own tool asks no judge
    trajectory = Trajectory(problem.query_id, 0)

    async def call(arguments: dict[str, Any]) -> tuple[ToolCall, float]:
        late = asyncio.create_task(_longest_wait())
        await asyncio.sleep(0)
        parsed = check_call(tool.name, arguments, [tool.schema])
        (done,), _ = await runner.run(problem, trajectory, [parsed], lambda: _DEADLINE_S, RolloutStats())
        trajectory.tool_calls.append(done)
        late.cancel()
        return done, await late

    failed = False
    for arguments in calls:
        done, late = await call(arguments)
        failed |= done.outcome in (ToolOutcome.INFRASTRUCTURE, ToolOutcome.TIMEOUT)
        _show(f"{tool.name} {json.dumps(arguments, ensure_ascii=False)}", done)
        if late > _LATE_S and tool.is_async:
            print(
                f"  It held up every other trajectory for {late:.1f} s: await what takes long, or write `def`, not `async def`."
            )
    print("\nWhat a model reads when it calls the tool wrongly:")
    properties = tool.schema["function"]["parameters"]["properties"]
    for name in required_parameters(tool.schema):
        given: dict[str, Any] = {**(calls[-1] if calls else {})}
        given.pop(name, None)
        wrong = _WRONG.get(str(properties[name].get("type")))
        for mistake in (given, {**given, name: wrong}):
            refusal = check_call(tool.name, mistake, [tool.schema]).message
            if refusal:
                print(f"  {json.dumps(mistake, ensure_ascii=False)}: {refusal}")
    await runner.close(trajectory)
    return int(failed)


async def _longest_wait() -> float:
    """How long the loop was held up at most, until it is cancelled."""
    longest = 0.0
    try:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - begun - 0.01)
    except asyncio.CancelledError:
        return max(longest, time.perf_counter() - begun - 0.01)


def _show(title: str, done: ToolCall) -> None:
    print(f"\n{title}\n  {done.outcome} in {1000 * done.seconds:.1f} ms", end="")
    if done.outcome is ToolOutcome.INFRASTRUCTURE:
        print(f"; the trajectory is dropped:\n    {done.response_text}")
        return
    print(f", {len(done.response_text)} characters:")
    for line in done.response_text.splitlines() or [""]:
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
