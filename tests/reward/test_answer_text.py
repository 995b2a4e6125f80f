"""Finding the answer in a response, and the verdicts that text alone allows."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.reward.answer_text import (
    extract_answer,
    is_balanced,
    is_word,
    last_boxed,
    normalise,
    plain_number,
    quick_verdict,
    split_unit,
)


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
    extracted = extract_answer(response)
    assert (extracted.answer, extracted.detail) == (answer, detail)


@given(st.text("ab{}\\boxed \n", max_size=60))
def test_boxes_are_balanced_whatever_the_text(text: str) -> None:
    found = last_boxed(text)
    assert found is None or is_balanced(found)


@given(st.text(max_size=80))
def test_normalising_never_fails_and_settles(text: str) -> None:
    assert isinstance(normalise(text), str)
    assert quick_verdict(text, text) in (True, False)


@given(st.integers(-(10**12), 10**12))
def test_integers_with_thousands_separators(number: int) -> None:
    assert quick_verdict(f"{number:,}", str(number)) is True
    assert quick_verdict(f"\\text{{{number}}}", str(number)) is True
    assert quick_verdict(str(number + 1), f"{number:,}") is False


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_exact(value: Fraction) -> None:
    p, q = value.numerator, value.denominator
    for text in (f"{p}/{q}", f"\\frac{{{p}}}{{{q}}}", f"\\dfrac{{{2 * p}}}{{{2 * q}}}"):
        assert plain_number(normalise(text)) == value


def test_units_and_words() -> None:
    assert split_unit("5 cm") == ("5", "cm") and split_unit("50%") == ("50", "%")
    assert split_unit("36 cm ^2") == ("36", "cm ^2")
    assert split_unit("3x") == ("3x", "") and split_unit("2 pi") == ("2 pi", "")
    assert is_word("Monday") and is_word("no solution") and not is_word("xy") and not is_word("sin x")
    assert quick_verdict("1 m", "100 cm") is False
    assert quick_verdict("2 hrs", "2 hours") is True
    assert quick_verdict("x+1", "1+x") is None  # for algebra to decide


def test_percent_against_number_and_ratio() -> None:
    assert quick_verdict("50\\%", "0.5") and quick_verdict("0.5", "50%") and quick_verdict("50", "50%")
    assert quick_verdict("5%", "0.5") is False
