"""What a program may import beside the standard library: the same list wherever the judge runs.

requirements/programs.txt pins the packages for the CPU environment, the GPU lock and the judge's image. Other packages of the
judge's own environment are hidden, so that no tool answer depends on where the judge runs. The sandbox imports this file:
standard library only.
"""

from __future__ import annotations

from typing import Any

# Package -> the name that programs import.
LIBRARIES = {
    "matplotlib": "matplotlib",
    "mpmath": "mpmath",
    "networkx": "networkx",
    "numpy": "numpy",
    "pandas": "pandas",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "sortedcontainers": "sortedcontainers",
    "sympy": "sympy",
    "tqdm": "tqdm",
}
# What these packages import, by the names in site-packages.
_NEEDED = """
cloudpickle contourpy cycler dateutil fontTools joblib kiwisolver mpl_toolkits narwhals packaging pylab pyparsing six
threadpoolctl tzdata
"""
_VISIBLE = frozenset((*LIBRARIES.values(), *_NEEDED.split()))


def versions() -> dict[str, str]:
    """The installed version of each package that programs may import; "missing" for one that is not installed."""
    from importlib import metadata  # here: each call would copy what it imports

    found = {}
    for package in LIBRARIES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


class OnlyLibraries:
    """Stands for site-packages on `sys.path`: finds the libraries and what they need, nothing else."""

    def __init__(self, finder: Any) -> None:
        """`finder` is Python's own for the directory."""
        self._finder = finder
        self.invalidate_caches = finder.invalidate_caches

    def find_spec(self, name: str, target: Any = None) -> Any:
        """The module's specification, or None."""
        return self._finder.find_spec(name, target) if name.partition(".")[0] in _VISIBLE else None
