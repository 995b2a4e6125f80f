"""Limits of the control groups around this process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rstar2_megatron.settings import host_memory
from rstar2_megatron.settings.host_memory import available_memory, total_memory

_GB = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "_MOUNT", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "_OWN", tmp_path / "own")
    return tmp_path


def _group(place: Path, limit: object, taken: int, caches: int, names: tuple[str, str]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, taken)):
        (place / name).write_text(f"{value}\n")
    (place / "memory.stat").write_text(
        f"inactive_file 0\ntotal_inactive_file {caches}\n" if "usage" in names[1] else f"inactive_file {caches}\n"
    )


def test_a_job_has_the_smallest_limit_around_it(groups: Path) -> None:
    """Version 2: the step has none, its job has one, and caches of files count as free."""
    names = ("memory.max", "memory.current")
    (groups / "own").write_text("0::/slurm/job_7/step_0\n")
    _group(groups / "groups" / "slurm" / "job_7" / "step_0", "max", _GB, 0, names)
    _group(groups / "groups" / "slurm" / "job_7", 2 * _GB, _GB, _GB // 2, names)
    assert total_memory() == 2 * _GB
    assert available_memory() == min(psutil.virtual_memory().available, 2 * _GB - _GB // 2)


def test_a_container_whose_group_has_a_path_of_the_host(groups: Path) -> None:
    """Version 1 without a namespace of its own: the limit is in the root that the container sees."""
    (groups / "own").write_text("5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n")
    _group(groups / "groups" / "memory", _GB, _GB // 2, _GB // 4, ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    assert (total_memory(), available_memory()) == (_GB, _GB - _GB // 4)


@pytest.mark.parametrize("own", [None, "0::/\n", "0::/there/is/none\n"])
def test_without_a_limit_it_is_the_machine(groups: Path, own: str | None) -> None:
    if own is not None:
        (groups / "own").write_text(own)
    assert total_memory() == psutil.virtual_memory().total
