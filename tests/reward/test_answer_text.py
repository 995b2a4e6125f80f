"""Finding the answer in a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.reward.answer_text import extract_answer, final_answer, is_balanced, last_boxed, worked_note
from rstar2_megatron.trajectory import Problem


@pytest.mark.parametrize(
    ("response", "answer", "detail"),
    [
        ("<answer>\\boxed{5}</answer>", "5", ""),
        ("<answer> first \\boxed{1} then \\boxed{2} </answer>", "2", ""),
        ("<answer>\\boxed{1}</answer> no <answer>\\boxed{2}</answer>", "2", ""),
        ("\\boxed{9} <answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}", ""),
        ("<answer>\\boxed{\\{1,2\\}}</answer>", "\\{1,2\\}", ""),
        ("<answer>\\boxed {7}</answer>", "7", ""),
        ("<answer>\\boxed{3} and \\boxed{4</answer>", "3", ""),
        ("<answer>\\boxed{1}</answer><answer>open \\boxed{2}", "1", ""),
        ("<answer><answer>\\boxed{6}</answer>", "6", ""),
        ("the answer is \\boxed{5}", None, "no_answer_tag"),
        ("<answer>\\boxed{5}", None, "no_answer_tag"),
        ("</answer>\\boxed{5}<answer>", None, "no_answer_tag"),
        ("<answer>5</answer>", None, "no_box"),
        ("<answer>\\boxed{5}</answer><answer>6</answer>", None, "no_box"),
        ("<answer>\\boxed 5</answer>", None, "no_box"),
        ("", None, "no_answer_tag"),
    ],
)
def test_the_last_box_of_the_last_closed_answer(response: str, answer: str | None, detail: str) -> None:
    assert extract_answer(response) == (answer, detail)


@given(st.text("ab{}\\boxed \n", max_size=60))
def test_boxes_are_balanced_whatever_the_text(text: str) -> None:
    found = last_boxed(text)
    assert found is None or is_balanced(found)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("6 * 12 = <<6*12=72>>72\n#### 72", "72"),
        ("add\n#### 1,234 \n", "1,234"),
        ("#### -5", "-5"),
        ("Then $x=2$, so the sum is $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("so $a = \\boxed{1}$ and $b = \\boxed{2}$", "so $a = \\boxed{1}$ and $b = \\boxed{2}$"),
        ("the box \\boxed{ never closes", "the box \\boxed{ never closes"),
        ("#### Heading\nand a text", "#### Heading\nand a text"),
        ("##### 4", "##### 4"),
        ("x = \\boxed{4}", "x = \\boxed{4}"),
        ("no solution", "no solution"),
    ],
)
def test_the_answer_of_a_worked_solution(solution: str, answer: str) -> None:
    assert final_answer(solution) == answer


def test_solutions_that_are_whole_texts_are_told() -> None:
    texts = ["72", "add\n#### 3", "First " + "we add both of the numbers " * 4, "\\text{Yes, it is always possible to do so}"]
    problems = [Problem(f"q{i}", [], [text]) for i, text in enumerate(texts)]
    assert worked_note(problems).startswith(
        "1 of 4 problems have worked solutions or none, which no answer equals, the first is q2; "
    )
    assert worked_note(problems, more_than=0.25) == "" and worked_note(problems[2:3], more_than=0.5)
    assert worked_note(problems[:2]) == "" == worked_note([])
    assert worked_note([Problem("q", [], ["proof"]), Problem("r", [], ["notfound"])]).startswith("2 of 2 problems")
