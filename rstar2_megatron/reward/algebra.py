"""Formulas as sympy values, and whether two are equal.

A formula is read whole or not at all, and what LaTeX leaves open is not read either: 1/2x, \\sin \\pi/4, 2\\frac{3}{2}, 2^3!.
The parsers of sympy and math-verify are not used, because they read on where they do not understand.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from sympy import S

from rstar2_megatron.reward.spelling import FUNCTIONS, GREEK, UPRIGHT

_CONSTANTS = {"\\pi": S.Pi, "e": S.Exp1, "i": S.ImaginaryUnit, "\\infty": S.Infinity}
_SYMBOL = re.compile(
    rf"[A-Za-z]|\\(?:(?:var)?(?i:{GREEK})|ell|bound)|\S+\{{\S+\}}|[fghFGHPQ]\(.*\)"
)  # the last: an accent, a subscript, f(x)
_BRACKETS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "|": "|)"}
_MEANING = {"\\lfloor": sympy.floor, "\\lceil": sympy.ceiling, "|": sympy.Abs}
_FUNCTION_LETTERS = frozenset("fghFGHPQ")
_STEPS = (sympy.floor, sympy.ceiling, sympy.factorial2)  # of k, m and n, which are integers beside them
_SIGNS = ("+", "-", "\\cdot", "/")
_AFTER_TERM = frozenset(["", "+", "-", ",", "\\choose", "\\over", *_BRACKETS.values()])
_SEVERAL = {"max": sympy.Max, "min": sympy.Min, "gcd": sympy.igcd, "lcm": sympy.ilcm}

_YEAR, _MONTH, _DAY = r"(?:1[6-9]|20)\d\d", "(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_DATE = re.compile(rf"{_YEAR} ([-/]) {_MONTH} \1 {_DAY}|{_DAY} - {_DAY} - {_YEAR}|{_DAY} / {_DAY} / (?:{_YEAR}|\d\d)")
_DECIMAL_TOLERANCE = 5e-7  # relative, between a decimal of six digits and an irrational number
_DIGITS = 30  # of the first comparison
_MAX_DIGITS = 6000  # of the last: 1/1500! begins with 4114 zeros
_MOST_EDGES = 300
_ROUNDED = sympy.Float("1e-9")  # of a root whose value is 0 where it bends
_GROWING = (sympy.factorial, sympy.factorial2, sympy.binomial)  # too large to compute far away
_BENT = (sympy.floor, sympy.ceiling, sympy.Abs, sympy.Max, sympy.Min)
_POINTS = [[sympy.Rational(sign * (7 * i + 31), 6 * i + 17 + sign) for i in range(8)] for sign in (1, -1)]
_POINTS.append([pair[i % 2] for i, pair in enumerate(zip(*_POINTS))])
# far from these, because floors, absolute values and maxima are constant or linear among them
_POINTS += [[sympy.Rational(sign * (5 * i + 13), d) for i in range(8)] for sign, d in ((1, 1), (-1, 1), (1, 3))]
_INTEGERS = [[sympy.Integer(5 * i + first) for i in range(8)] for first in (*range(12, 18), 50)]


class Unreadable(ValueError):
    """A formula that has no reading, or more than one."""


def compare(a: str, b: str, sign: str) -> bool | None:
    """Whether a = b or, with the sign of a relation, whether `a sign 0` and `b sign 0` are multiples; None when unread."""
    try:
        readers = _Reader(a), _Reader(b)
        variables = readers[0].variables() | readers[1].variables()
        x, y = (reader.read(variables) for reader in readers)
        if not sign or not x.free_symbols:
            return same_value(x, y)
        at = dict(zip(sorted(x.free_symbols | y.free_symbols, key=str), _POINTS[0]))
        c, d = x.subs(at), y.subs(at)
        return bool(c != 0 and d != 0 and same_value(x * d, y * c) and (sign in ("=", "\\ne") or c / d > 0))
    except Exception:  # sympy raises anything on odd values
        return None


class _Reader:
    """Recursive descent."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.at = 0
        if _DATE.fullmatch(text):
            raise Unreadable("a date")
        for token in text.split():
            word = token.lstrip(UPRIGHT)
            before = self.tokens[-1] if self.tokens else "("
            if word.isalpha() and len(word) > 1 and (word != token or any(name in word for name in FUNCTIONS)):
                raise Unreadable(word)
            if token == "|" and self.tokens.count("|") > self.tokens.count("|)"):
                word = "|)"
            elif token == "|" and not (before.isdigit() or before in _SIGNS or before in _BRACKETS or before[1:] in FUNCTIONS):
                raise Unreadable("|a|b|")
            self.tokens += word if word.isalpha() else [word]
        for token, after in zip(self.tokens, self.tokens[1:]):
            if token == "d" and after[-1].isalpha() and after[1:] not in FUNCTIONS:
                raise Unreadable("a differential")

    def variables(self) -> set[str]:
        """The letters, common as names of functions, that stand without an argument: h of bh - ah, beside h(b - a)."""
        pairs = zip(self.tokens, [*self.tokens[1:], ""])
        return {token for token, after in pairs if token in _FUNCTION_LETTERS and after != "("}

    def read(self, variables: set[str]) -> Any:
        """The sympy value, in which letters of functions but `variables` are called before a bracket. Raises Unreadable."""
        self.functions = _FUNCTION_LETTERS - variables
        value = self.fraction()
        if self.token or value.has(S.NaN, S.ComplexInfinity):
            raise Unreadable(f"{self.token} after a formula")
        return value

    @property
    def token(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self, expected: str = "") -> str:
        token = self.token
        if not token or (expected and token != expected):
            raise Unreadable(f"{token} instead of {expected or 'a value'}")
        self.at += 1
        return token

    def sign(self) -> int:
        return -1 if self.token == "-" and self.next() else 1

    def sum(self) -> Any:
        value = self.sign() * self.product()
        while self.token in ("+", "-"):
            value += (-1 if self.next() == "-" else 1) * self.product()
        return value

    def fraction(self) -> Any:
        value = self.sum()
        return value / self.sum() if self.token == "\\over" and self.next() else value

    def product(self) -> Any:
        self.at += self.token == "+"
        value = self.factor()
        while self.token not in _AFTER_TERM:
            token = self.token
            if token in ("\\cdot", "/"):
                self.next()
                other = self.sign() * self.factor()
                if token == "/" and self.token not in _AFTER_TERM and self.token not in _SIGNS:
                    raise Unreadable("a/bc")
                value = value * other if token == "\\cdot" else value / other
            elif (token[0] in "0123456789." and not self._ends(value)) or re.match(r"\{\d", "".join(self.tokens[self.at :])):
                raise Unreadable("digits apart")
            else:
                value *= self.factor()
        return value

    def _ends(self, value: Any) -> bool:
        """Whether digits may follow: 5!2, (n-1)2^n."""
        before = self.tokens[self.at - 1]
        return before == "!" or (
            bool(value.free_symbols) and (before == ")" or self.tokens[self.at + 1 : self.at + 2] == ["^"])
        )

    def factor(self) -> Any:
        whole, start = self.token.isdigit(), self.at + 1
        value, raised = self.primary(), False
        plain = self.token.isdigit() and self.tokens[start + 1 : start + 2] == ["/"]
        if whole and (plain or self.token == "\\frac"):
            part = self.primary()
            part = part / (self.next("/"), self.primary())[1] if plain else part
            if set("".join(self.tokens[start : self.at]).removeprefix("\\frac")) <= set("{}/0123456789"):  # a mixed number
                if not 0 < part < 1 or self.token in ("^", "!"):
                    raise Unreadable("an improper fraction beside an integer")
                return value + part
            self.at = start
        while self.token in ("!", "^", "\\deg"):
            token = self.next()
            if raised and token != "\\deg":
                raise Unreadable("2^3! or 2^3^2")
            if token == "\\deg":
                value *= sympy.pi / 180
            elif token == "^":
                value, raised = value ** (self.sign() * self.primary()), True
            else:
                value = sympy.factorial2(value) if self.token == "!" and self.next() else sympy.factorial(value)
        return value

    def argument(self) -> Any:
        """TeX's argument: a group or a single token, of a number its first digit."""
        if self.token.isdigit():
            self.tokens[self.at : self.at + 1] = [self.token[0], *filter(None, [self.token[1:]])]
        return self.primary()

    def primary(self) -> Any:
        token = self.next()
        if token[0].isdigit() or (token[0] == "." and token[1:].isdigit()):
            return sympy.Rational(token)
        if token in _BRACKETS:
            value = self.fraction()
            if self.token == "\\choose" and self.next():
                value = sympy.binomial(value, self.sum())
            self.next(_BRACKETS[token])
            return _MEANING[token](value) if token in _MEANING else value
        if token in ("\\frac", "\\binom"):
            top, bottom = self.argument(), self.argument()
            return top / bottom if token == "\\frac" else sympy.binomial(top, bottom)
        if token == "\\sqrt":
            degree = self.primary() if self.token == "[" else 2
            value = self.argument()
            odd = value.is_negative and S(degree).is_odd  # of which sympy takes a complex root
            return -((-value) ** (S.One / degree)) if odd else value ** (S.One / degree)
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token in self.functions and self.token == "(":
            return sympy.Function(token)(self.primary())
        if token in _CONSTANTS or _SYMBOL.fullmatch(token):
            return _CONSTANTS.get(token, sympy.Symbol(token))
        raise Unreadable(token)

    def function(self, name: str) -> Any:
        """The value of a named function. log without a base has base 10, as lg has."""
        power, base = 1, None
        while self.token in ("^", "_"):
            if self.next() == "^":
                power = self.sign() * self.primary()
            else:
                base = self.argument()
        values = self.arguments()
        if name in _SEVERAL and len(values) == 1:
            raise Unreadable(f"\\{name} of one")
        if power == -1 and name in ("sin", "cos", "tan"):
            name, power = "a" + name, 1
        if not S(power).is_positive or (base is not None and name != "log"):
            raise Unreadable(f"\\{name} with power {power} and base {base}")
        if name in ("log", "lg", "ln"):
            return (sympy.log(*values) / sympy.log({"ln": S.Exp1}.get(name, 10) if base is None else base)) ** power
        called = _SEVERAL[name] if name in _SEVERAL else getattr(sympy, name.replace("arc", "a"))
        return S(called(*values)) ** power

    def arguments(self) -> list[Any]:
        if self.token in ("(", "{", "\\{"):
            closing = _BRACKETS[self.next()]
            values = [self.sum()]
            while self.token == "," and self.next():
                values.append(self.sum())
            self.next(closing)
            if self.token == "^":
                raise Unreadable("\\sin(x)^2")
            return values
        value = self.sign() * self.factor()
        while self.token not in _AFTER_TERM and self.token not in _SIGNS and self.token[1:] not in FUNCTIONS:
            if self.token in _BRACKETS or self.token[0].isdigit():
                raise Unreadable("\\sin x (y)")
            value *= self.factor()
        if self.token in ("/", "\\cdot") and self.tokens[self.at + 1][1:] not in FUNCTIONS:
            raise Unreadable("\\sin x/2")
        return [value]


