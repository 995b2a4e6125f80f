"""Whether two spelled answers are equal: their choices, words, units and lists here, their formulas by `algebra`. Pure.

Equality is symmetric. A text is read whole or not at all: a part that cannot be read makes the verdict False and sets `unread`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from rstar2_megatron.reward.spelling import FUNCTIONS, NUMBER_WORDS, UPRIGHT

Algebra = Callable[[str, str, str], bool | None]
"""(a, b, sign) -> whether a = b or, with the sign of a relation, `a sign 0` and `b sign 0` are multiples; None when unread."""

_JOINTS = (",", "and", "or")
_RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in")
_NAME = (  # x, \angle ABC, AB, \alpha, a_{n}, f(x), \text{cost}; \sin A, |AB|, \vec{a} \cdot \vec{b}, m + n, AB : BC
    rf"(?:[a-zA-Z]|\\angle [A-Z]{{1,3}}|[A-Z]{{2,3}}|\\(?!infty|pi)[a-z]+|\S+\{{\S+\}}|[a-zA-Z]\(\S*\)|{UPRIGHT}\w+|"
    r"\\(?:sin|cos|tan) (?:[A-Z]|\\angle [A-Z]{1,3}|\\[a-z]+)|\| (?:z|[A-Z]{1,2}|\\vec\{\w+\}) \||"
    r"[a-z](?: \^ \{ - 1 \}|(?: ')+)(?: \( \w \))?|\\frac \{ d\w? \} \{ d\w \}|\\frac \{ [A-Z]{2} \} \{ [A-Z]{2} \}|"
    r"\\vec\{\w+\} \\cdot \\vec\{\w+\}|[a-z](?: \+ [a-z])+|[A-Z]{2} : [A-Z]{2}|\\det [A-Z]|\\frac [a-z] ?[a-z]|"
    r"[a-z](?: : [a-z])+)"
)
_SIDE = r"(?:(?!\\[lg]e )[^<>=])+"
_ROOTS = re.compile(r"(x|z|t|\\lambda)_\{\d(?:\}(?: , \1_\{\d\})+|,2\})")  # x_{1} , x_{2} and x_{1,2}
_POINT = r"(?:[A-Z]{1,2}|[A-Z]_\S+|\\vec\S+)"
_ORDERED = re.compile(rf"{_ROOTS.pattern} = |[^=]+ , [^=]+ = |{_POINT} = \(| = ")  # or no name
_REWRITTEN = [  # one spelling for sets and inequalities: x \in and an interval
    (r"\\?\{ (?:\w|\w \\in \\mathbb\{R\}) (?:\||:) (.+) \\?\}", r"\1"),
    (r"\{ ((?!.*\\choose).*) \}", r"\1"),
    (r"(?![CP] \( [kmnr] , \w \))([A-DMO-RT]) (\( [^()]+ , [^()]+ \))", r"\1 = \2"),  # a point; C(n, 2) is a count
    (r"\\mathbb\{R\}", r"( - \\infty , \\infty )"),
    (r"\\mathbb\{R\} \\setminus \\\{ ([^,]+) \\\}", r"( - \\infty , \1 ) \\cup ( \1 , \\infty )"),
    (rf"({_NAME}) \\ne \\pm ({_SIDE})", r"\1 \\ne \2 , \1 \\ne - \2"),
    (rf"({_NAME}) \\ne ({_SIDE})", r"\1 < \2 or \2 < \1"),
    (rf"\| ({_NAME}) \| (<|\\le) ({_SIDE})", r"- ( \3 ) \2 \1 \2 \3"),
    (rf"({_SIDE}) (<|\\le) \| ({_NAME}) \|", r"\3 \2 - ( \1 ) or \1 \2 \3"),
    (rf"({_NAME}) (<|\\le) ({_SIDE})", r"- \\infty < \1 \2 \3"),
    (rf"({_SIDE}) (<|\\le) ({_NAME})", r"\1 \2 \3 < \\infty"),
    (rf"({_SIDE}) < ({_NAME}) (<|\\le) ({_SIDE})", r"\2 \\in ( \1 , \4 \3"),
    (rf"({_SIDE}) \\le ({_NAME}) (<|\\le) ({_SIDE})", r"\2 \\in [ \1 , \4 \3"),
    (r"(\S+ \\in . .+ , .+) <", r"\1 )"),
    (r"(\S+ \\in . .+ , .+) \\le", r"\1 ]"),
    (r"(?!\d\d? : [0-5]\d(?: : [0-5]\d|$| .m$))([^:=]+) : ([^:=]+)", r"( \1 ) / ( \2 )"),  # a ratio, unless it may be a time
    (r"(?!\d\d? : [0-5]\d : [0-5]\d$)([^:=]+) : ([^:=]+) : ([^:=]+)", r"( ( \1 ) / ( \2 ) , ( \2 ) / ( \3 ) )"),
]

_LETTER = f"{UPRIGHT}?([A-Z])"
_JUDGED = (  # the second words may begin a choice's text: C: no real roots
    r"(?:is|yes|true|false|wrong|incorrect|not(?! \x01?enough))\b|"
    r"(?:no|none|right|correct|(?:im)?possible|always|never)(?= ?(?:$|[,.;]| \x01?(?:because|since|as)\b))"
)
_CHOICE = re.compile(rf"(?!{UPRIGHT}?[A-Z] ?: {UPRIGHT}?(?i:{_JUDGED}))(?:\( )?{_LETTER} ?(?:$|[).:](?: (.+)|$))")
_JUDGES = re.compile(rf"{_LETTER} [).:] {UPRIGHT}?(?i:{_JUDGED})")
_NO_CHOICE = re.compile(rf"and |, |.*\bor\b|(?:.* )?{_LETTER} [).:]|{_LETTER}(?: ,|$)")
_OPERATOR = re.compile(r"(?:[-+/^_=<>(\[|!',]|\\cdot|\\le|\\ge|\\ne|\\in|\\cup) ")
_WORDS = re.compile(rf"(?:(?:{UPRIGHT}?[A-Za-z]+|[-'\".,])(?: |$))+")

_NUMBER = re.compile(r"[-+]?(?:\d+(?:/0*[1-9]\d*)?|\d*\.\d+)")
_NUMBER_CHARS = 300
IN_BASE = re.compile(r"\(?([0-9A-Fa-f]*\d[0-9A-Fa-f]*|[A-Fa-f]{2,}(?=\)?_\{?16\b))\)?_\{?\(?(\d+)\)?\}?")

_UNIT_RULES = [
    (r"\\cdot", ""), (r"\^ \{ - (\d) \}", r"^ -\1"), ("mph", "mi / h"), ("mpg", "mi / gal"), ("kph", "km / h"),
    ("per cent", "%"), ("per", "/"),
    ("cc", "cm ^ 3"), (r"(?:square|sq)(?: \.)? (\w+)", r"\1 ^ 2"), (r"(?:cubic|cu)(?: \.)? (\w+)", r"\1 ^ 3"),
    (r"(\w+) squared", r"\1 ^ 2"), (r"(\w+) cubed", r"\1 ^ 3"), ("squared|cubed", "?"), (r"(\w+) \^ -(?:1 |1$)", r"/ \1"),
    (r"(\w+) \^ -(\d)", r"/ \1 ^ \2"),
]  # fmt: skip
_UNIT = re.compile(r"(?:%|[a-zA-Z]{2,}|[mghslcfnjvwa])(?: (?:/ )?(?:[a-zA-Z]{2,}|[mghslcfnjvwa])| \^ \d)*")
_SYMBOLS = {
    word: symbol
    for symbol, words in {
        "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch inche", "ft": "foot feet",
        "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound", "ml": "milliliter",
        "l": "liter L", "s": "sec second", "min": "minute", "h": "hr hour", "deg": "degree \\deg", "c": "celsius C",
        "f": "fahrenheit F", "n": "newton N", "j": "joule J", "v": "volt V", "w": "watt W", "a": "ampere amp A", "hz": "hertz",
        "dollar": "USD", "euro": "EUR", "oz": "ounce", "gal": "gallon", "yr": "year", "rad": "radian",
    }.items()
    for word in words.split()
}  # fmt: skip
_OTHERS = "sq cu per dm euro yen cent day week ton unit mph kph mpg way cup"  # longer words are units by their look
_SHORT = frozenset(_OTHERS.split()) | set(_SYMBOLS.values())
_NO_UNIT_WORDS = f"""
not nor to but if when than then more less most least only about around over under between above below negative dozen gross pair
score half halve third quarter th st nd rd plus minus divided multiplied of mod modulo base factorial root infinity none no is
are equal even odd other any all wrong right false true correct incorrect permille promille ppm kilo lakh crore
pi bn doubled halved tripled quadrupled twice googol imaginary reciprocal opposite conjugate inverse power choose greater
smaller larger times as excluded rejected reduced approximately rounded unknown exceeded impossible upward upwards
wan remainder minimum maximum maybe perhaps almost unless because without except neither either both inclusive exclusive
onwards something several few many couple double recurring repeating added subtracted increased decreased omitted folded
repeated inverted negated rooted truncated estimated roughly nearly possibly probably barely hardly binary octal hexadecimal
fewer {NUMBER_WORDS}
"""
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split())
_NUMERAL = re.compile(  # million, thirteen, fifty, and parts: eighths, thousandths
    r".*folds?|(?:.+teen|hundred|thousand|.+illion|ten|eleven|four|fif|six|seven|eigh|nin|twelf)(?:th)?|"
    r"(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ieth)"
)


@dataclass
class Comparison:
    """`unread` is set when `algebra` could not read something that the verdict needed."""

    algebra: Algebra
    unread: bool = False

    def same(self, a: str, b: str) -> bool:
        if a.replace(UPRIGHT, "") == b.replace(UPRIGHT, ""):
            return bool(a)
        ours, theirs = choice(a), choice(b)
        if ours and theirs:
            return ours[0] == theirs[0] and (not ours[1] or not theirs[1] or self.same(ours[1], theirs[1]))
        if (ours and ours[1]) or (theirs and theirs[1]):
            return self.same(ours[1] if ours else a, theirs[1] if theirs else b)
        letters = (_letters(a), _letters(b)) if " " in a + b else ([], [])
        if all(letters) or "or" in letters[0] + letters[1]:
            return letters[0] == letters[1]
        if any(letters) and "(" in (a[:1], b[:1]) and not _JUDGES.search(f"{a} {b}") and self.same_parts(a, b):
            return True  # (A) 12, (C) 15 beside A, C
        if (words := _words(a)) or _words(b):
            return words == _words(b)
        conditions = _conditions(a), _conditions(b)
        if all(conditions) and _match(*conditions, lambda x, y: x[0] == y[0] and self.formulas(x[1], y[1], x[0])):
            return True
        (our_name, our_value), (their_name, their_value) = self.named(a), self.named(b)
        if (not our_name) != (not their_name):  # the other side gives values alone, in this one's order
            our_value, their_value = self.named(a, as_written=True)[1], self.named(b, as_written=True)[1]
        named = (our_name, our_value), (their_name, their_value)
        unordered = not all(_ORDERED.match(f"{name} = {value}") for name, value in named)
        if our_name != their_name:
            (our_name, our_value), (their_name, their_value) = map(_of_roots, (our_name, their_name), (our_value, their_value))
        tokens = f"{our_value} {their_value}".split()
        unordered = unordered or not {"or", "\\pm"}.isdisjoint(tokens) or ("\\infty" in tokens and tokens.count(",") == 2)
        if unordered and {_parts(our_value)[0], _parts(their_value)[0]} == {",", "()"}:  # x = 1, 5 beside 1 < x < 5
            return False
        if our_name and their_name and our_name != their_name and {our_name, their_name} != {"y", "f(x)"}:
            return False
        return self.same(our_value, their_value) if (our_value, their_value) != (a, b) else self.same_parts(a, b)

    def same_parts(self, a: str, b: str) -> bool:
        """Tuples in order; lists, sets, unions and cases in any order; a list is like a tuple in its order, and like a set."""
        (kind, ours), (other, theirs) = _parts(a), _parts(b)
        kinds = {kind, other}
        if kinds == {""}:
            return self.same_values(a, b)
        if "{}" in kinds and not kinds <= {",", "{}"}:
            elements, whole = (ours, b) if kind == "{}" else (theirs, a)
            return len(elements) == 1 and self.same_elements(elements[0], whole)
        if kinds <= {",", "{}"} or kinds in ({"cup"}, {"without"}):
            if "{}" in kinds:
                ours, theirs = self.distinct(ours), self.distinct(theirs)
            return _match(ours, theirs, self.same_elements)
        if kinds == {"cases"}:
            rows = [[_split(row, "&" if "&" in row else ",")[0] for row in part] for part in (ours, theirs)]
            return _match(rows[0], rows[1], lambda x, y: len(x) == len(y) and all(map(self.same, x, y)))
        if kinds == {"()", f"{len(ours)} rows"} and len(ours) > 2:  # a column; two may be an interval's ends
            kinds = {"()"}
        return (len(kinds) == 1 or kinds == {",", "()"}) and len(ours) == len(theirs) and all(map(self.same, ours, theirs))

    def same_values(self, a: str, b: str) -> bool:
        digits = [compact(text.replace(UPRIGHT, "")) for text in (a, b)]
        based = [IN_BASE.fullmatch(text) for text in digits]
        if any(match and match[2] == "10" for match in based):
            based = [match or IN_BASE.fullmatch(f"{text}_10") for match, text in zip(based, digits)]
        if any(based):
            return all(based) and in_base(*based[0].groups()) == in_base(*based[1].groups())  # type: ignore[union-attr]
        (a, our_unit), (b, their_unit) = split_unit(a), split_unit(b)
        if not (our_unit and their_unit):  # a letter is a unit where the other side says so: 25 m^2 beside 25 square meters
            a, b = a.removesuffix(f" {their_unit}"), b.removesuffix(f" {our_unit}")
        if our_unit and their_unit and our_unit != their_unit:
            return False
        if {our_unit, their_unit} == {"", "deg"} and re.search(r"\\pi|\\deg", a + b):  # 45 \\deg beside \\pi / 4
            a, b = (f"( {text} ) \\deg" if unit else text for text, unit in ((a, our_unit), (b, their_unit)))
        x, y = (number(f"{text}/100" if unit == "%" else text) for text, unit in ((a, our_unit), (b, their_unit)))
        if x is not None and y is not None:
            return x == y
        return self.formulas(*(f"( {text} ) / 100" if unit == "%" else text for text, unit in ((a, our_unit), (b, their_unit))))

    def formulas(self, a: str, b: str, sign: str = "") -> bool:
        verdict = self.algebra(a, b, sign)
        self.unread = self.unread or verdict is None
        return bool(verdict)

    def distinct(self, elements: list[str]) -> list[str]:
        return [x for at, x in enumerate(elements) if not any(self.same_elements(x, y) for y in elements[:at])]

    def same_elements(self, a: str, b: str) -> bool:
        """Of lists and sets, where {1} is not 1."""
        return (_parts(a)[0] == "{}") == (_parts(b)[0] == "{}") and self.same(a, b)

    def named(self, text: str, *, as_written: bool = False) -> tuple[str, str]:
        """("x", value) of `x = value`, `x \\in set` and an inequality of x, whose value is its interval; ("", text) without.

        The values of several names are in the order of the names or, `as_written`, in that of the text but for x, y and z.
        """
        if len(cases := _split(text, ("or",))[0]) > 1:  # x = 1, y = 2 or x = 3, y = 4
            pairs = [self.named(case) for case in cases]
            if "," in pairs[0][0] and {name for name, _ in pairs} == {pairs[0][0]}:
                return pairs[0][0], " , ".join(value for _, value in pairs)
        elements, joints = _split(text, _JOINTS)
        if unequal := re.match(rf"{_NAME} \\ne ", text):  # x \ne 0, 1
            elements = [x if "\\ne" in x or _sides(x)[1] else unequal[0] + x for x in elements]
        if len(elements) > 1 and elements[-1].startswith("\\bound "):
            name, value = self.named(" , ".join(elements[:-1]))
            return name, f"{value} , {elements[-1]}"
        if len(elements) > 1:
            labelled = [choice(element) or ("", "") for element in elements]  # A: 3, B: 1 is A = 3, B = 1
            named = labelled if all(map(all, labelled)) else [self.named(element) for element in elements]
            reals = (named[0][0], "( - \\infty , \\infty )")
            if len(named) == 2 and named[0][0] == named[1][0] and reals in named and "or" not in joints:
                return next((x for x in named if x != reals), reals)  # x \in \mathbb{R}, x \ne 0
            first, names, values = named[0][0], {name for name, _ in named}, [value for _, value in named]
            if "or" in joints and len(names) > 1 and "" not in names:  # x = 0 or y = 0
                return " or ".join(sorted(names)), f"\\{{ {' , '.join(elements)} \\}}"
            if len(names) == len(named) and "" not in names:  # x = 1, y = 2
                named = named if as_written and not names <= {"x", "y", "z"} else sorted(named)
                return " , ".join(sorted(names)), f"( {' , '.join(value for _, value in named)} )"
            out = [match[1] for x in elements if (match := re.fullmatch(rf"{_NAME} \\ne ({_SIDE})", x))]
            if "or" not in joints and names == {first} and len(out) == len(elements):  # x \ne 1, x \ne 2
                return first, f"\\mathbb{{R}} \\setminus \\{{ {' , '.join(out)} \\}}"
            mixed = {"and", "or"} <= {*joints}
            if not first or not names <= {first, ""} or mixed or any(not n and _conditions(value) for n, value in named):
                return "", text
            ranges = [_parts(value)[0] in ("()", "(]", "[)", "[]", "cup", "without") and "," not in first for value in values]
            if joints[-1] == "or" and any(ranges):
                return first, " \\cup ".join(v if is_range else f"\\{{ {v} \\}}" for v, is_range in zip(values, ranges))
            if all(ranges) and len(values) == 2 and not all("\\cup" in v for v in values):
                # x > a, then x \ne b, then x < c: the end of one and the begin of the next leave the interval that is in both
                in_order = " ".join(sorted(values, key=lambda v: (v.startswith("( - \\infty"), "\\cup" not in v)))
                if half_lines := re.fullmatch(r"(.+ ,) \\infty \) \( - \\infty ,(.+)", in_order):
                    return first, half_lines[1] + half_lines[2]
                if inner := re.fullmatch(r"(. .+) ,( .+ .) \( - \\infty (, (.+) \) \\cup \( \4 ,) \\infty \)", in_order):
                    return first, f"{inner[1]} {inner[3]}{inner[2]}"
            return first, " , ".join(values)
        for pattern, spelled in _REWRITTEN:
            if match := re.fullmatch(pattern, text):
                return self.named(match.expand(spelled))
        sides, signs = _sides(text)
        if signs and set(signs) <= {">", "\\ge"}:
            turned = " ".join(token for pair in zip(sides[::-1], [*signs[::-1], ""]) for token in pair)
            return self.named(turned.replace(">", "<").replace("\\ge", "\\le").strip())
        if len(sides) > 2 and set(signs) == {"="} and all(re.fullmatch(_NAME, side) for side in sides[:-1]):  # x = y = 1
            return self.named(" , ".join(f"{side} = {sides[-1]}" for side in sides[:-1]))
        equal = set(signs) == {"="} and all(self.same(side, sides[-1]) for side in sides[1:])
        for name, value in ((sides[0], sides[-1]), (sides[-1], sides[0]))[: 1 + (signs == ["="])]:
            simple = re.fullmatch(rf"{_NAME}|\( {_NAME}(?: , {_NAME})* \)", name) and name not in value.split()
            if simple and (equal or signs == ["\\in"]):
                return name.removeprefix("( ").removesuffix(" )"), value
        return "", sides[-1] if equal and self.same(sides[0], sides[-1]) else text


# ----------------------------------------------------------------------------------------------- structure


def _split(text: str, separators: Iterable[str]) -> tuple[list[str], list[str]]:
    """The parts between separators outside brackets, and the separators."""
    parts: list[list[str]] = [[]]
    between: list[str] = []
    depth = 0
    for token in text.split():
        depth += token in ("(", "[", "{", "\\{") or token.startswith("\\begin")
        depth -= token in (")", "]", "}", "\\}") or token.startswith("\\end")
        if depth or token not in separators:
            parts[-1].append(token)
        else:
            parts.append([])
            between.append(token)
    return [" ".join(part) for part in parts], between


def _parts(text: str) -> tuple[str, list[str]]:
    """("(]", elements) of what is in brackets, (",", elements) of a list, ("cup", sets), ("2 rows", entries); ("", [text])."""
    for kind, separators in ((",", _JOINTS), ("cup", ("\\cup",))):
        if len(elements := _split(text, separators)[0]) > 1:
            if kind == "cup" and (points := _gaps(elements)):
                return "without", points
            return kind, [reading for element in elements for reading in _readings(element)]
    if without := re.fullmatch(r"\\mathbb\{R\} \\setminus \\\{ (.*) \\\}", text):
        return "without", [reading for element in _split(without[1], _JOINTS)[0] for reading in _readings(element)]
    matrix = re.fullmatch(
        r"((?:(?!\\begin)\S+ )*?)[(\[]? ?\\begin\{(p?matrix|smallmatrix|array|cases)\} ((?:(?!\\begin).)*) \\end\{\2\} ?[)\]]?",
        text,
    )
    if matrix and not re.search(r"[-+]", matrix[1].removeprefix("- ")):  # a sum before it is none of its factors
        rows = [row for row in _split(matrix[3], ("\\\\",))[0] if row]
        if matrix[2] == "cases":
            return ("cases", rows) if not matrix[1] else ("", [text])
        entries = [entry for row in rows for entry in _split(row, ("&",))[0]]
        return f"{len(rows)} rows", [f"( {matrix[1]}) ( {entry} )" for entry in entries] if matrix[1] else entries
    if text in ("\\emptyset", "\\{ \\}"):
        return "{}", []
    opening, *inner, closing = text.split() if " " in text else ("", "")
    whole = len(_split(f"{opening} {' '.join(inner)} \x00", ("\x00",))[0]) == 1
    if opening in ("(", "[", "\\{") and closing in (")", "]", "\\}") and whole:
        elements = _split(" ".join(inner), _JOINTS)[0]
        if opening == "\\{":
            return "{}", [reading for element in elements for reading in _readings(element)]
        if opening == "(" and len(points := _readings(text)) > 1:  # (\pm 2, 0)
            return ",", points
        if opening == "[" or len(elements) > 1:
            return opening + closing, elements
    readings = _readings(text)
    return ("," if len(readings) > 1 else ""), readings


def _of_roots(name: str, value: str) -> tuple[str, str]:
    """("x", "1 , 2") of the values of x_1 and x_2."""
    match = _ROOTS.fullmatch(name)
    return (match[1], value[2:-2] if " , " in name else value) if match else (name, value)


def _gaps(sets: list[str]) -> list[str]:
    """The points that a union of open intervals leaves out of all numbers; empty where it leaves out more."""
    ends = [end for interval in sets if interval[:2] + interval[-2:] == "(  )" for end in _split(interval[2:-2], (",",))[0]]
    whole = len(ends) == 2 * len(sets) and (ends[0], ends[-1].strip("+ ")) == ("- \\infty", "\\infty")
    return ends[1:-1:2] if whole and ends[1:-1:2] == ends[2:-1:2] else []


def _readings(text: str) -> list[str]:
    """Both readings of an element with \\pm."""
    if text.count("\\pm") != 1:
        return [text]
    return [text.replace("\\pm", a).replace("\\mp", b) for a, b in ("+-", "-+")]


def _match(left: list, right: list, same: Callable) -> bool:  # type: ignore[type-arg]
    """Whether each element has an equal one of its own."""
    rest = list(right)
    for x in left:
        at = next((at for at, y in enumerate(rest) if same(x, y)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _sides(text: str) -> tuple[list[str], list[str]]:
    sides, signs = _split(text, _RELATIONS)
    return (sides, signs) if all(sides) else ([text], [])


def _conditions(text: str) -> list[tuple[str, str]]:
    """(sign, left - right) of each comparison of a chain; > and >= are turned."""
    sides, signs = _sides(text)
    if "\\in" in signs or any(_parts(side)[0] for side in sides):
        return []
    turned = {">": "<", "\\ge": "\\le"}
    pairs = [(turned[s], y, x) if s in turned else (s, x, y) for x, y, s in zip(sides, sides[1:], signs)]
    return [(s, f"{x} - ( {y} )") for s, x, y in pairs]


# --------------------------------------------------------------------------------------- choices, words, units


def choice(text: str) -> tuple[str, str] | None:
    """("D", "42") of `(D) 42`, `D. 42`, `D) 42` and `D: 42`; ("D", "") of `D`. None for anything else."""
    match = _CHOICE.fullmatch(text)
    if not match or _NO_CHOICE.match(rest := match[2] or ""):
        return None
    formula = _OPERATOR.match(rest) and (rest[0] == "/" or not text.lstrip("( ").startswith(UPRIGHT))
    return None if formula else (match[1], rest)


def _words(text: str) -> list[str]:
    """The words of a text answer ("Monday", "no solution"); empty for anything else."""
    is_text = _WORDS.fullmatch(text) and not any(map(is_product, text.split())) and "and" not in text.split() and text[0] != "-"
    words = re.findall("[a-z]+", text.casefold()) if is_text else []
    articles = ("a", "an", "the")  # before a word: the A of "Plan A" is none
    words = [word for word, after in zip(words, [*words[1:], ""]) if word not in articles or not after]
    return words if max(map(len, words), default=0) >= (2 if UPRIGHT in text or words == ["no"] else 3) else []


def is_product(word: str) -> bool:
    """Whether different small letters are factors, as in abc and mgh, and no word."""
    return len(set(word)) == len(word) and bool(
        re.fullmatch(r"[a-e]{3,5}|[w-z]{3,4}|[b-df-hj-np-tv-xz][b-df-hj-np-tv-xzA-Z]{2,}", word)
    )


def _letters(text: str) -> list[str]:
    """The choices of `ACD` and of `A, C and D`, and what leaves open which; empty for anything else."""
    several = re.fullmatch(
        r"[A-H]{2,}|[A-H](?:(?: ,| and| or)+ [A-H])+", re.sub(rf"{UPRIGHT}|\( (?=\S* \))|(?<=[A-H]) \)", "", text)
    )
    return sorted(re.findall(r"[A-H]|\bor\b", text)) if several else []


def number(text: str) -> Fraction | None:
    """The exact value of a plain number; None for anything else, and for a number of more digits than Python reads at once."""
    text = compact(re.sub(r"\\frac (?:(\d)|\{ (\d+) \}) ?(?:(\d)(?!\d)|\{ (\d+) \})", r"\1\2/\3\4", text))
    return Fraction(text) if _NUMBER.fullmatch(text) and len(text) <= _NUMBER_CHARS else None


def in_base(digits: str, base: str) -> int | tuple[str, str]:
    """The value, or the text where no such number is."""
    try:
        return int(digits, int(base)) if len(digits) <= _NUMBER_CHARS and 2 <= int(base) <= 36 else (digits, base)
    except ValueError:
        return digits.casefold(), base


def compact(text: str) -> str:
    """The text without spaces; "" where that would join digits."""
    return "" if re.search(r"\d [\d.]", text) else text.replace(" ", "")


def split_unit(text: str) -> tuple[str, str]:
    """("45", "cm ^ 2") of `45 cm^2` and `45 square centimeters`; (text, "") without a unit."""
    words = re.sub(r"^([-+] )?(dollar|euro|pound|yen|rupee) (.+?)(?= \x01?per |$)", r"\1\3 \2", text).split()
    for at in range(1, len(words)):
        word = words[at].lstrip(UPRIGHT)
        noun = len(word) >= 5 and not is_product(word) and word.isalpha() and bool(set(word) & set("aeiou"))
        known = word in ("%", "\\deg") or (len(word) > 1 and _name(word) in _SHORT)
        in_function = word == "\\deg" and any(other[1:] in FUNCTIONS for other in words)
        if (noun or known or word != words[at]) and not in_function and not _OPERATOR.match(words[at - 1] + " "):
            unit = _unit(" ".join(words[at:]).replace(UPRIGHT, ""))
            return (" ".join(words[:at]), unit) if unit else (text, "")
    return text, ""


def _unit(text: str) -> str:
    """One spelling of a unit, "m / s ^ 2" for `meters per second squared`; "" where it is none."""
    names = {name for word in text.split() for name in (word.lower(), _name(word))}
    if _NO_UNITS & names or any(map(_NUMERAL.fullmatch, names)):
        return ""
    for pattern, spelled in _UNIT_RULES:
        text = re.sub(rf"(?<!\S){pattern}(?!\S)", spelled, text)
    text = " ".join(map(_name, text.split()))
    return text if _UNIT.fullmatch(text) else ""


def _name(word: str) -> str:
    """One name for a unit, `h` for `hours` and `hrs`."""
    if len(word) > 1:
        low = word.lower()
        word = low if len(word) > 3 or low in _SHORT else word  # MW is no mW
        word = re.sub("(?<=met|lit)re", "er", word)
        word = word[:-1] if len(word) > 2 and word[-1] == "s" and word != "celsius" else word
    return _SYMBOLS.get(word, word)
