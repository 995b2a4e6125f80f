"""Reward functions of the user: forms, terms, limits, failures. The functions run in real processes and a real event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rstar2_megatron.extension.user_code import FOLDERS, UserCode, UserCodeError
from rstar2_megatron.reward.own import OwnReward
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.settings.schema import RewardSettings
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory

FUNCTIONS = """
import asyncio, dataclasses, enum, functools, os, time
import numpy as np
from rstar2_megatron.reward.pool import Grade

def calls(problem, trajectory):
    assert problem.extra["level"] == 3 and trajectory.tool_calls[0].outcome == "ok"
    return len(trajectory.tool_calls) + trajectory.num_turns

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    right = ground_truth in solution_str and "6" in solution_str and "<|im_end|>" not in solution_str
    return {"score": right + bonus, "turns": extra_info["num_turns"], "source": data_source, "flag": True}

class Judge:
    async def __call__(self, problem, trajectory):
        await asyncio.sleep(0.01)
        return np.float32(0.25)

judge = Judge()
tries = []

async def flaky(problem, trajectory):
    tries.append(trajectory.rollout_index)
    if tries.count(trajectory.rollout_index) < 3:
        raise ConnectionError("the service is away")
    return Grade(1.0, "accepted", "42")

async def stubborn(problem, trajectory):
    while True:
        try: return await asyncio.sleep(60)
        except BaseException: await asyncio.sleep(0.05)
async def zero_at_the_limit(problem, trajectory):
    try: await asyncio.sleep(60)
    except BaseException: return 0.0
def scaled(problem, trajectory, factor): return factor
def chars(data_source, solution_str, ground_truth, extra_info): return len(solution_str)
async def slow_service(problem, trajectory): await asyncio.sleep(60)
async def blocking(problem, trajectory): time.sleep(60)
async def leaving(problem, trajectory): raise SystemExit(2)
async def forgotten(problem, trajectory):
    late = asyncio.create_task(asyncio.sleep(9))
    late.cancel()
    await late
class TimedOut(BaseException):
    def __str__(self): raise RuntimeError("no text")
async def timed_out(problem, trajectory): raise TimedOut
async def huge(problem, trajectory): return 10**400
async def pair(problem, trajectory): return np.array([0.5, 1.0])
async def failing(problem, trajectory): return float(problem.extra["no such column"])

def by_index(problem, trajectory):
    match trajectory.rollout_index:
        case 1: return {}["missing"]
        case 2: time.sleep(60)
        case 3: return bytearray(4 * 1024**3)
        case 4: os.kill(os.getpid(), 11)
        case 5: return float("nan")
        case 6: return "high"
        case 7: return {"reward": 1.0}
        case 8: raise SystemExit(2)
    return 0.5

def forking(problem, trajectory):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(3)

def starting(problem, trajectory):
    import pathlib, subprocess
    child = subprocess.Popen(["sleep", "777"])
    pathlib.Path(__file__).with_name("started").write_text(str(child.pid))
    child.wait()

class Why(str, enum.Enum):
    GOOD = "good"

def graded(problem, trajectory):
    return Grade(np.float32(0.5), Why.GOOD, 42, {"x": np.float32(0.25)})

def changing(problem, trajectory):
    problem.solutions.append("43")
    problem.prompt[-1]["content"] += "!"
    return {"score": len(problem.solutions) + len(problem.prompt[-1]["content"]), "sure": np.bool_(True)}

def by_kind(problem, trajectory):
    match trajectory.rollout_index:
        case 0: raise TimedOut
        case 1: return Grade(1.0, others={"x": lambda: 1})
        case 2: return Grade(1.0, others=None)
        case 3: return Grade(1.0, ["why"])
        case 4: return {"score": 1.0, "similarity": float("nan")}

async def shortening(problem, trajectory):
    trajectory.assistant_texts.pop()
    return len(trajectory.tool_calls.pop().arguments)

def no_arguments(): return 0.0
def exact(prediction: str, target: str): return float(prediction == target)
def swapped(trajectory, problem): return 0.0
def no_trajectory(problem, answer): return 0.0
def yields(problem, trajectory): yield 1.0

@dataclasses.dataclass
class Length:
    least: int = 3
    most: int = 9
    def __call__(self, problem, trajectory): return 1.0

@functools.wraps(failing)
def wraps_async(*arguments): return failing(*arguments)

