"""Wrappers, integer answers, duplicates and common n-grams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.data.cleaning import CONTRADICTION, fingerprint, integer_answer, strip_wrappers, words
from rstar2_megatron.data.decontaminate import NGramIndex

PROBLEM = "Find the number of pairs $(a, b)$ with $a + b = 12$."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


@pytest.mark.parametrize(
    "wrapped",
    [
        DAPO,
        "{}",
        "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        "{} Let's think step by step and output the final answer within \\boxed{{}}.",
        "Problem: {}\n\nPresent the answer in LaTex format: \\boxed{{Your answer}}",
        "Question:\n{}\nPlease put your final answer in \\boxed{{answer}}.",
        '{}\n\nRemember to put your answer on its own line after "Answer:", and you do not need to use a \\boxed command.',
        "{}\n请将最终答案放在\\boxed{{}}中。",
        "{}\nPut your answer inside a box using the LaTeX command \\boxed{{}}.",
        "{}\nGive your final answer (a number) within a single \\boxed{{}}.",
        "{}\n请将最终答案写成\\boxed{{}}的形式。",
    ],
)
def test_wrappers_of_public_sets_come_off(wrapped: str) -> None:
    assert strip_wrappers(wrapped.format(PROBLEM)) == PROBLEM
    assert not CONTRADICTION.search(strip_wrappers(wrapped.format(PROBLEM)))


@pytest.mark.parametrize(
    "problem",
    [
        "Solve the following equation: x + 1 = 3.",
        "A box holds 3 balls. Please give the answer in the form $m+n$.",
        "Let $x$ be an integer. Find the answer.",
        "Think of a number step by step doubled each day. What is it after 5 days?",
        "What is 2 to the power of 100? Give your answer modulo 1000 in \\boxed{}.",
        "How long is it? Please put your final answer rounded to the nearest integer within \\boxed{}.",
        "The area is m/n in lowest terms. Your final answer should be of the form m+n.",
        "2的100次方是多少? 请将最终答案对1000取模后放在\\boxed{}中。",
    ],
)
def test_problems_keep_their_own_words(problem: str) -> None:
    assert strip_wrappers(problem) == problem


def test_a_wrapper_that_is_not_understood_is_seen() -> None:
    text = f"{PROBLEM}\nEnd your reply with a line Answer: $Answer please, no quotes."
    assert CONTRADICTION.search(strip_wrappers(text))


@pytest.mark.parametrize(
    ("answer", "integer"),
    [
        ("34", "34"),
        (" $34$ ", "34"),
        ("\\boxed{-7}", "-7"),
        ("$\\boxed{7}$", "7"),
        ("1,234", "1234"),
        ("1{,}234{,}567", "1234567"),
        ("12\\,345", "12345"),
        ("+5", "5"),
        ("\u22125", "-5"),
        ("-0", "0"),
        ("007", "7"),
        ("3.0", "3"),
        ("3.", "3"),
        ("3.5", None),
        ("1,23", None),
        ("0,500", None),
        ("100, 200, 300", None),
        ("1, 200", None),
        ("1{,} 234", None),
        ("\\frac{1}{2}", None),
        ("x", None),
        ("", None),
        ("12 cm", None),
        ("1e3", None),
        ("9" * 19, None),
        ("0" * 30 + "9", "9"),
        ("\uff11\uff12", "12"),
        ("\U0001d7cf\U0001d7d0", "12"),
        ("1\\,234\\,567", "1234567"),
        ("12,\\!345", "12345"),
        ("12\\,", "12"),
        ("198\u2082", None),
        ("2\u2077", None),
        ("10\u00b2", None),
        ("\u2460", None),
        ("\u2488", None),
        ("3\u00bd", None),
        ("3\\,4", None),
        ("\u0663", None),
    ],
)
def test_integer_answers(answer: str, integer: str | None) -> None:
    assert integer_answer(answer, 18) == integer


@given(st.integers(-(10**17), 10**17))
def test_every_integer_is_read_as_itself(value: int) -> None:
    for form in (str(value), f"${value}$", f"\\boxed{{{value}}}", f"{value:,}", f"{value}.0"):
        assert integer_answer(form, 18) == str(value)


def test_duplicates_differ_only_in_dressing() -> None:
    same = [PROBLEM, PROBLEM.upper(), PROBLEM.replace("$", ""), PROBLEM.replace(" ", "\n")]
    assert len({fingerprint(words(text)) for text in same}) == 1
    assert fingerprint(words(PROBLEM.replace("12", "13"))) != fingerprint(words(PROBLEM))
    assert words("$2^7$") == words("2\u2077") != words("27") and words("198\u2082") == words("198_2")
    assert words("若$a=2$求a") == ["若", "a", "2", "求", "a"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Compute $7-3$.", "Compute $7+3$."),
        ("Solve $x<1$.", "Solve $x>1$."),
        ("Solve $x \u2264 1$.", "Solve $x \u2265 1$."),
        ("Find $-x$.", "Find $x$."),
        ("Find $\u03b1$.", "Find $\u03b2$."),
        ("Сумма чисел 3 и 5?", "Разность чисел 3 и 5?"),
        ("3과 5의 합은?", "3과 5의 차는?"),
        ("ปี 3", "ปู 3"),  # only the mark of a vowel is another
        ("Докажите", "Найдите"),
        ("Sum [1,2]?", "Sum (1,2)?"),
        ("Count $[0,1)$.", "Count $[0,1]$."),
        ("Find $(2+3)*4$.", "Find $2+3*4$."),
        ("Find $|x|$.", "Find $x$."),
        ("Find $\\sqrt{x+1}$.", "Find $\\sqrt{x}+1$."),
        ("Find $x^2$.", "Find $x_2$."),
        ("Find $f'(1)$.", "Find $f(1)$."),
        ("Round 1.5.", "Round 1:5."),
    ],
)
def test_problems_of_any_script_that_differ_are_no_duplicates(one: str, other: str) -> None:
    assert fingerprint(words(one, operators=True)) != fingerprint(words(other, operators=True))
    assert words(one) and words(other)


def test_hyphens_and_bold_are_dressing() -> None:
    one, other = "**Find** the non-negative $x - 1$.", "Find the non negative $x\u22121$"
    assert words(one, operators=True) == words(other, operators=True) == [*words(one)[:5], "-", "1"]


HELD_OUT = "A bag holds seven red marbles and nine blue ones; two are drawn without looking."


def test_eight_words_in_common_are_found_and_seven_are_not() -> None:
    index = NGramIndex([HELD_OUT])
    assert index.match(words("Now a bag holds seven RED marbles, and nine white ones.")) == (
        "a bag holds seven red marbles and nine"
    )
    assert index.match(words("A bag holds seven red marbles and eight white ones.")) is None
    assert index.match(words("Something else entirely, of more than eight words, is asked here.")) is None


def test_words_of_any_script_are_held_out() -> None:
    held_out = "Сколько существует натуральных чисел, меньших ста, которые делятся на семь"
    assert NGramIndex([held_out]).match(words(f"Задача. {held_out}?")) is not None


def test_short_problems_match_only_themselves() -> None:
    index = NGramIndex(["Compute 2 + 3 now."])
    assert index.match(words("compute 2+3 now")) == "compute 2 3 now"
    assert index.match(words("please compute 2+3 now and show all of your work here")) is None


def test_boilerplate_can_be_spared() -> None:
    phrase = "where m and n are relatively prime positive integers find m plus n"
    texts = [f"{start} {phrase}" for start in ("One two three", "Four five six", "Seven eight nine")]
    problem = words(f"Another beginning {phrase}")
    assert NGramIndex(texts).match(problem) is not None
    assert NGramIndex(texts, boilerplate=3).match(problem) is None
    assert NGramIndex(texts, boilerplate=4).match(problem) is not None
    assert NGramIndex(texts[:1] * 5, boilerplate=3).match(problem) is not None  # one problem, five times


def test_signs_behind_numbers_tell_problems_apart() -> None:
    def key(text: str) -> str:
        return fingerprint(words(text, operators=True))

    assert key("Is it 5!?") != key("Is it 5?") and key("10% of 50") != key("10 of 50")
    assert (
        key("Find it!") == key("Find it.") and key("5\\% of it") == key("5% of it") and key("Find \\(x\\)") == key("Find $x$")
    )
    assert key("$x^{2}$") == key("x\u00b2") == key("\\[x^2\\]") and key("The dogs' $f(x)$.") == key("the dogs f(x)")
    assert key("f\u2032(x)") == key("f\u2019(x)") == key("f'(x)")
