"""The programs that the cases of `benchmarks.judge.calls` run."""

from __future__ import annotations

import math

PRINT = "print({i})"
NUMPY = "import numpy as np\na = np.arange(10000).reshape(100, 100) + {i}\nprint(int((a @ a.T).trace()))"
# Whole roots; square roots of large numbers are three times the work.
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - {sum}*x + {product}, x))"
SURDS = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + {i}, x))"
LOOP = "while True: pass  # {i}"
BARE_CASES = ("print", "numpy", "sympy", "surds")  # told beside what the program costs in a bare fork


def program(case: str, i: int) -> str:
    """The mix is 5% endless loops, the rest half print, half sympy."""
    if case == "session":
        return f"total = globals().get('total', 0) + {i}\nprint(total)"
    if case in ("print", "batch", "overhead"):
        return PRINT.format(i=i)
    if case == "mix":
        if i % 20 == 7:
            return LOOP.format(i=i)
        return program("print" if i % 2 else "sympy", i)
    if case == "sympy":
        roots = i % 997 + 1, i // 997 % 997 + 1
        return SYMPY.format(sum=sum(roots), product=math.prod(roots))
    return {"numpy": NUMPY, "surds": SURDS}[case].format(i=i)
