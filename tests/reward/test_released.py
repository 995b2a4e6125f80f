"""The released reward: cue words, percentages, tool output, and whatever math-verify finds in the whole response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rstar2_megatron.reward.grade import grade_trajectories
from rstar2_megatron.reward.math_grader import grade_answer
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.reward.released_grader import grade_released, numbers_agree, released_answer
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory


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
    ("answer", "solution", "agree"),
    [
        ("3", "3", True),
        ("300", "3", True),
        ("0.03", "3", True),
        ("30", "3", False),
        ("33.334", "33.3333", True),
        ("33.4", "33.3333", False),
        ("50\\%", "0.5", True),
        ("1,000", "1000", True),
        ("x", "3", False),
    ],
)
def test_numbers_agree_within_the_tolerance_and_as_percentages(answer: str, solution: str, agree: bool) -> None:
    assert numbers_agree(answer, solution) is agree


@pytest.mark.parametrize(
    ("response", "solution", "correct"),
    [
        ("\\boxed{\\frac{2}{4}} without any answer tag", "\\frac12", True),
        ("it follows that $x = \\sqrt{8}$", "2\\sqrt{2}", True),  # math-verify's own search
        ("\\boxed{\\text{East}}", "East", True),  # a word counts for the first grader
        ("\\boxed{\\text{West}}", "East", False),
        ("maybe \\boxed{41}", "42", False),
        ("nothing to see", "42", False),
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


def trajectory_with_tool() -> Trajectory:
    """Its tool prints the solution, its own words end elsewhere and without an answer tag."""
    call = ToolCall("python", {}, ToolOutcome.OK, "Tool call success\nstdout: the answer is 42")
    return Trajectory(
        query_id="q",
        rollout_index=0,
        prompt_ids=[1],
        assistant_texts=["<tool_call>...</tool_call>", "I cannot tell"],
        tool_calls=[call],
        finish_reason=FinishReason.ANSWERED,
    )


async def test_the_tools_output_counts_in_released_mode_only(released: GraderPool) -> None:
    problem = Problem("q", [{"role": "user", "content": "?"}], ["42"])
    trajectory = trajectory_with_tool()
    await grade_trajectories(released, problem, [trajectory])
    assert (trajectory.reward, trajectory.grade_detail) == (1.0, "correct")
    with GraderPool(1) as paper:
        await grade_trajectories(paper, problem, [trajectory])
    assert (trajectory.reward, trajectory.grade_detail) == (0.0, "no_answer_tag")


async def test_long_responses_end_in_time(released: GraderPool) -> None:
    with GraderPool(1, 1.0, mode="released") as strict:
        for text in ("x^{9^{9^{9}}} = " * 5000, "the answer is 9^{9^{9^{9}}}"):
            grade = await asyncio.wait_for(strict.grade(text, ["x+1"]), 60)
            assert grade.reward == 0.0 and grade.detail in ("wrong", "ungradable", "grader_timeout")