def _steps(value: Any) -> bool:
    """Whether its letters stand for integers: floors, double factorials, (-1)^n."""
    return value.has(*_STEPS) or any(power.base.is_negative and power.exp.free_symbols for power in value.atoms(sympy.Pow))


def _bent(value: Any) -> bool:
    """Whether it may go on otherwise beyond some point: a floor, an absolute value, a maximum, a root."""
    roots = (power for power in value.atoms(sympy.Pow) if power.exp.is_Rational and not power.exp.is_Integer)
    return value.has(*_BENT) or any(power.base.free_symbols for power in roots)


def _edges(a: Any, b: Any, symbols: list[Any], counts: bool) -> list[dict[Any, Any]]:
    """Points beside those where a bent formula may bend: its numbers, their sums, differences and products; and far away."""
    numbers = {abs(part) for value in (a, b) for number in value.atoms(sympy.Rational) for part in (number.p, number.q)}
    small = sorted(number for number in numbers | {0, 1} if number < 10**6)[:12]
    near = {c for x in small for y in small for c in (x + y, x - y, x * y)}
    edges = {edge for c in near for edge in (c - 1, c, c + 1, -c) if edge >= 0 or not counts}
    chosen = [sympy.Integer(edge) for edge in sorted(edges, key=lambda c: (abs(c), c))]
    chosen = chosen[:: len(chosen) * len(symbols) // _MOST_EDGES + 1]
    if not any(value.has(*_GROWING) or any(p.exp.free_symbols for p in value.atoms(sympy.Pow)) for value in (a, b)):
        chosen += [sympy.Integer(sign * (10**7 + 3)) for sign in ((1,) if counts else (1, -1))]
    usual = dict(zip(symbols, (_INTEGERS if counts else _POINTS)[0]))
    return [{**usual, symbol: edge} for symbol in symbols for edge in chosen]


def _values(a: Any, b: Any, points: list[dict[Any, Any]]) -> list[tuple[Any, Any]]:
    """Both values at the points at which both have one. Where neither is real, neither was meant, unless an i is written."""
    pairs = [(a.evalf(_DIGITS, subs=at), b.evalf(_DIGITS, subs=at)) for at in points]
    pairs = [(x, y) for x, y in pairs if x.is_number and y.is_number and x.is_finite and y.is_finite]
    if a.has(S.ImaginaryUnit) or b.has(S.ImaginaryUnit):
        return pairs
    return [(x, y) for x, y in pairs if x.is_real or y.is_real]


def _differ(x: Any, y: Any) -> bool:
    return bool(abs(x - y) > sympy.Float(10) ** (5 - _DIGITS) * max(abs(x), abs(y)))


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal: at points first, which refutes soon; then exactly, to more digits than a text can hide.

    A decimal of six digits or more also equals the irrational number that it rounds.
    """
    if a == b:
        return True
    if a.is_infinite or b.is_infinite or (a.is_Rational and b.is_Rational):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    counts = (_steps(a) or _steps(b)) and {symbol.name for symbol in symbols} <= {"k", "m", "n"}
    points = [dict(zip(symbols, point)) for point in ((_INTEGERS if counts else _POINTS) if symbols else [[]])]
    pairs = _values(a, b, points)
    if not pairs:
        raise Unreadable(f"{a} or {b} has no value")
    for x, y in pairs:
        if _differ(x, y):
            decimals = [
                z
                for z in (a, b)
                if z.is_Rational and z.q > 1 and 10**20 % z.q == 0 and len(str(abs(z * 10**20)).rstrip("0")) > 5
            ]
            return bool(decimals and not symbols and abs(x - y) <= _DECIMAL_TOLERANCE * abs(x))
    if symbols and (_bent(a) or _bent(b)):
        beside = _values(a, b, _edges(a, b, symbols, counts))
        if any(_differ(x, y) and max(abs(x), abs(y)) > _ROUNDED for x, y in beside):
            return False
    difference = sympy.expand(a - b).subs(points[0])
    digits = 2 * _DIGITS if symbols else _MAX_DIGITS
    return bool(
        difference == 0 if difference.is_Rational else abs(difference.evalf(2, maxn=digits)) < sympy.Float(10) ** (10 - digits)
    )
