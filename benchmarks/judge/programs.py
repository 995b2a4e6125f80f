"""The programs that the cases of `benchmarks.judge.calls` run."""

from __future__ import annotations

import ast
import base64
import functools
import math
from importlib.util import find_spec
from pathlib import Path

PRINT = "print({i})"
NUMPY = "import numpy as np\na = np.arange(10000).reshape(100, 100) + {i}\nprint(int((a @ a.T).trace()))"
# Whole roots; square roots of large numbers are three times the work.
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - {sum}*x + {product}, x))"
SURDS = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + {i}, x))"
LOOP = "while True: pass  # {i}"
BURN = "import time\nwhile time.process_time() < {seconds}: pass\nprint({i})"
ATTACK = "import os\nfor _ in range(8):\n    if os.fork() == 0: break\nwhile True: pass  # {i}"
BARE_CASES = ("print", "numpy", "sympy", "surds")  # told beside what the program costs in a bare fork


@functools.cache
def _public_template() -> tuple[str, str]:
    """The text that RLinf's tool (as rStar's) puts before each program, and the form around the program's base64."""
    package = find_spec("rlinf")
    if package is None or package.origin is None:
        raise RuntimeError("the cases template and template_sympy send what RLinf's tool sends: install rlinf")
    tool = Path(package.origin).parent / "agents/rstar2/http_code_judge_tool.py"
    texts = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(tool.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return texts["code_template_setup"], texts["code_template_exec"]


def in_public_template(*codes: str) -> str:
    """The program that the public clients send for the last of `codes`; the others are its history."""
    setup, form = _public_template()
    encoded = [base64.b64encode(code.encode()).decode() for code in codes]
    return setup + "".join(form.format(text, str(text is not encoded[-1])) for text in encoded)


def program(case: str, i: int) -> str:
    """The mix is 5% endless loops, the rest half print, half sympy."""
    if case == "session":
        return f"total = globals().get('total', 0) + {i}\nprint(total)"
    if case in ("template", "template_sympy"):
        return in_public_template(program("print" if case == "template" else "sympy", i))
    if case in ("print", "batch", "overhead", "busy", "run_code"):
        return PRINT.format(i=i)
    if case == "mix":
        if i % 20 == 7:
            return LOOP.format(i=i)
        return program("print" if i % 2 else "sympy", i)
    if case == "sympy":
        roots = i % 997 + 1, i // 997 % 997 + 1
        return SYMPY.format(sum=sum(roots), product=math.prod(roots))
    if case in ("burn", "hostile"):  # hostile: up to half the time limit of 4 s
        return BURN.format(i=i, seconds=0.6 if case == "burn" else 0.2 * (i % 10 + 1))
    return {"numpy": NUMPY, "attack": ATTACK, "surds": SURDS}[case].format(i=i)