three = 3
"""
PROBLEM = Problem("q", [{"role": "user", "content": "?"}], ["42"], extra={"level": 3})


def attempt(index: int = 0, answer: str = "42") -> Trajectory:
    return Trajectory(
        "q",
        index,
        assistant_texts=["<tool_call>...</tool_call><|im_end|>", f"<answer>\\boxed{{{answer}}}</answer><|im_end|>"],
        tool_calls=[ToolCall("python_code_with_standard_io", {"code": "print(6)", "input": ""}, ToolOutcome.OK, "6")],
        calls_per_turn=[1],
        finish_reason=FinishReason.ANSWERED,
    )


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., RewardSettings]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def settings(**values: Any) -> RewardSettings:
        return RewardSettings.model_validate({"num_workers": 2, **values}, context={FOLDERS: [tmp_path]})

    return settings


@pytest.fixture
def make(read: Callable[..., RewardSettings]) -> Iterator[Callable[..., Rewards]]:
    made: list[Rewards] = []

    def rewards(**values: Any) -> Rewards:
        made.append(Rewards(read(**values)))
        return made[-1]

    yield rewards
    for one in made:
        one.close()
    assert not [p for p in psutil.Process().children() if "reward.worker" in " ".join(p.cmdline())], "nothing is left"


async def graded(rewards: Rewards, *trajectories: Trajectory) -> list[Trajectory]:
    await rewards.grade([(PROBLEM, t) for t in trajectories])
    return list(trajectories)


async def test_a_function_sees_turns_calls_and_columns(make: Any) -> None:
    (t,) = await graded(make(function="mine.py:calls"), attempt())
    assert (t.reward, t.positive, t.grade_detail, t.reward_terms) == (3.0, True, "positive", {"calls": 3.0})


async def test_verls_compute_score_runs_unchanged(make: Any) -> None:
    rewards = make(function="mine.py:compute_score", arguments={"bonus": 0.5})
    right, wrong = await graded(rewards, attempt(), attempt(1, "41"))
    assert right.reward == 1.5 and right.reward_terms == {"compute_score": 1.5, "turns": 4.0, "flag": 1.0}
    assert wrong.reward == 0.5


async def test_verls_columns_are_what_verl_gives(tmp_path: Path) -> None:
    """A row in verl's form gives its own source, truth and info; another row gives its task and answers."""
    (tmp_path / "all.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...")
    function = OwnReward(UserCode.model_validate(f"{tmp_path}/all.py:compute_score"), {})
    seen: dict[str, Any] = {}
    function.function = lambda **given: seen.update(given)
    extra = {"data_source": "dapo", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"split": "train"}}
    function(Problem("q", PROBLEM.prompt, ["7"], extra=extra), attempt())
    assert (seen["data_source"], seen["ground_truth"]) == ("dapo", "7")
    of_verl = {"num_turns": 4, "rollout_reward_scores": {}}
    assert seen["extra_info"] == {"split": "train", **of_verl}
    function(Problem("q", PROBLEM.prompt, ["7", "8"], task="math"), attempt())
    assert (seen["data_source"], seen["ground_truth"], seen["extra_info"]) == ("math", ["7", "8"], of_verl)
    function(Problem("q", PROBLEM.prompt, ["7"], extra={"extra_info": '{"level": 3}'}), attempt())  # of a csv file
    assert seen["extra_info"] == {"level": 3, **of_verl}


async def test_terms_are_weighted_and_logged_by_name(make: Any) -> None:
    terms = [
        {"name": "correct", "function": "math"},
        {"name": "effort", "function": "mine.py:calls", "weight": -0.1},
        {"name": "style", "function": "mine.py:judge", "weight": 2.0},
    ]
    rewards = make(terms=terms, positive_above=0.5)
    right, wrong = await graded(rewards, attempt(), attempt(1, "41"))
    assert right.reward == pytest.approx(1.0 - 0.3 + 0.5) and wrong.reward == pytest.approx(0.2)
    assert (right.positive, wrong.positive) == (True, False)
    assert right.reward_terms == {"correct": 1.0, "effort": 3.0, "style": 0.25}
    assert (right.grade_detail, wrong.grade_detail, right.answer) == ("correct", "wrong", "42")


async def test_the_built_in_grader_sets_what_it_did(make: Any) -> None:
    right, wrong = await graded(make(), attempt(), attempt(1, "41"))
    assert [(t.reward, t.grade_detail, t.answer, t.reward_terms) for t in (right, wrong)] == [
        (1.0, "correct", "42", {}),
        (0.0, "wrong", "41", {}),
    ]


