"""Answers as tokens, and what is decided without formulas."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.reward.answer_text import is_balanced
from rstar2_megatron.reward.comparison import choice, number, split_unit
from rstar2_megatron.reward.math_grader import CORRECT, UNGRADABLE, WRONG, grade_answer, quick_grade
from rstar2_megatron.reward.spelling import spell

PIECES = r"""
* ** _ ` \text{ } { \{ \} ( ) [ ] , ; and or < \le = x 1 12 1,000 \frac \sqrt ^ | \in \pm \circ ' & \\ $ \$ % cm : A (A) B.
! 。 ² \ne \begin{cases} \end{cases} \vec{a} ① in to only \forall C_5^2 _10 E(X) ¥ th
"""
NO_UNITS = """
not to but if when than then more least most only about around over between above below negative score half third quarter
fourth fifth sixths sevenths eighths ninths tenths elevenths twelfths fifteenths twentieths hundredths thousandths millionths
th st nd rd minus divided multiplied of mod modulo zero seven twelve thirteen nineteen twenty fifty ninety hundred thousand
million billion trillion gross permille promille ppm dozens fold folds added subtracted increased omitted estimated roughly
"""


@pytest.mark.parametrize(
    ("answer", "spelled"),
    [
        ("（2，－3）。", "( 2 , - 3 )"),
        ("**$\\dfrac{1}{2}$**", "\\frac 1 2"),
        ("1,234,567.5", "1234567.5"),
        ("(100,200)", "( 100 , 200 )"),
        ("(1,000,000)", "( 1000000 )"),
        ("30^\\circ 15'", "( 121 / 4 ) \\deg"),
        ("0.1\\overline{6}", "( 1 / 6 )"),
        ("The answer is: \\text{(B)}", "( \x01B )"),
        ("The correct answer is \\textbf{(B)}", "( \x01B )"),
        ("45\\text{ cm}^2", "45 \x01cm ^ 2"),
        ("x_1^{2}", "x_{1} ^ 2"),
        ("f( 2 )", "f(2)"),
        ("n\\pi,\\ n\\in\\mathbb Z", "\\bound \\pi , \\bound \\in \\mathbb{Z}"),
        ("1 \\text{ and } 2; 3", "1 and 2 , 3"),
        ("\\foo 27", "\\foo 27"),
        ("4\\quad 2", "4 2"),
        ("C_n^{2}", "\\binom n 2"),
        ("C_n^{k-1}", "C_{n} ^ { k - 1 }"),
        ("C_1^2", "C_{1} ^ 2"),
        ("\\frac{90^\\circ}{4}", "\\frac { 90 \\deg } 4"),
        ("3,05", "3.05"),
        ("(3,05)", "( 3 , 05 )"),
        ("3-0,2-1", "3 - 0 , 2 - 1"),
    ],
)
def test_spelling(answer: str, spelled: str) -> None:
    assert spell(answer) == spelled


@given(st.lists(st.sampled_from(PIECES.split()), max_size=40).map(" ".join) | st.text(max_size=200))
def test_any_text_equals_itself_and_has_a_verdict(text: str) -> None:
    """Also in the caller's own process, which nothing could kill."""
    assert quick_grade(text, ["24", "x > 1", "(1,2)"]) in (CORRECT, WRONG, UNGRADABLE, None)
    if is_balanced(text) and spell(text):
        assert quick_grade(text, [text]) == CORRECT


@pytest.mark.parametrize("piece", ["1,05 ", "(1,05 ", "\\{ \\begin{array} "])
def test_long_texts_are_spelled_in_linear_time(piece: str) -> None:
    """A solution may be of any length."""
    begun = time.process_time()
    spell(piece * (100_000 // len(piece)))
    assert time.process_time() - begun < 1.5


@pytest.mark.parametrize("text", ["(1 or 2)", "x \\in (1 or 2)", "\\pm \\ne or A \\le ["])
def test_texts_that_are_rewritten_without_an_end_have_a_verdict(text: str) -> None:
    assert quick_grade(text, ["3"]) in (WRONG, None)
    with contextlib.suppress(RecursionError):  # in a grading process it is a verdict
        assert grade_answer(text, ["3"]) in (WRONG, UNGRADABLE)


@pytest.mark.parametrize("piece", ["1,", "(", "**a", "x\\le ", "\\text{", "x=", "\\pm", "{"])
def test_long_texts_are_left_to_a_process_that_can_be_killed(piece: str) -> None:
    assert quick_grade(piece * (4000 // len(piece)), ["24"]) in (None, UNGRADABLE)
    assert quick_grade("24", [piece * (4000 // len(piece))]) is None


@pytest.mark.parametrize(
    ("answer", "value", "unit"),
    [
        ("45\\text{ sq. cm}", "45", "cm ^ 2"),
        ("45 square centimetres", "45", "cm ^ 2"),
        ("9.8\\text{ m/s}^2", "9.8", "m / s ^ 2"),
        ("9.8\\text{ meters per second squared}", "9.8", "m / s ^ 2"),
        ("60\\text{ mph}", "60", "mi / h"),
        ("\\$18", "18", "dollar"),
        ("-\\$18", "- 18", "dollar"),
        ("50\\%", "50", "%"),
        ("24 marbles", "24", "marble"),
        ("5m", "5 m", ""),
        ("3x", "3 x", ""),
        ("24\\text{ dozen}", "24 \x01dozen", ""),
        ("\\sin 30^\\circ", "\\sin 30 \\deg", ""),
    ],
)
def test_units(answer: str, value: str, unit: str) -> None:
    assert split_unit(spell(answer)) == (value, unit)


@pytest.mark.parametrize("word", NO_UNITS.split())
def test_words_that_change_a_number_are_no_units(word: str) -> None:
    for text in (f"7 {word}", f"7\\text{{ {word}}}", f"7\\text{{ {word} marbles}}"):
        assert CORRECT not in (grade_answer(text, ["7"]), grade_answer("7", [text])), text


@pytest.mark.parametrize("unit", ["months", "widths", "teeth", "depths", "paths", "cities", "children", "tents"])
def test_units_that_end_like_numbers(unit: str) -> None:
    assert grade_answer(f"7\\text{{ {unit}}}", ["7"]) == CORRECT


@pytest.mark.parametrize(
    ("answer", "letter", "text"),
    [
        ("\\textbf{(D)}\\ 42", "D", "42"),
        ("D. 42", "D", "42"),
        ("(D)", "D", ""),
        ("Option D", "D", ""),
        ("B: no solution", "B", "no solution"),
        ("\\text{E: none of these}", "E", "\x01none \x01of \x01these"),
        ("\\textbf{(D)} -3", "D", "- 3"),
        ("C: right circular cone", "C", "right circular cone"),
    ],
)
def test_choices(answer: str, letter: str, text: str) -> None:
    assert choice(spell(answer)) == (letter, text)


@pytest.mark.parametrize("answer", ["(A) or (B)", "A, B", "(D) - 3", "D + 1", "2D", "A: no", "D 42", "A) 7, C) 8", "x"])
def test_no_choices(answer: str) -> None:
    assert choice(spell(answer)) is None


@given(st.fractions(max_denominator=10**6))
def test_numbers_are_exact(value: Fraction) -> None:
    p, q = value.numerator, value.denominator
    for text in (f"{p}/{q}", f"\\frac{{{p}}}{{{q}}}", f"\\dfrac{{{2 * p}}}{{{2 * q}}}"):
        assert grade_answer(text, [f"{p}/{q}"]) == CORRECT
        assert grade_answer(text, [f"{p + 1}/{q}"]) == WRONG
    assert number(spell(str(p))) == p and number(spell(f"{p:,}")) == p


def test_the_percent_sign_and_the_base_of_a_solution_may_be_left_out() -> None:
    assert quick_grade("25", ["25\\%"]) == quick_grade("0.25", ["25\\%"]) == quick_grade("25%", ["1/4"]) == CORRECT
    assert quick_grade("25\\%", ["25"]) == quick_grade("2500\\%", ["25\\%"]) == WRONG
    assert quick_grade("25\\text{ dollars}", ["25\\%"]) == quick_grade("25\\%^2", ["25\\%"]) == WRONG
    assert quick_grade("2A", ["2A_{16}"]) == CORRECT and quick_grade("2A_{16}", ["42"]) == WRONG
