"""Problems of the default run without a GPU: arithmetic and algebra that a tiny model solves only by running code.

Each family is one function from a random generator and a range of number sizes to a `TinyProblem`: the
question, its answer, and the Python that a good, a mistaken and a careless attempt would run. The code pieces
feed the SFT traces (`sft`); RL sees only question and answer. Every question names its numbers once, and
the right code copies them, so a model that can copy can learn every family.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["easy", "main", "large"]


@dataclass(frozen=True, slots=True)
class TinyProblem:
    """A question with its answer and the code of three kinds of attempt."""

    family: str
    question: str
    answer: str
    right_code: str  # prints the answer
    wrong_code: str  # runs, prints something else
    error_codes: tuple[str, ...]  # raise, each in its own way
    chain: tuple[str, ...] = ()  # of a chained problem: the first number, then an operation a tool call

    def row(self, query_id: str) -> dict[str, Any]:
        """The problem as a row of the data files (the schema of the processed DAPO data)."""
        return {
            "prompt": [{"role": "user", "content": self.question}],
            "solutions": [self.answer],
            "query_id": query_id,
            "task": "math",
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ranges of a level: operand digits [min, max] and the largest number of terms in a sum."""

    min_digits: int
    max_digits: int
    max_terms: int

    def number(self, rng: random.Random, *, fewer: int = 0) -> int:
        """A number above 1 whose digit count is uniform in the range, the maximum lowered by `fewer`."""
        top = max(self.min_digits, self.max_digits - fewer)
        digits = rng.randint(self.min_digits, top)
        return rng.randrange(max(2, 10 ** (digits - 1)), 10**digits)


SIZES: dict[Level, Sizes] = {
    "easy": Sizes(min_digits=1, max_digits=2, max_terms=3),  # SFT traces
    "main": Sizes(min_digits=2, max_digits=3, max_terms=3),  # RL and held-out
    "large": Sizes(min_digits=4, max_digits=6, max_terms=3),  # the pretrained model's
}


def _slips(code: str) -> tuple[str, ...]:
    """Careless versions of a one-line program `print(...)`: a misspelt name and an unclosed bracket."""
    head, _, last = code.rpartition("print(")
    return (f"{head}prnt({last}", f"{head}print({last.removesuffix(')')}")


def _sum(rng: random.Random, sizes: Sizes) -> TinyProblem:
    terms = [sizes.number(rng) for _ in range(rng.randint(2, sizes.max_terms))]
    signs = [rng.choice("+-") for _ in terms[1:]]
    flipped = list(signs)
    k = rng.randrange(len(signs))
    flipped[k] = "-" if signs[k] == "+" else "+"

    def expression(operators: list[str]) -> str:
        return str(terms[0]) + "".join(f"{s}{t}" for s, t in zip(operators, terms[1:]))

    value = terms[0] + sum(t if s == "+" else -t for s, t in zip(signs, terms[1:]))
    right = f"print({expression(signs)})"
    return TinyProblem(
        "sum", f"Compute {expression(signs)}.", str(value), right, f"print({expression(flipped)})", _slips(right)
    )


def _product(rng: random.Random, sizes: Sizes) -> TinyProblem:
    a, b = sizes.number(rng), sizes.number(rng)
    while a * b == a + b:
        b = sizes.number(rng)
    right = f"print({a}*{b})"
    return TinyProblem("product", f"Multiply {a} by {b}.", str(a * b), right, f"print({a}+{b})", _slips(right))


def _common(rng: random.Random, sizes: Sizes) -> tuple[int, int]:
    """Two different numbers that share a factor above 1."""
    while True:
        g = rng.randint(2, 9 * 10 ** (sizes.max_digits - 2))
        limit = (10**sizes.max_digits - 1) // g
        a, b = g * rng.randint(1, limit), g * rng.randint(1, limit)
        if a != b and min(a, b) >= 10 ** (sizes.min_digits - 1):
            return a, b


def _two_number_problems(name: str, mistaken: str) -> Callable[[random.Random, Sizes], TinyProblem]:
    """Problems of the function `math.{name}` of two numbers."""

    def make(rng: random.Random, sizes: Sizes) -> TinyProblem:
        a, b = _common(rng, sizes)
        return TinyProblem(
            name,
            f"Find the {name} of {a} and {b}.",
            str(getattr(math, name)(a, b)),
            f"import math\nprint(math.{name}({a},{b}))",
            f"import math\nprint(math.{mistaken}({a},{b}))",
            (f"print(math.{name}({a},{b}))", f"print({name}({a},{b}))"),
        )

    return make


def _remainder(rng: random.Random, sizes: Sizes) -> TinyProblem:
    while True:
        base, exponent, modulus = (sizes.number(rng, fewer=1) for _ in range(3))
        value, mistaken = pow(base, exponent, modulus), base * exponent % modulus
        if value != mistaken:
            break
    right = f"print(pow({base},{exponent},{modulus}))"
    return TinyProblem(
        "remainder",
        f"Find {base}^{exponent} mod {modulus}.",
        str(value),
        right,
        f"print({base}*{exponent}%{modulus})",
        _slips(right),
    )


def _bits(rng: random.Random, sizes: Sizes) -> TinyProblem:
    while True:
        n = sizes.number(rng) * rng.randint(1, 99)
        ones, zeros = bin(n).count("1"), bin(n).count("0")
        if ones != zeros:
            break
    return TinyProblem(
        "bits",
        f"Count the ones of {n} in binary.",
        str(ones),
        f"print(bin({n}).count('1'))",
        f"print(bin({n}).count('0'))",
        (f"print({n}.count('1'))", f"print(bin({n}).count(1))"),
    )


