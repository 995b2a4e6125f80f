"""Reads the tables of docs/inputs.md: what each input is answered with."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "inputs.md"


def answers(section: str) -> dict[str, str]:
    """{input: answer} of all tables of a section; a row may name several inputs of one answer."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    named = [(name, answer) for names, answer in rows if answer != "Answer" for name in names.split(", ")]
    assert len(dict(named)) == len(named) > 0
    return dict(named)


def is_answer(said: str, answer: str) -> bool:
    """Whether `said` is the sentence in backticks, in which `...` stands for any text."""
    quoted = re.search(r"`(.+)`", answer)
    assert quoted, answer
    pattern = ".*".join(re.escape(part) for part in quoted[1].split("..."))
    return re.fullmatch(pattern, said, re.DOTALL) is not None
