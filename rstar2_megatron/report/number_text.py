"""Numbers as texts of logs write them: Python's and numpy's, and in a table those of a spreadsheet in any language."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FLOAT = r"([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?))"
_VALUE = re.compile(rf"{_FLOAT}|[\w.]+\(\s*{_FLOAT}\s*(?:,.*)?\)", re.IGNORECASE)
_MINUS = "\u2212"
_LIKE = re.compile(r"\W{0,2}\d")
_DATE = re.compile(r"\d{4}-\d\d?(?!\d)|\d\d?[/.]\d\d?[/.]\d{4}(?!\d)")
# by the mark of decimals; the other mark may stand between thousands, of which a number with an exponent has none
_DECIMAL = {
    mark: re.compile(
        rf"[-+]?(?=[{mark}]?\d)(?:[1-9]\d{{0,2}}(?:[{other}]\d{{3}})+(?:[{mark}]\d*)?|\d*(?:[{mark}]\d*)?(?:e[-+]?\d+)?)",
        re.IGNORECASE,
    )
    for mark, other in (".,", ",.")
}


def number(text: str) -> float | None:
    """0.41 of "0.41", "np.float64(0.41)", "tensor(0.41, device='cuda:0')"; also nan and inf. None: it is none."""
    match = _VALUE.fullmatch(text.strip().replace(_MINUS, "-"))
    return float(match[1] or match[2]) if match else None


def is_like_a_number(text: str) -> bool:
    """Whether the text begins as a number does, and is no date: "1,024", "85%", "0.44 ± 0.02", "<0.01", "$5", "(0.1)"."""
    return _LIKE.match(text.strip()) is not None and _DATE.match(text.strip()) is None


def decimal_mark(cells: Iterable[str], delimiter: str) -> str | None:
    """The mark of decimals of a table: that of the cells which are a number with one mark only. None: they do not tell.

    A table without such a cell has the point, unless a semicolon, which languages with decimal commas have, delimits it.
    """
    marks = {mark for cell in cells if len(found := _readings(cell)) == 1 for mark in found}
    if not marks and delimiter != ";":
        return "."
    return marks.pop() if len(marks) == 1 and marks != {delimiter} else None


def cell_number(cell: str, mark: str | None) -> float | None:
    """The number in a cell of a table with this decimal mark. None also for a cell that may be two numbers."""
    found = _readings(cell)
    if not found:
        return number(cell)
    values = set(found.values()) if mark is None else {found.get(mark)}
    return values.pop() if len(values) == 1 else None


def _readings(cell: str) -> dict[str, float]:
    """The number that a cell is by each mark of decimals."""
    text = cell.strip().replace(_MINUS, "-")
    return {
        mark: float(text.replace("," if mark == "." else ".", "").replace(mark, "."))
        for mark, pattern in _DECIMAL.items()
        if pattern.fullmatch(text)
    }
