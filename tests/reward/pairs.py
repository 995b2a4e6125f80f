"""Answers with known verdicts: (solution, answers that equal it, answers that do not). Written for this project."""

from __future__ import annotations

from collections.abc import Iterable

from tests.reward.more_pairs import MORE_PAIRS

# fmt: off
PAIRS: list[tuple[str, list[str], list[str]]] = [
    # integers
    (
        "42",
        ["42", "42.", "+42", " 42 ", "42.0", "$42$", "{42}", "\\text{42}"],
        ["24", "-42", "42.1", "421", ""],
    ),
    ("-7", ["-7", "\u22127", "- 7", "-7.00"], ["7", "-70", "-7.5"]),
    ("0", ["0", "-0", "0.0", "0/5"], ["1", "0.01", "\\emptyset"]),
    (
        "1234567",
        ["1,234,567", "1{,}234{,}567", "1\\,234\\,567", "1234567"],
        ["1,234,568", "1.234567", "123,4567"],
    ),
    ("1000", ["10^3", "10^{3}", "1{,}000", "1000.0", "2^3 \\cdot 5^3"], ["10^4", "100", "1e4"]),
    ("1024", ["2^{10}", "4^5", "32^2"], ["2^{11}", "10^2"]),
    ("121", ["11^2", "121", "\\boxed{121}"], ["112", "11"]),
    ("720", ["6!", "720"], ["5!", "721"]),
    ("5", ["x=5", "x = 5", "5", "\\sqrt{25}", "n=5"], ["x=-5", "x=6", "\\sqrt{5}"]),
    ("17", ["17 \\text{ ways}", "17", "\\mathrm{17}"], ["71", "17x"]),
    # fractions
    (
        "\\frac{1}{2}",
        ["1/2", "0.5", "\\dfrac{1}{2}", "\\tfrac12", "\\frac12", ".5", "2/4", "50\\%"],
        ["1/3", "2", "0.05", "-1/2"],
    ),
    ("3/4", ["\\frac{3}{4}", "0.75", "\\frac{6}{8}", "75\\%"], ["4/3", "0.34", "0.7"]),
    (
        "-\\frac{2}{3}",
        ["\\frac{-2}{3}", "-2/3", "-\\dfrac{2}{3}", "-\\frac{4}{6}", "\\frac{2}{-3}"],
        ["\\frac{2}{3}", "-\\frac{3}{2}"],
    ),
    ("\\frac{7}{3}", ["7/3", "2\\frac{1}{3}", "\\frac{14}{6}"], ["\\frac{3}{7}", "2.33", "2.3"]),
    (
        "\\frac{x+1}{2}",
        ["(x+1)/2", "0.5x+0.5", "\\frac{1}{2}x+\\frac{1}{2}"],
        ["\\frac{x}{2}+1", "\\frac{x-1}{2}"],
    ),
    (
        "\\frac{\\pi}{6}",
        ["\\pi/6", "\\frac{1}{6}\\pi", "\\dfrac{\\pi}{6}"],
        ["\\frac{\\pi}{3}", "30", "0.52"],
    ),
    (
        "\\frac{\\sqrt{3}}{2}",
        ["\\sqrt{3}/2", "\\frac{3}{2\\sqrt{3}}", "\\sqrt{\\frac{3}{4}}"],
        ["\\frac{\\sqrt{2}}{2}", "\\frac{3}{2}"],
    ),
    (
        "\\frac{1}{\\sqrt{2}}",
        ["\\frac{\\sqrt{2}}{2}", "\\sqrt{2}/2", "\\sqrt{0.5}"],
        ["\\sqrt{2}", "\\frac{1}{2}"],
    ),
    # decimals
    ("3.14", ["3.14", "3.140", "314/100"], ["\\pi", "3.1", "3.141"]),
    ("0.125", ["1/8", "\\frac{1}{8}", ".125", "12.5\\%"], ["0.13", "1/9"]),
    ("2.5", ["5/2", "\\frac{5}{2}", "2.50"], ["2", "25", "2.05"]),
    ("-0.4", ["-2/5", "-.4", "-40\\%"], ["0.4", "-4"]),
    ("1.5 \\times 10^3", ["1500", "1.5\\cdot 10^{3}"], ["150", "1.5 \\times 10^4"]),
    # percentages and money
    ("25\\%", ["25%", "25", "0.25", "1/4", "25 percent"], ["2.5%", "0.5", "52%"]),
    ("12.5\\%", ["12.5%", "12.5"], ["12%", "1.25%"]),
    ("\\$18", ["18", "\\$18", "$18", "18.00", "18 dollars"], ["\\$81", "1.8"]),
    ("\\$1,250", ["1250", "\\$1250", "1,250"], ["\\$1,205", "125"]),
    # units
    ("5 \\text{ cm}", ["5", "5 cm", "5\\text{cm}", "5\\ \\mathrm{cm}"], ["6 cm", "5 \\text{ kg}", "50"]),
    ("60 \\text{ km/h}", ["60", "60 km/h"], ["66", "6 km/h"]),
    ("12 \\text{ square inches}", ["12", "12 square inches"], ["21", "144"]),
    ("36\\text{ cm}^2", ["36", "36 \\text{ cm}^2"], ["63", "6"]),
    ("90^\\circ", ["90", "90^{\\circ}", "90 degrees", "90\u00b0"], ["45^\\circ", "9"]),
    ("3 \\text{ hours}", ["3", "3 hours", "3 \\text{hours}"], ["4 hours", "3 \\text{ days}"]),
    ("7 apples", ["7", "7 \\text{ apples}"], ["8", "17"]),
    # roots, powers, constants
    ("2\\sqrt{3}", ["\\sqrt{12}", "2 \\sqrt 3", "\\sqrt{4}\\sqrt{3}"], ["3\\sqrt{2}", "2\\sqrt{2}", "6"]),
    ("\\sqrt{2}", ["2^{1/2}", "\\sqrt 2", "2^{0.5}"], ["2", "1.414", "\\sqrt{3}"]),
    ("\\sqrt[3]{2}", ["2^{1/3}", "2^{\\frac{1}{3}}"], ["\\sqrt{2}", "3\\sqrt{2}"]),
    ("1+\\sqrt{5}", ["\\sqrt{5}+1", "\\sqrt5 + 1"], ["1-\\sqrt{5}", "\\sqrt{6}"]),
    ("2\\pi", ["2 \\pi", "\\pi \\cdot 2", "\\pi+\\pi"], ["\\pi", "\\pi^2", "6.28"]),
    ("e^2", ["e^{2}", "e \\cdot e"], ["2e", "e"]),
    ("\\ln 2", ["\\ln(2)", "\\ln{2}"], ["\\ln 3", "2"]),
    ("2^{100}", ["2^{100}", "4^{50}", "1024^{10}"], ["2^{99}", "200", "100^2"]),
    (
        "\\frac{1+\\sqrt{5}}{2}",
        ["(1+\\sqrt{5})/2", "\\frac{\\sqrt{5}+1}{2}"],
        ["\\frac{1-\\sqrt{5}}{2}", "\\frac{\\sqrt{5}}{2}"],
    ),
    # complex numbers
    ("3+4i", ["4i+3", "3 + 4i"], ["3-4i", "7", "4+3i"]),
    ("-i", ["-i", "-1i"], ["i", "-1"]),
    # algebra
    ("x+1", ["1+x", "x + 1"], ["x-1", "x", "2x+1"]),
    ("x^2-1", ["(x-1)(x+1)", "-1+x^2"], ["x^2+1", "(x-1)^2"]),
    ("2x+3y", ["3y+2x"], ["3x+2y", "2x-3y", "5xy"]),
    ("(x+2)^2", ["x^2+4x+4", "(2+x)^2"], ["x^2+4", "(x-2)^2"]),
    ("\\frac{x^2-1}{x-1}", ["\\frac{(x-1)(x+1)}{x-1}"], ["x-1", "x"]),
    ("a b", ["ba", "a \\cdot b"], ["a+b", "a"]),
    ("n(n+1)/2", ["\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"], ["\\frac{n(n-1)}{2}", "n(n+1)"]),
    ("\\sin x", ["\\sin(x)", "\\sin{x}"], ["\\cos x", "x"]),
    ("1-\\cos^2 x", ["\\sin^2 x"], ["\\cos^2 x", "1-\\cos x"]),
    # equations
    ("y=2x+1", ["y = 2x+1", "y=1+2x", "2x+1=y"], ["y=2x-1", "y=x+1"]),
    ("x^2+y^2=4", ["y^2+x^2=4", "x^2+y^2-4=0"], ["x^2+y^2=2", "x^2-y^2=4"]),
    # tuples, intervals, sets
    (
        "(1,2)",
        ["(1, 2)", "\\left(1,2\\right)", "(1,\\,2)", "(1.0,2)", "(2/2, 2)"],
        ["(2,1)", "[1,2]", "(1,3)", "\\{1,2\\}"],
    ),
    ("(3,-4,5)", ["(3, -4, 5)", "\\left( 3, -4, 5 \\right)"], ["(3,4,5)", "(3,-4)"]),
    (
        "\\left(\\frac{1}{2},\\sqrt{3}\\right)",
        ["(0.5, \\sqrt{3})", "(1/2,\\sqrt3)"],
        ["(\\frac{1}{2},3)", "(\\sqrt{3},\\frac{1}{2})"],
    ),
    ("[0,1]", ["\\left[0,1\\right]", "[0, 1]"], ["(0,1)", "[0,1)", "[0,2]"]),
    ("(-\\infty, 3]", ["(-\\infty,3]", "\\left(-\\infty,3\\right]"], ["(-\\infty,3)", "[3,\\infty)"]),
    ("[2,5)", ["\\left[2,5\\right)", "[2, 5)"], ["[2,5]", "(2,5)"]),
    (
        "(-\\infty,0)\\cup(1,\\infty)",
        ["(-\\infty, 0) \\cup (1, \\infty)", "(1,\\infty)\\cup(-\\infty,0)"],
        ["(-\\infty,0]\\cup(1,\\infty)", "(0,1)"],
    ),
    (
        "\\{1,2,3\\}",
        ["\\{3,2,1\\}", "\\{1, 2, 3\\}", "\\left\\{1,2,3\\right\\}"],
        ["\\{1,2\\}", "\\{1,2,4\\}", "(1,2,3)"],
    ),
    ("\\{-1,1\\}", ["\\{1,-1\\}", "\\{1, -1\\}"], ["\\{1\\}", "\\{0,1\\}"]),
    ("\\{\\frac{1}{2}, 4\\}", ["\\{4, 0.5\\}", "\\{4,\\frac12\\}"], ["\\{2,4\\}"]),
    ("1,2", ["1, 2", "1,2"], ["2", "1,3"]),
    # matrices and vectors
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        ["\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"],
        ["\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "10"],
    ),
    (
        "\\begin{pmatrix}1\\\\-1\\end{pmatrix}",
        ["\\begin{pmatrix} 1 \\\\ -1 \\end{pmatrix}", "\\begin{bmatrix}1\\\\-1\\end{bmatrix}"],
        ["\\begin{pmatrix}-1\\\\1\\end{pmatrix}"],
    ),
    # words and choices
    (
        "\\text{Monday}",
        ["Monday", "monday", "\\text{monday}", "\\textbf{Monday}"],
        ["Tuesday", "\\text{Sunday}"],
    ),
    ("no solution", ["No solution", "\\text{no solution}", "no  solution"], ["0", "one solution"]),
    ("even", ["Even", "\\text{even}"], ["odd", "neve", "2"]),
    ("read", ["read"], ["dear", "dare"]),
    ("B", ["B", "(B)", "\\text{B}", "\\textbf{(B)}", "\\mathrm{B}"], ["A", "(C)", "b+1"]),
    ("(C)", ["C", "(C)", "\\text{(C)}"], ["D", "(A)"]),
    ("Alice", ["alice", "\\text{Alice}"], ["Bob"]),
    ("true", ["True", "\\text{True}"], ["false"]),
    # LaTeX noise
    (
        "\\dfrac{3}{5}",
        ["\\left(\\frac{3}{5}\\right)", "\\displaystyle\\frac{3}{5}", "\\frac{3}{5}\\,"],
        ["\\frac{5}{3}"],
    ),
    ("10\\,000", ["10000", "10,000", "10\\ 000"], ["1000", "100,000"]),
    ("\\text{12}", ["12", "12\\!", "~12"], ["21"]),
    ("x=3", ["3", "x = 3", "\\mathrm{x}=3"], ["x=4", "-3"]),
    ("x \\ge 2", ["x \\geq 2", "x\\geqslant 2"], ["x > 2", "x \\le 2"]),
    ("2 < x < 5", ["2<x<5"], ["2 < x < 6", "2 \\le x \\le 5"]),
    # hostile or broken answers
    (
        "7",
        ["7"],
        [
            "\\frac{7}{",
            "7}{",
            "((((",
            "\\sqrt{",
            "__import__('os')",
            "7; rm",
            "NaN",
            "\\infty",
            "\\undefined{7",
        ],
    ),
    ("1", ["1", "1^{100}", "1!"], ["\\frac{1}{0}", "0^{-1}", "I", "\\text{one hundred}"]),
]
# fmt: on


def flat(rows: Iterable[tuple[str, list[str], list[str]]] = (*PAIRS, *MORE_PAIRS)) -> list[tuple[str, str, bool]]:
    """(solution, answer, equal)."""
    return [
        (solution, answer, verdict)
        for solution, equal, different in rows
        for verdict, answers in ((True, equal), (False, different))
        for answer in answers
    ]
