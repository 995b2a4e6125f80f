"""What programs may import is one list: in the environments' requirements, in the documentation, in /status, and in calls."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.libraries import LIBRARIES, OnlyLibraries
from rstar2_megatron.runs.check.subjects.judge import importable
from tests.judge.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
# Package -> a small program and its answer.
PROGRAMS = {
    "matplotlib": (
        """
import matplotlib.pyplot as plt
from mpl_toolkits.mplot3d import Axes3D
plt.plot([1, 2])
plt.savefig('x.png')
print(open('x.png', 'rb').read(4)[1:])""",
        "b'PNG'",
    ),
    "mpmath": ("import mpmath\nprint(mpmath.nstr(mpmath.zeta(2), 5))", "1.6449"),
    "networkx": ("import networkx as nx\nprint(nx.diameter(nx.petersen_graph()), len(nx.pagerank(nx.path_graph(3))))", "2 3"),
    "numpy": ("import numpy as np\nprint(np.linalg.norm([3.0, 4.0]) == 5)", "True"),
    "pandas": (
        """
import pandas as pd
print(pd.DataFrame({'a': [1, 2]}).a.sum(), pd.Timestamp('2024-01-01', tz='Europe/Berlin').hour)""",
        "3 0",
    ),
    "scikit-learn": (
        """
from sklearn.linear_model import LinearRegression
print(round(LinearRegression().fit([[1], [2]], [2, 4]).predict([[3]])[0]))""",
        "6",
    ),
    "scipy": (
        "from scipy import optimize, stats\nprint(round(optimize.brentq(lambda x: x * x - 2, 0, 2), 5), stats.norm.cdf(0))",
        "1.41421 0.5",
    ),
    "pillow": ("from PIL import Image\nprint(Image.new('RGB', (2, 3)).size)", "(2, 3)"),
    "sortedcontainers": ("from sortedcontainers import SortedList\nprint(SortedList([3, 1])[0])", "1"),
    "tqdm": ("from tqdm import tqdm\nprint(sum(tqdm(range(5))))", "10"),
    "sympy": ("import sympy\nprint(sympy.factorint(360))", "{2: 3, 3: 2, 5: 1}"),
}


def pins(name: str) -> dict[str, str]:
    """Package -> version of a requirements file."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if re.fullmatch(r"[A-Za-z0-9_.-]+==\S+", line))


def test_the_three_places_agree() -> None:
    """CPU environment, GPU lock, judge's image."""
    pinned = pins("programs.txt")
    assert set(pinned) == set(LIBRARIES)
    for place in ("constraints.txt", "gpu.lock"):
        assert {name: pins(place).get(name) for name in pinned} == pinned, place
    assert "-r programs.txt" in (ROOT / "requirements" / "base.txt").read_text().splitlines()
    image = (ROOT / "docker" / "judge.Dockerfile").read_text()
    assert " requirements/programs.txt " in image and " -r programs.txt" in image
    (files,) = re.findall(r"^files=\((.*)\)$", (ROOT / "scripts" / "setup_env.sh").read_text(), re.M)
    assert "requirements/programs.txt" in files.split()  # or a changed list would not be installed


def test_the_documentation_has_the_same_list() -> None:
    (listed,) = re.findall(r"A program may import the standard library, ([^.]*)\.", (ROOT / "docs" / "judge.md").read_text())
    assert re.split(r", | and ", " ".join(listed.split())) == sorted(LIBRARIES)


def test_what_the_libraries_need_is_found_too() -> None:
    """The packages that they require, but for those that come with nothing to import."""

    class Any_:
        invalidate_caches = None

        def find_spec(self, name: str, target: object) -> str:
            return name

    waiting, seen = list(LIBRARIES), set()
    while waiting:
        package = waiting.pop()
        if package in seen:
            continue
        seen.add(package)
        for text in metadata.requires(package) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    tops = {name for name, owners in metadata.packages_distributions().items() if {o.lower() for o in owners} & seen}
    hidden = {name for name in tops if OnlyLibraries(Any_()).find_spec(name) is None and not name.startswith("_")}
    assert hidden == {"isympy"}  # a command


def test_status_and_check_print_the_list(http: httpx.Client, judge: JudgeService) -> None:
    for worker in http.get("/status").json()["workers"].values():
        assert worker["libraries"] == pins("programs.txt")
    assert importable(judge.url, None) == pins("programs.txt")


@pytest.mark.parametrize("package", LIBRARIES)
def test_each_is_usable_in_a_call(run: Run, package: str) -> None:
    program, answer = PROGRAMS[package]
    result = run(program, options={"time_limit_s": "60"})
    assert result["stdout"] == f"{answer}\n", result
    assert package == "tqdm" or not result["stderr"], result  # its bar


@pytest.mark.parametrize("name", ["redis", "pydantic", "torch", "pip"])
def test_nothing_else_is_found(run: Run, name: str) -> None:
    for program in (f"import {name}", f"import numpy, {name}"):
        result = run(program)
        assert result["stderr"].splitlines()[-1] == f"ModuleNotFoundError: No module named '{name}'", result


@pytest.mark.parametrize("options", [{}, {"session": "own-modules"}])
@pytest.mark.parametrize("first", ["", "import numpy\n"])
def test_a_submissions_own_modules_are_found(run: Run, first: str, options: dict[str, str]) -> None:
    files = {"redis.py": "WORD = 'mine'", "parts/__init__.py": "", "parts/one.py": "N = 1"}
    program = f"{first}import redis, parts.one\nopen('written.py', 'w').write('N = 2')\nimport written"
    program += "\nprint(redis.WORD, parts.one.N, written.N)"
    result = run(program, options={"files": files, **options})
    assert result["stdout"] == "mine 1 2\n", result


def test_the_environment_of_the_tests_has_what_is_pinned() -> None:
    assert {name: metadata.version(name) for name in LIBRARIES} == pins("programs.txt"), sys.prefix
