"""An answer as LaTeX tokens with a space between them. Pure.

What only formats is dropped, and tokens of the same meaning become one. What is not known stays a token, so that it can be
refused. Digits that anything parted stay two numbers.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction

UPRIGHT = "\x01"
"""Begins a word that was inside `\\text{}`: a unit, a name or a choice, never a product of letters."""
_NAMED = "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan asin acos atan log ln lg exp sqrt max min gcd lcm"
FUNCTIONS = frozenset(_NAMED.split())

_SIGNS = {
    "−–‒﹣": "-", "×✕·⋅∙": "\\cdot ", "÷⁄": "/", "∞": "\\infty ", "≤≦⩽": "\\le ", "≥≧⩾": "\\ge ", "≠": "\\ne ", "√": "\\sqrt ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "°º˚": "\\deg ", "±": "\\pm ", "′’": "'", "″“”": '"',
    "\u00a0\u2009\u202f\u2002\u2003": " ", "‐‑": "-", "℃": "^\\circ\\text{C}", "℉": "^\\circ\\text{F}", "㎝": "\\text{cm}",
    "㎡": "\\text{m}^2", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ",
    "。": ".", "…⋯": "\\ldots ", "、": ",", "∶": ":", "→": "\\to ", "⇒": "\\Rightarrow ", "∖": "\\setminus ", "∨": "\\lor ",
    "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    UPRIGHT + "\u200b\ufeff": "",
}  # fmt: skip
_CHARACTERS = {0xFF01 + i: chr(0x21 + i) for i in range(94)} | {ord(c): tex for chars, tex in _SIGNS.items() for c in chars}
_SAME = {
    "\\frac": "\\dfrac \\tfrac \\cfrac", "\\binom": "\\dbinom \\tbinom", "<": "\\lt", ">": "\\gt",
    "\\le": "\\leq \\leqslant <=", "\\ge": "\\geq \\geqslant >=", "\\ne": "\\neq !=", "(": "\\langle", ")": "\\rangle",
    "\\{": "\\lbrace", "\\}": "\\rbrace",
    "|": "\\lvert \\rvert \\vert \\mid", "\\cdot": "* \\times \\ast", "/": "\\div", "^": "**", "%": "\\% percent percentage",
    "\\to": "\\rightarrow \\longrightarrow", "\\Rightarrow": "\\implies \\Longrightarrow", "\\emptyset": "\\varnothing",
    "\\pmod": "\\mod \\bmod mod", "=": "\\equiv ≡",
    "\\ldots": "\\dots \\cdots \\dotsc \\dotsb ...", "\\setminus": "\\backslash \\smallsetminus", ",": "; where for with",
    "\\epsilon": "\\varepsilon", "\\phi": "\\varphi", "\\cup": "\\bigcup", "\\cap": "\\bigcap",
    "\\infty": "infinity inf oo", "\\tan": "tg \\tg", "\\cot": "ctg \\ctg", "\\arctan": "arctg \\arctg", "\\arccot": "arcctg",
    "and": "\\land \\wedge 且 和", "or": "\\lor \\vee 或", "dollar": "\\$ $", "euro": "€", "pound": "£",
    "yen": "¥ ￥", "rupee": "₹", "cent": "¢",
}  # fmt: skip
_GREEK_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "sigma", "omega", "pi"]  # as tools print them
_ALIASES = {other: token for token, others in _SAME.items() for other in others.split()}
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = NUMBER_WORDS.split()
_PHRASES = {  # by the sign that an answer in words stands for
    sign: re.compile(words)
    for sign, words in {
        "\\emptyset": r"(?:there (?:is|are) )?no (?:real |such )?(?:solution|root)s?|none|(?:the )?empty set",
        "\\mathbb{R}": r"(?:all |the )(?:reals|real numbers?)|real numbers",
        "\\infty": r"positive \\infty",
        "- \\infty": r"negative \\infty",
        "none": r"(?:it |(?:the )?limit )?does not exist|dne",
        **{str(number): word for number, word in enumerate(_NUMBERS)},
    }.items()
}

_MARKDOWN = re.compile(r"(?<!\S)(\*\*\*|\*\*|__|[*_`])\s*([^*_`\s](?:[^`]*?[^*_`\s])?)\s*\1(?!\w)")
_WRAPPING = (
    r"(?:(text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|sf|tt)|emph|mbox|operatorname\*?)|"
    r"mathbf|mathit|boldsymbol|bm|boxed|fbox|underline)"
)
_WRAPPED = re.compile(rf"\\{_WRAPPING}\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_FORMATTING = re.compile(
    r"(?<!\\)\\[()\[\],;:!>\s]|~|\\hspace\*?\s*\{[^{}]*\}|(?<=\\\\)\s*\[-?[\d.]+\s*[a-z]{2}\]|"
    r"\\(?:left|right)\s*\.|\\(?:text)?color\s*\{\w+\}|\\(?:mathbf|mathit|boldsymbol|bm)(?![a-zA-Z])(?!\s*\{)|"
    r"\\(?:left|right|middle|[bB]ig{1,2}[lrm]?|displaystyle|textstyle|limits|q?quad|hfill|large|Large|small)(?![a-zA-Z])"
)
_PRIMES = re.compile(r"\^\s*(\{\s*)?((?:\\prime\s*|')+)(?(1)\})|\\prime(?![a-zA-Z])")
_DEGREE = re.compile(r"\^\s*(\{\s*)?\\circ(?![a-zA-Z])(?(1)\s*\})|\\degree(?![a-zA-Z])")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\\deg\s*(\d+(?:\.\d+)?)\s*'(?!')(?:\s*(\d+(?:\.\d+)?)\s*(?:''|\"))?")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,50})\.(\d{0,50})\s*((?:\\(?:overline|bar|dot)\s*(?:\{\s*\d{1,50}\s*\}|\d))+)")
_PERIOD = re.compile(r"^(\s*-?\s*(?:\d{1,50}\.|0,)\d{0,50})\((\d{1,50})\)\s*$")  # 0.1(6)
_DOTS = re.compile(r"\\dot\s*\{?\s*(\d)\s*\}?\s*(\d{0,50})\s*\\dot\s*(\{\s*)?(\d)(?(3)\s*\})")  # above the first and last digit
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(,|\{,\}|,\\!|\\[,;:]|\\ | |~)\d{3}(?:\1\d{3})*(?!\d|,\d)")
_DECIMAL_COMMA = re.compile(  # where no list can be: none has 05 or -0 in it
    r"(?<![\w.,])(?:0,0\d{1,50}|[1-9]\d{0,50},0\d|(?<=-)(?<![\w)]-)(?<![\w)] -)0,\d{1,50})(?![\d.,])|"
    r"(\\(?:[dt]?frac|sqrt)\s*\{\s*\d+),(?=\d+\s*\})"
)
_PART = r"\s*(?:[-+]\s*)?(?:\d+(?:,(?:\d\d?|\d{4,}))?|\d+\.\d+|\\infty)\s*"
_OF_TWO = re.compile(rf"[(\[]{_PART};{_PART}[)\]]")  # (0,5; 2)
_POWER_OF_TEN = re.compile(
    r"(?<![\w.])(?:(\d+\.\d+(?=e[+-]?\d)|\d+(?=e[+-]?\d\d)|1(?=e[+-]))e([+-]?\d{1,3}))(?![\w.^])"
)  # as Python prints it: 1e3 may be 3e
_CHOOSE = re.compile(  # C_5^2; C_1^2 is a constant's square
    r"(?:\\mathrm\s*\{\s*C\s*\}|(?<![A-Za-z\\])C)\s*_\s*\{?\s*(\d*[nm]|[3-9]|\d\d)\s*\}?\s*\^\s*(?:\{\s*(\w+)\s*\}|(\d+|\w))"
)
_ARRANGE = re.compile(_CHOOSE.pattern.replace("C", "A"))  # A_5^2
_CHOOSE_BEFORE = re.compile(
    r"(?:\{\s*\})?[_^]\s*\{?\s*(\d+|n)\s*\}?\s*(?:\\mathrm\s*\{\s*C\s*\}|C)\s*_\s*(\{\s*)?(\w+)(?(2)\s*\})"
)  # {}_5C_2
_ACCENT = r"\\(?:overline|bar|vec|hat|tilde|mathcal|mathbb)"
GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega|hbar"
_BASE = rf"(?:[A-Za-z]|\\(?:var)?(?i:{GREEK}))"
_ALONE = re.compile(rf"(?<!\\)\{{ (\w|(?!\\(?:frac|binom|{'|'.join(FUNCTIONS)}) )\\[a-z]+) \}}")
_AROUND = re.compile(  # words before an answer; a full stop, a line's end, `only` or `for all x` behind it
    r"^(?:\x01?(?:the|final|correct|answer|option|choice|is) |[:=] )+|"
    r"(?: ?[.,]|(?<!\d) \x01?only| \\\\| (?:, \x01?all|\\forall) \x01?[a-z](?: \\in \S+)?)+$",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    # a letter with its accent or subscript, the value of f
    rf"(?:{_ACCENT}(?![a-zA-Z])|{_BASE}\s*_)\s*(?:\{{[^{{}}]*\}}|\w)|"
    r"[fghFGHPQ]\s*\((?:\s*\w+\s*\)|[^()]*\)(?=\s*=))|"  # as a name; else its argument is a formula
    r"^\s*[a-zTSVN]\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)(?=\s*=)|"  # x(t) = ..., u(x, t) = ...
    r"[ED]\s*\((?:[XY]|\\xi|\\eta)\)|"
    r"\\begin\s*\{array\}\s*\{[^{}]*\}|\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+|\\.|"
    r"\x01?(?:log|[A-Za-z]+(?!\s*_))|\x01?[A-Za-z]|"
    r"\d+(?:\.\d+)?|\.\d+|\.\.\.|<=|>=|!=|\*\*|\S",
    re.DOTALL,
)


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _unwrapped(match: re.Match[str]) -> str:
    upright, content = match.groups()
    return " %s " % (re.sub(r"(?<![\\A-Za-z])[A-Za-z]+", UPRIGHT + r"\g<0>", content) if upright else content)


def _repeating(match: re.Match[str]) -> str:
    """The fraction of a repeating decimal: 0.1\\overline{6} is 1/6."""
    whole, start, period = match[1], match[2], re.sub(r"\D", "", match[3])
    value = Fraction(int(whole + start + period) - int(whole + start), 10 ** len(start) * (10 ** len(period) - 1))
    return f" ({value}) "


def _system(match: re.Match[str]) -> str:
    """Relations that hold together, unless each row is a value and its condition."""
    rows = [re.sub(r"[(\[] [^()\[\]]* [)\]]", "()", row.strip(" ,")) for row in match[1].split("\\\\")]
    case = re.compile(r"(?:(?!\\(?:[lg]e|ne|in) )[^=<>])* , .*(?:[=<>]|\\(?:[lg]e|ne|in) )")
    return match[0] if len(rows) > 1 and all(map(case.match, rows)) else match[1].replace("\\\\", ",")


def _inside(match: re.Match[str]) -> bool:
    """Whether it is in brackets, where a comma parts elements."""
    before = match.string[max(match.start() - 4096, 0) : match.start()]  # as long as an answer: of longer ones in linear time
    return sum(map(before.count, ("(", "[", "\\{"))) > sum(map(before.count, (")", "]", "\\}")))


def _thousands(match: re.Match[str]) -> str:
    """The number without separators. No element of a list begins with 0."""
    parted = match[1] == "," and ",0" not in match.group() and _inside(match)
    return match.group() if parted else re.sub(r"\D", "", match.group())


def _angle(match: re.Match[str]) -> str:
    degrees, minutes, seconds = (Fraction(part or 0) for part in match.groups())
    return f" ({degrees + minutes / 60 + seconds / 3600}) \\deg "


def _spelled(token: str) -> str:
    bare = token.lstrip(UPRIGHT)
    if bare.lower() in ("and", "or") or bare in _ALIASES:
        return _ALIASES.get(bare, bare.lower())
    if bare in FUNCTIONS or bare in _GREEK_WORDS:
        return f"\\{bare}"
    token = re.sub(r"\s", "", token)
    if token.startswith("\\begin{array}"):
        return "\\begin{array}"
    token = re.sub(r"^\\var(?=epsilon|phi)", r"\\", token)
    return re.sub(rf"^({_ACCENT}|\S+_)(\w)$", r"\1{\2}", token)


_Rules = Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]
# In this order. First characters and what only they spell, then LaTeX, then tokens with a space between them.
_CHARACTERS_TO_TEX: _Rules = [
    (re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), lambda m: f"^{{{_ascii(m[0])}}}"),
    (re.compile("[₀-₉₊₋]+"), lambda m: f"_{{{_ascii(m[0])}}}"),
    (re.compile("[¼-¾⅐-⅞]"), lambda m: "\\frac{" + _ascii(m[0]).replace("⁄", "}{") + "}"),
    (_POWER_OF_TEN, r"\1 \\cdot 10^{\2}"),
    (re.compile(r"(?<![A-Za-z\\])C\s*\^\s*(\{\s*\w+\s*\}|\w)\s*_\s*(\{\s*\w+\s*\}|\w)"), r"C_\2^\1"),
    (re.compile(r"(?<![A-Za-z\\])([ED])\s*\[\s*([XY]|\\xi|\\eta)\s*\]"), r"\1(\2)"),
    (_CHOOSE, r"\\binom{\1}{\2\3}"),
    (_ARRANGE, r"\\frac{(\1)!}{(\1-\2\3)!}"),
    (_CHOOSE_BEFORE, r"\\binom{\1}{\3}"),
    (re.compile(r"\\overrightarrow"), r"\\vec"),
    (re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)(?![a-zA-Z])([^{}]*)\}"), r"{\\mathrm{\1}}"),
    (re.compile("(?<=[①-⑳])[, ]*(?=[①-⑳])"), ","),
    (re.compile("[α-ω]"), lambda m: f"\\{unicodedata.name(m[0]).split()[-1].lower()} "),
    (re.compile("[ΓΔΘΛΞΠΣΦΨΩ]"), lambda m: f"\\{unicodedata.name(m[0]).split()[-1].title()} "),
]
_UNIT_VECTOR = re.compile(r"\\(?:hat|vec)\s*\{?\s*(?:([ijk])(?![A-Za-z])|\\([ij])math(?![a-zA-Z]))\s*\}?")
_UNIT_VECTORS = re.compile(  # two of them: \hat i alone may be squared, and i is a number
    r"(?s)^(?=.*\\(?:hat|vec)\s*\{?\s*\\?([ijk])(?:math)?(?![a-z]).*\\(?:hat|vec)\s*\{?\s*\\?(?!\1)[ijk](?:math)?(?![a-z])).*$"
)
_IN_TEX: _Rules = [
    (_UNIT_VECTORS, lambda m: _UNIT_VECTOR.sub(r" \1\2 ", m[0])),
    (_PRIMES, lambda m: (m[2] or "'").replace("\\prime", "'")),
    (_PERIOD, lambda m: f"{m[1].replace(',', '.')}\\overline{{{m[2]}}}"),
    (_DOTS, r"\\overline{\1\2\4}"),
    (_REPEATING, _repeating),
    (_THOUSANDS, _thousands),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # 0{,}25
    (_FORMATTING, " "),
    (_DECIMAL_COMMA, lambda m: m.group() if not m[1] and _inside(m) else m.group().replace(",", ".")),
    (_OF_TWO, lambda m: m.group().replace(",", ".")),
    (_DEGREE, r"\\deg "),
    (_ANGLE, _angle),
]
_IN_TOKENS: _Rules = [
    (re.compile(r"(?<=\\begin\{)[bB](?=matrix\})|(?<=\\end\{)[bB](?=matrix\})"), "p"),
    (re.compile(rf"({UPRIGHT}[a-z]+) \.(?= \^)"), r"\1"),
    (
        re.compile(rf"(?<=[,\w}}]) (?:, )?([a-z]) {UPRIGHT}?is {UPRIGHT}?(?:an|any) {UPRIGHT}?integer$"),
        r" , \1 \\in \\mathbb{Z}",
    ),
    (re.compile(rf" (?:, )?(?:{UPRIGHT}?any )?{UPRIGHT}?integers? ([a-z])$"), r" , \1 \\in \\mathbb{Z}"),
    (_ALONE, r"\1"),
    (re.compile(r"(?<![_^] )(?<!\\)\{ (\x01\w+) \}"), r"\1"),
    (re.compile(r"(?<=\s), (?=(?:,|and|or)\s)"), ""),
    (re.compile(r"& (?=[=<>] )|(?<= [=<>]) &"), ""),
    (re.compile(r" [.,] (?=& |\\\\ |\\end)"), " "),
    (re.compile(r"(?<=& )(?:(?:,|\x01?if|\x01?when) )+"), ""),  # before the condition of a case
    (re.compile(r"(?<=[\w})/]) \\(min|sec)(?=\.?(?: /| ?\.|$))"), rf" {UPRIGHT}\1"),  # without an argument it is a unit
    (_AROUND, ""),
    (re.compile(r"^(\d+) \^ (?:\{ )?\x01?(st|nd|rd|th)(?: \})?$"), rf"\1 {UPRIGHT}\2"),
    (re.compile(r"^(\d+) \x01?(?:in|to|out \x01?of) (\d+)$"), r"\1 / \2"),
    (re.compile(r"(?<=\\in )\x01?([CNQRZ])(?!\S)"), r"\\mathbb{\1}"),
    (re.compile(r"^\\\{ ((?!\w [|:])[^|:]+) [|:] (\w \\in \S+(?: \^ \S+)?) \\\}$"), r"\1 , \2"),
    (re.compile(r"\\\{ \\begin\{array\} ((?:(?!\\begin\{array).)*) \\end\{array\}"), r"\\begin{cases} \1 \\end{cases}"),
    (re.compile(r"^\\begin\{cases\} ([^&]*) \\end\{cases\}$"), _system),
    (re.compile(r"(?<=\\mathbb\{R\}) - (?=\\\{)"), r" \\setminus "),
    (re.compile(r"(?<=\} )\^ \{ ([-+*]) \}"), r"^ \1"),  # \mathbb{R}^{+}
    (
        re.compile(r"(?<!\S)([\[\]]) ([^()\[\]]+ , [^()\[\]]+) ([\[\]])(?!\S)"),  # ]0,1[
        lambda m: f"{'(['[m[1] == '[']} {m[2]} {')]'[m[3] == ']']}",
    ),
    (re.compile(r"\\det \( ([A-Z]) \)"), r"\\det \1"),
    (re.compile(r"\( (\\pmod .+) \)$"), r"\1"),
    (re.compile(r"\\pmod \{ (\S+) \}"), r"\\pmod \1"),
    (re.compile(r"(.) \( (\w \\in \S+(?: \^ \S+)?) \)$"), r"\1 , \2"),
    (re.compile(rf"(?<=\d) {UPRIGHT}?({'|'.join(_POWERS)})(?!\S)"), lambda m: f" \\cdot 10 ^ {_POWERS[m[1]]}"),
    (re.compile(rf"(?<=_ \{{ ){UPRIGHT}({NUMBER_WORDS.replace(' ', '|')})(?= \}}$)"), lambda m: str(_NUMBERS.index(m[1]))),
    (re.compile(r"^0(?=\d : [0-5]\d(?: |$))"), ""),
    (re.compile(r"^(\d\d?) (?:(?=[AP]M$)|\x01)([AaPp])(?: \.)? ?\x01?[Mm]$"), lambda m: f"{m[1]} {UPRIGHT}{m[2].lower()}m"),
    (re.compile(r"(: \d\d) \x01?([AaPp])(?: \.)? ?\x01?[Mm]$"), lambda m: f"{m[1]} {m[2].lower()}m"),
]
_BOUND = re.compile(r"(?:^| )([a-z]) (?:.* )?, \1 \\in \S+(?: \^ \S+)?(?: \\\})?$")
_DELIMITER = re.compile(r"(?<!\\)\$")


@functools.lru_cache(4096)  # a group has one solution and few different answers
def spell(answer: str) -> str:
    """The tokens of an answer, without markdown, delimiters, a full stop and words such as `Answer:`."""
    text = _rewritten(re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", answer).translate(_CHARACTERS), _CHARACTERS_TO_TEX)
    if text.replace("\\$", "").count("$") != 1:  # a single one is a currency
        text = _DELIMITER.sub(" ", text)
    for _ in range(3):  # bold and italic, nested \text
        text = _WRAPPED.sub(_unwrapped, _MARKDOWN.sub(r" \2 ", text))
    text = " ".join(map(_spelled, _TOKEN.findall(_rewritten(text, _IN_TEX))))
    text = _rewritten(text, _IN_TOKENS)
    # which letter the integer of k\pi, k \in \mathbb{Z} is does not matter
    if bound := _BOUND.search(text):
        text = re.sub(rf"(?<!\S){bound[1]}(?!\S)", r"\\bound", text)
    words = text.replace(UPRIGHT, "").lower()
    return next((sign for sign, phrase in _PHRASES.items() if phrase.fullmatch(words)), text)


def _rewritten(text: str, rules: _Rules) -> str:
    for pattern, by in rules:
        text = pattern.sub(by, text)
    return text