@pytest.mark.timeout(120)
async def test_each_failure_drops_its_trajectory_with_the_reason(make: Any, tmp_path: Path) -> None:
    """An exception, a hang, memory, a crash, NaN, wrong types: never a 0, and the others are graded."""
    rewards = make(function="mine.py:by_index", function_timeout_s=6.0, function_memory_mb=512)
    every = await graded(rewards, *(attempt(i) for i in range(10)))
    failed = {t.rollout_index: (t.user_error, t.error) for t in every if not t.usable}
    assert {t.rollout_index: t.reward for t in every if t.usable} == {0: 0.5, 9: 0.5}
    assert [failed[i][0] for i in range(1, 9)] == [
        "KeyError",
        "Timeout",
        "MemoryError",
        "Killed",
        "ValueError",
        "TypeError",
        "ValueError",
        "SystemExit",
    ]
    line = FUNCTIONS.splitlines().index('        case 1: return {}["missing"]') + 1
    assert failed[1][1] == f"reward mine.py:by_index failed: {tmp_path}/mine.py:{line}, in by_index: KeyError: 'missing'"
    assert "gave nothing within reward.function_timeout_s=6" in failed[2][1]
    assert failed[3][1].endswith("MemoryError; reward.function_memory_mb is the limit")
    assert "signal 11 ended its process" in failed[4][1]
    assert "returned the value nan; a reward is finite" in failed[5][1]
    assert "returned a value of type str" in failed[6][1]
    assert "without 'score'; it has reward" in failed[7][1]
    assert all(t.reward is None and t.finish_reason is FinishReason.INFRASTRUCTURE for t in every if not t.usable)


@pytest.mark.timeout(60)
async def test_a_process_that_forked_and_ended_is_not_waited_for(make: Any) -> None:
    """Its child holds the pipe open."""
    (t,) = await graded(make(function="mine.py:forking", function_timeout_s=900.0), attempt())
    assert t.user_error == "Killed" and "it ended" in t.error


async def test_what_a_function_started_ends_with_its_process(make: Any, tmp_path: Path) -> None:
    (t,) = await graded(make(function="mine.py:starting", function_timeout_s=3.0), attempt())
    assert t.user_error == "Timeout"
    started = int((tmp_path / "started").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        deadline = time.monotonic() + 30  # a killed process ends when it is scheduled
        while (status := psutil.Process(started).status()) != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)


async def test_what_a_function_returns_becomes_plain(make: Any) -> None:
    """Its own classes are unknown in the other processes; numbers of numpy are no JSON."""
    (t,) = await graded(make(function="mine.py:graded"), attempt())
    assert (t.reward, t.grade_detail, t.answer) == (0.5, "good", "42") and t.reward_terms == {"graded": 0.5, "x": 0.25}
    assert [type(v) for v in (t.reward, t.grade_detail, t.answer, t.reward_terms["x"])] == [float, str, str, float]


async def test_an_async_function_may_change_the_trajectory(make: Any) -> None:
    """It runs in the process whose trajectories are trained on."""
    (t,) = await graded(make(function="mine.py:shortening"), attempt())
    assert (t.reward, t.num_turns, len(t.tool_calls)) == (2.0, 2, 1)


async def test_a_function_may_change_the_problem(make: Any) -> None:
    terms = [{"name": name, "function": "mine.py:changing"} for name in ("one", "two")]
    for t in await graded(make(terms=terms), attempt(), attempt(1), attempt(2)):
        assert t.reward_terms == {"one": 4.0, "two": 4.0, "one/sure": 1.0, "two/sure": 1.0}
    assert PROBLEM.solutions == ["42"] and PROBLEM.prompt[-1]["content"] == "?"


async def test_whatever_a_function_raises_or_returns_drops_its_trajectory_alone(make: Any) -> None:
    every = await graded(make(function="mine.py:by_kind"), *(attempt(i) for i in range(5)))
    assert [t.user_error for t in every] == ["TimedOut", "TypeError", "AttributeError", "TypeError", "ValueError"]
    assert every[1].error.endswith("a reward is a number, a dict with 'score', or a Grade")
    assert "returned the similarity nan" in every[4].error
    for name, kind in (
        ("forgotten", "CancelledError"), ("timed_out", "TimedOut"), ("huge", "OverflowError"), ("pair", "TypeError"),
    ):  # fmt: skip
        async with asyncio.timeout(30):
            (t,) = await graded(make(function=f"mine.py:{name}", function_retries=0), attempt())
        assert (t.user_error, t.reward) == (kind, None) and "mine.py" in t.error


