"""Paper mode: whether an answer equals one of the solutions.

Formulas may be slow, deep or endless on hostile input, so the pool runs `grade_answer` in a process that it can kill.
"""

from __future__ import annotations

import re

from rstar2_megatron.reward.answer_text import final_answer, is_balanced
from rstar2_megatron.reward.comparison import IN_BASE, Algebra, Comparison, compact, split_unit
from rstar2_megatron.reward.spelling import spell

MAX_ANSWER_CHARS = 4096  # longer answers are ungradable: no solution is that long
_QUICK_CHARS = 200  # at which `quick_grade` takes 15 ms at most

CORRECT = "correct"
WRONG = "wrong"
UNGRADABLE = "ungradable"


def grade_answer(answer: str, solutions: list[str]) -> str:
    """CORRECT when the answer equals any solution, else WRONG, or UNGRADABLE when it cannot be read."""
    from rstar2_megatron.reward.algebra import compare  # sympy takes a second to import, and most answers do not need it

    return _grade(answer, [final_answer(solution) for solution in solutions], compare) or UNGRADABLE


def quick_grade(answer: str, solutions: list[str]) -> str | None:
    """As `grade_answer`, in microseconds; None for formulas and long texts."""
    solutions = [final_answer(solution) for solution in solutions]
    long = MAX_ANSWER_CHARS >= len(answer) > _QUICK_CHARS or any(len(solution) > _QUICK_CHARS for solution in solutions)
    try:
        return None if long else _grade(answer, solutions, lambda a, b, sign: None)
    except Exception:  # a text of a model must not end the caller; a grading process gives the verdict
        return None


def _grade(answer: str, solutions: list[str], algebra: Algebra) -> str | None:
    if len(answer) > MAX_ANSWER_CHARS or not is_balanced(answer):
        return UNGRADABLE
    ours, comparison = spell(answer), Comparison(algebra)
    if any(comparison.same(ours, theirs) for solution in solutions for theirs in _forms(spell(solution), ours)):
        return CORRECT
    return None if comparison.unread else WRONG


_TIMES = re.compile(
    r"(?<=\d) \x01?(?:times|couples?)(?: \x01?(?:a|per|each|every) \x01?(?:day|week|month|year|hour|minute|second))?$"
)


_CHINESE_UNITS = (
    "元 美元 角 块 厘米 分米 毫米 米 千米 公里 平方厘米 平方米 立方厘米 立方米 升 毫升 克 千克 公斤 吨 秒 分钟 小时 天 周 "
    "月 年 岁 度 个 只 人 本 支 张 棵 件 条 名 套 辆 页 步"
)
_UNIT_OF_ONE = re.compile(  # alone these may be something else, so only a number before them counts
    r"((?:[a-z] = )?(?:- )?(?:\d+(?:\.\d+)?|\\frac \{ \d+ \} \{ \d+ \})(?: \\cdot 10 \^ (?:\d|\{ (?:- )?\d+ \}))?) "
    rf"(?:(?:\\mu )?(?:\x01[KTCFJHNVWAM]|\x01?\\?(?:Omega|AA))|{'|'.join(' ?'.join(unit) for unit in _CHINESE_UNITS.split())})"
)


def _forms(solution: str, answer: str) -> list[str]:
    """The solution, and without the percent sign, base, times or couples that it names where the answer names none.

    A solution says what was asked for, so that an answer may leave it out. What only the answer names makes it another number.
    """
    base = IN_BASE.fullmatch(compact(solution))
    if base and base[1].casefold() == compact(answer).casefold():
        return [answer]
    value, unit = split_unit(_TIMES.sub(" %", solution))
    if (named := _UNIT_OF_ONE.fullmatch(solution)) and not re.search(r"\x01|[A-Za-z]$", answer):
        return [solution, named[1]]
    return [solution, value] if unit == "%" and not split_unit(answer)[1] else [solution]
