"""Finding the answer in a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.reward.answer_text import extract_answer, is_balanced, last_boxed


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