def _linear(rng: random.Random, sizes: Sizes) -> TinyProblem:
    while True:
        a, x, b = (sizes.number(rng, fewer=2) for _ in range(3))
        sign, inverse = rng.choice([("+", "-"), ("-", "+")])
        c = a * x + b if sign == "+" else a * x - b
        mistaken = (c + b) // a if sign == "+" else (c - b) // a
        if c > 0 and mistaken != x:
            break
    right = f"print(({c}{inverse}{b})//{a})"
    return TinyProblem("linear", f"Solve {a}x{sign}{b}={c}.", str(x), right, f"print(({c}{sign}{b})//{a})", _slips(right))


def _digits(rng: random.Random, sizes: Sizes) -> TinyProblem:
    n = sizes.number(rng) * rng.randint(11, 999)
    value = sum(map(int, str(n)))
    right = f"print(sum(map(int,'{n}')))"
    return TinyProblem(
        "digits",
        f"Add the digits of {n}.",
        str(value),
        right,
        f"print(len('{n}'))",
        (f"print(sum('{n}'))", f"print(sum(map(int,{n})))"),
    )


def _series(rng: random.Random, sizes: Sizes) -> TinyProblem:
    low = sizes.number(rng, fewer=1)
    high = low + sizes.number(rng)
    right = f"print(sum(range({low},{high}+1)))"
    return TinyProblem(
        "series",
        f"Add all integers from {low} to {high}.",
        str(sum(range(low, high + 1))),
        right,
        f"print(sum(range({low},{high})))",
        _slips(right),
    )


CHAIN_NAMES = ("a", "b", "c", "d")
MISTAKEN = {"+": "-", "-": "//", "*": "+", "%": "//"}
"""The operator that a mistaken step of a chain has instead.

No two operators are each other's mistake. The orders * + - // and % // put every operator before its mistake, so a preference
model can rank a step and its mistake without the question. With - for + and + for - it must compare them with the question,
which takes it many more pairs (benchmarks/NOTES.md).
"""
_MOST = 9999  # of a value on the way, so that it is short to copy


def chain_code(place: int, value: str, operation: str) -> str:
    """The program of one step of a chain: it prints the value number `place` (from 1), made of the one before."""
    before, name = CHAIN_NAMES[place - 1 : place + 1]
    return f"{before}={value}\n{name}={before}{operation}\nprint({name})"


def mistaken(operation: str) -> str:
    return MISTAKEN[operation[0]] + operation[1:]


def _chain(rng: random.Random, sizes: Sizes) -> TinyProblem:
    """Three dependent steps, one tool call each; a mistake in any single one changes the answer."""
    while True:
        operators = [rng.choice("+-*%") for _ in CHAIN_NAMES[1:]]
        operands = [rng.randint(2, 9) if o == "*" else sizes.number(rng, fewer=int(o == "%")) for o in operators]
        chain = (str(sizes.number(rng)), *(f"{o}{n}" for o, n in zip(operators, operands)))
        values = _chain_values(chain)
        others = [_chain_values((*chain[:i], mistaken(chain[i]), *chain[i + 1 :]))[-1] for i in (1, 2, 3)]
        if min(values) > 0 and max(values) <= _MOST and values[-1] not in others:
            break
    lines = [f"{x}={y}{z}" for x, y, z in zip(CHAIN_NAMES, ("", *CHAIN_NAMES), chain)]
    right = "\n".join([*lines, "print(d)"])
    wrong = "\n".join([*lines[:-1], f"d=c{mistaken(chain[-1])}", "print(d)"])
    return TinyProblem("chain", f"{', '.join(lines)}. Find d.", str(values[-1]), right, wrong, _slips(right), chain)


def _chain_values(chain: Sequence[str]) -> list[int]:
    """The values of all names of a chain."""
    calculate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "%": int.__mod__, "/": int.__floordiv__}
    values = [int(chain[0])]
    for operation in chain[1:]:
        values.append(calculate[operation[0]](values[-1], int(operation.lstrip("+-*/%"))))
    return values


FAMILIES: dict[str, Callable[[random.Random, Sizes], TinyProblem]] = {
    "sum": _sum,
    "product": _product,
    "gcd": _two_number_problems("gcd", "lcm"),
    "lcm": _two_number_problems("lcm", "gcd"),
    "remainder": _remainder,
    "bits": _bits,
    "linear": _linear,
    "digits": _digits,
    "series": _series,
}
CHAINED: dict[str, Callable[[random.Random, Sizes], TinyProblem]] = {"chain": _chain}
"""Not in the default run; `cold_start.builder: chained` makes these alone."""


def stream(
    level: Level, rng: random.Random, seen: set[str], families: Sequence[str] = tuple(FAMILIES)
) -> Iterator[TinyProblem]:
    """Problems without end, `families` in turn, none whose question is in `seen` (to which each is added).

    Raises:
        ValueError: when a family's questions at this level are used up.
    """
    sizes = SIZES[level]
    while True:
        for name in families:
            make = (FAMILIES | CHAINED)[name]
            for _ in range(1000):
                problem = make(rng, sizes)
                if problem.question not in seen:
                    break
            else:
                raise ValueError(f"no unseen {name!r} problem left at level {level!r} after {len(seen)} questions")
            seen.add(problem.question)
            yield problem
