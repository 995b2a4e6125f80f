"""What math-verify, and latex2sympy under it, read as something else than is written.

Each row is a text, what the library takes it for, and what it is (None: its meaning is open, or it is no value). The first test
shows that the library still reads so; a row that fails there has lost its reason.
"""

from __future__ import annotations

import pytest
from math_verify import parse, verify

from rstar2_megatron.reward.math_grader import CORRECT, grade_answer

UNITS = "t m h s c g l d o st ab bc th am by rs cc"
READINGS = [
    # an integer beside a number is taken for a mixed number
    ("2(3)", "5", "6"),
    ("2\\left(\\frac{1}{2}\\right)", "\\frac{5}{2}", "1"),
    ("2\\binom{3}{1}", "5", "6"),
    ("2\\frac{3}{2}", "\\frac{7}{2}", None),
    ("2{3}", "5", None),
    ("2\\quad 3", "5", None),
    ("1.5.2", "0.3", None),
    # a letter at the end is taken for a unit, and a unit has no meaning
    *((f"7{letters}", "7", None) for letters in UNITS.split()),
    ("x+3g", "x+3", "3g+x"),
    ("5\\text{ squared}", "5", None),
    ("24\\text{ dozen}", "24", None),
    ("45\\text{ cm}^3", "45\\text{ cm}^2", "45\\text{ cubic centimeters}"),
    ("45\\text{ kg}", "45\\text{ cm}", "45\\text{ kilograms}"),
    # capitals are small letters, names of functions products of letters
    ("2N", "2n", "N \\cdot 2"),
    ("X+1", "x+1", "1+X"),
    ("sinx", "nisx", None),
    # an argument goes on after a sign
    ("\\sin x \\cdot y", "\\sin(xy)", None),
    ("\\ln 1/2", "\\ln(1/2)", None),
    ("1/2x", "\\frac{1}{2x}", None),
    ("1/2\\pi", "\\frac{1}{2\\pi}", None),
    ("2^3!", "40320", None),
    ("5!!", "(5!)!", "15"),
    ("1e5", "5e", None),
    # a sign is dropped
    ("A^T", "A", None),
    ("A'", "A", None),
    ("27'", "27", None),
    ("30'15", "3015", None),
    ('30"15', "3015", None),
    ("3\\$4", "34", None),
    ("12:30", "\\frac{2}{5}", "12 : 30"),
    ("x \\approx 3", "3", None),
    # one number that is found stands for the whole
    ("\\foo 27", "27", None),
    ("23 \\Rightarrow 24", "24", "23 \\implies 24"),
    ("n \\equiv 24 \\pmod{35}", "24", "n\\equiv 24\\pmod {35}"),
    ("k \\mid 24", "24", "k\\mid24"),
    ("24 \\ldots", "24", None),
    ("24 \\text{ or so}", "24", None),
    ("x \\to 24", "24", None),
    # the last side of an equation, true or not
    ("23 = 24", "24", None),
    ("x^2 = 24", "24", None),
    ("a=b=24", "24", None),
    # decimals are compared after rounding, values with a fixed error
    ("10^{-29}", "10^{-30}", "\\frac{1}{10^{29}}"),
    ("\\frac{1}{1501!}", "\\frac{1}{1500!}", "1/1501!"),
    ("\\sin(10^{-10})", "10^{-10}", "\\sin(\\frac{1}{10^{10}})"),
]


@pytest.mark.parametrize(("text", "taken_for", "_"), READINGS)
def test_the_library_reads_it_so(text: str, taken_for: str, _: str | None) -> None:
    ours, theirs = (parse(f"\\boxed{{{part}}}", parsing_timeout=None) for part in (text, taken_for))
    assert verify(ours, theirs, timeout_seconds=None) or verify(theirs, ours, timeout_seconds=None)


@pytest.mark.parametrize(("text", "taken_for", "right"), READINGS)
def test_it_is_read_as_written(text: str, taken_for: str, right: str | None) -> None:
    assert grade_answer(text, [text]) == CORRECT
    assert CORRECT not in (grade_answer(text, [taken_for]), grade_answer(taken_for, [text]))
    assert right is None or grade_answer(text, [right]) == grade_answer(right, [text]) == CORRECT
