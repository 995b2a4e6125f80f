"""The released reward: cue words, percentages, tool output, and whatever math-verify finds in the whole response."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rstar2_megatron.reward.math_grader import grade_answer
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.reward.released_grader import grade_released, released_answer
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.settings.schema import RewardSettings
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory
from tests.reward.held_out_pairs import HELD_OUT_PAIRS
from tests.reward.input_pairs import INPUT_PAIRS
from tests.reward.pairs import flat


@pytest.fixture(scope="module")
def released() -> Iterator[GraderPool]:
    with GraderPool(1, 20.0, mode="released") as pool:
        yield pool


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>\\boxed{42}</answer>", "42"),
        ("so \\boxed{1} and then \\boxed{2}", "2"),
        ("The ANSWER IS 17", "17"),
        ("Answer: x = 5", "5"),
        ("42 is the answer", "42"),
        ("we get 12. This is nice", "12"),
        ("The answer is 3, hence \\boxed{4}", "4"),
        ("\\boxed{7} is the answer", "7"),
        ("\\boxed{x=9}", "9"),
        ("no number here", "no number here"),
        ("\\boxed{\\text{East}}", "\\text{East}"),  # a word, without a digit
        ("12", "12"),  # no cue led to it
    ],
)
def test_what_is_taken_for_the_answer(response: str, answer: str) -> None:
    assert released_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "solution", "correct"),
    [
        ("\\boxed{\\frac{2}{4}} without any answer tag", "\\frac12", True),
        ("it follows that $x = \\sqrt{8}$", "2\\sqrt{2}", True),  # math-verify's own search
        ("\\boxed{\\text{East}}", "East", True),  # a word counts for the first grader
        ("\\boxed{\\text{West}}", "East", False),
        ("maybe \\boxed{41}", "42", False),
        ("nothing to see", "42", False),
        # numbers agree within 1e-4, also as percentages
        ("\\boxed{300}", "3", True),
        ("\\boxed{0.03}", "3", True),
        ("\\boxed{30}", "3", False),
        ("\\boxed{33.334}", "33.3333", True),
        ("\\boxed{33.4}", "33.3333", False),
        ("\\boxed{1,000}", "1000", True),
        ("\\boxed{3.14}", "\\pi", True),
        ("\\boxed{6.2832}", "2\\pi", True),
        ("\\boxed{3.2}", "\\pi", False),
        # ours once; not theirs
        ("\\boxed{11_{10}}", "1011_2", False),
        ("\\boxed{\\varnothing}", "\\emptyset", True),
    ],
)
def test_either_grader_counts(response: str, solution: str, correct: bool) -> None:
    assert (grade_released(response, [solution]) == "correct") is correct


@pytest.mark.parametrize(
    ("answer", "solution"),
    [
        ("23 \\Rightarrow 24", "24"),
        ("n \\equiv 24 \\pmod{35}", "24"),
        ("2\\frac{3}{2}", "\\frac{7}{2}"),
        ("2(3)", "5"),
        ("7t", "7"),
        ("2N", "2n"),
        ("24\\text{ dozen}", "24"),
        ("10^{-29}", "10^{-30}"),
        ("30'15", "3015"),
        ("45\\text{ kg}", "45\\text{ cm}"),
    ],
)
def test_what_the_public_graders_misread_stays_right(answer: str, solution: str) -> None:
    """Paper mode refuses these; the public curves contain them."""
    assert grade_released(f"<answer>\\boxed{{{answer}}}</answer>", [solution]) == "correct"
    assert grade_answer(answer, [solution]) != "correct"


@pytest.mark.ci
def test_verdicts_are_those_of_the_public_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLinf's files as they are, with their processes and their `eval`, on every 40th pair of the tables and what holds pi."""
    rlinf = importlib.util.find_spec("rlinf")
    assert rlinf is not None and rlinf.submodule_search_locations
    package = ModuleType("unchanged_graders")
    package.__path__ = [f"{rlinf.submodule_search_locations[0]}/algorithms/rewards/rstar2/fused_compute_score"]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    compute_score = importlib.import_module("unchanged_graders.compute_score").compute_score
    pairs = [(s, a) for table in (flat(), *map(flat, INPUT_PAIRS.values()), flat(HELD_OUT_PAIRS)) for s, a, _ in table]
    chosen = [*pairs[::40], ("\\pi", "3.14"), ("2\\pi", "6.2832"), ("2\\pi", "2*3.2"), ("10\\pi", "5\\pi(2)")]
    for solution, answer in chosen:
        for response in (f"<answer>\\boxed{{{answer}}}</answer>", f"The answer is {answer}. Done"):
            theirs = compute_score(response, solution) == 1.0
            assert (grade_released(response, [solution]) == "correct") is theirs, (solution, response)


def test_a_response_runs_no_program(tmp_path: Path) -> None:
    """The public code evaluates what stands behind \\pi as Python."""
    code = f"open({str(tmp_path / 'pwned')!r},'w')".encode()
    octal = "".join(f"\\{byte:03o}" for byte in code)
    for written in (f"exec(bytes([{','.join(map(str, code))}]))", f"exec('{octal}')"):
        assert grade_released(f"\\boxed{{\\pi*{written}}}", ["3"]) == "wrong"
    assert not (tmp_path / "pwned").exists()


def trajectory_with_tool() -> Trajectory:
    """Its tool prints the solution, its own words end elsewhere and without an answer tag."""
    call = ToolCall("python", {}, ToolOutcome.OK, "Tool call success\nstdout: the answer is 42")
    return Trajectory(
        query_id="q",
        rollout_index=0,
        prompt_ids=[1],
        assistant_texts=["<tool_call>...</tool_call>", "I cannot tell"],
        tool_calls=[call],
        calls_per_turn=[1],
        finish_reason=FinishReason.ANSWERED,
    )


async def test_the_tools_output_counts_in_released_mode_only() -> None:
    problem = Problem("q", [{"role": "user", "content": "?"}], ["42"])
    trajectory = trajectory_with_tool()
    with Rewards(RewardSettings(mode="released", timeout_s=20)) as released:
        await released.grade([(problem, trajectory)])
    assert (trajectory.reward, trajectory.grade_detail) == (1.0, "correct")
    with Rewards(RewardSettings()) as paper:
        await paper.grade([(problem, trajectory)])
    assert (trajectory.reward, trajectory.grade_detail) == (0.0, "no_answer_tag")


async def test_long_responses_end_in_time(released: GraderPool) -> None:
    with GraderPool(1, 1.0, mode="released") as strict:
        for text in ("x^{9^{9^{9}}} = " * 5000, "the answer is 9^{9^{9^{9}}}"):
            grade = await asyncio.wait_for(strict.grade(text, ["x+1"]), 60)
            assert grade.reward == 0.0 and grade.detail in ("wrong", "ungradable", "grader_timeout")