@pytest.mark.timeout(60)
async def test_an_async_function_that_catches_its_end_is_left_behind(make: Any) -> None:
    for name in ("stubborn", "zero_at_the_limit"):
        (t,) = await graded(make(function=f"mine.py:{name}", function_timeout_s=0.2, function_retries=1), attempt())
        assert (t.user_error, t.reward) == ("Timeout", None) and "reward.function_timeout_s=0.2, 2 times" in t.error


async def test_each_term_may_have_arguments_of_its_own(make: Any) -> None:
    function = {"reference": "mine.py:scaled", "arguments": {"factor": 3.0}}
    terms = [{"name": "three", "function": function}, {"name": "calls", "function": "mine.py:calls"}]
    (t,) = await graded(make(terms=terms), attempt())
    assert t.reward_terms == {"three": 3.0, "calls": 3.0}
    with pytest.raises(UserCodeError, match="missing a required argument: 'factor'"):
        make(function="mine.py:scaled")


async def test_verls_form_reads_what_was_decoded(make: Any) -> None:
    t = attempt()
    t.response_text = "x" * 7
    (t,) = await graded(make(function="mine.py:chars"), t)
    assert (t.reward, t.response_text) == (7.0, "")


async def test_async_functions_are_tried_again(make: Any) -> None:
    every = await graded(make(function="mine.py:flaky"), attempt(0), attempt(1))
    assert [(t.reward, t.grade_detail, t.answer) for t in every] == [(1.0, "accepted", "42")] * 2


async def test_an_async_function_that_fails_for_good_drops(make: Any) -> None:
    (t,) = await graded(make(function="mine.py:failing", function_retries=0), attempt())
    assert t.user_error == "KeyError" and "mine.py:" in t.error and t.reward is None
    rewards = make(function="mine.py:leaving", function_retries=0)
    for _ in range(2):
        (t,) = await graded(rewards, attempt())
        assert t.user_error == "SystemExit" and "mine.py:" in t.error and t.reward is None
    (t,) = await graded(make(function="mine.py:slow_service", function_retries=1, function_timeout_s=0.2), attempt())
    assert t.user_error == "Timeout" and "within reward.function_timeout_s=0.2, 2 times" in t.error


async def test_an_async_function_that_blocks_is_found(make: Any) -> None:
    async with asyncio.timeout(30):
        (t,) = await graded(make(function="mine.py:blocking", function_timeout_s=0.5), attempt())
    assert t.user_error == "Timeout" and "blocks its event loop" in t.error


def test_what_cannot_be_called_is_refused_before_a_run(read: Any) -> None:
    with pytest.raises(UserCodeError, match=r"mine.py:no_arguments\(\) cannot be called with \(problem, trajectory\), nor"):
        Rewards(read(function="mine.py:no_arguments"))
    with pytest.raises(UserCodeError, match=r"and reward.arguments=\{'bonsu': 1\}.*unexpected keyword argument 'bonsu'"):
        Rewards(read(function="mine.py:compute_score", arguments={"bonsu": 1}))
    for name, said in (
        ("exact", r"name them \(problem, trajectory\), in this order"),
        ("swapped", r"name them \(problem, trajectory\), in this order"),
        ("no_trajectory", r"none of its parameters is named trajectory"),
        ("yields", r"is a generator; return the result"),
        ("Length", r"is a class; make an instance, `name = Length\(...\)`, and name that"),
        ("wraps_async", r"wraps an async function and is none itself; write the wrapper as `async def`"),
    ):
        with pytest.raises(UserCodeError, match=rf"mine.py:{name}\(.*: .*{said}"):
            Rewards(read(function=f"mine.py:{name}"))
    with pytest.raises(UserCodeError, match=r"mine.py:three is a int, not a function"):
        Rewards(read(function="mine.py:three"))
    with pytest.raises(ValueError, match="function and terms are both set"):
        read(function="mine.py:calls", terms=[{"name": "a", "function": "math"}])
    with pytest.raises(ValueError, match="terms has the name 'a' twice"):
        read(terms=[{"name": "a", "function": "math"}, {"name": "a", "function": "mine.py:calls"}])


def test_a_positive_is_what_the_threshold_says() -> None:
    t = attempt()
    assert not t.is_positive
    t.reward = 0.4
    assert t.is_positive  # no threshold was applied
    t.positive = False
    assert not t.is_positive
    assert not np.any(t.loss_mask)
