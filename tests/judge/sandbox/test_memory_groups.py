"""The memory of all calls together has a limit of its own, and a call that ends for it is not the program's failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.sandbox.call import Runner
from rstar2_megatron.judge.sandbox.cgroup import GroupTree
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers

MB = 1 << 20


@pytest.fixture
def tree() -> Iterator[GroupTree]:
    try:
        made = GroupTree(1, 1)
    except OSError as error:
        pytest.skip(f"no memory control groups: {error}")
    yield made
    made.remove()


def test_a_demoted_group_has_a_small_weight_or_none(tree: GroupTree) -> None:
    if tree.without_cpu is not None:
        pytest.skip(f"no CPU groups: {tree.without_cpu}")
    (group,), slot = tree.slots, tree.roots[-2 if len(tree.roots) == 3 else -1] / "slot-0"
    (weight,) = [path for name in ("cpu.shares", "cpu.weight") if (path := slot / name).exists()]
    of_a_call = {"cpu.shares": 1024, "cpu.weight": 100}[weight.name]
    has_idle = (slot / "cpu.idle").exists()
    for demoted, idle, share in (
        (False, False, 1),
        (True, True, 0),
        (True, False, 4),
        (True, True, 0),
        (False, False, 1),
    ):
        assert group.demote(demoted, idle)
        if has_idle:
            assert (slot / "cpu.idle").read_text() == f"{int(idle)}\n"
        if share or not has_idle:
            assert int(weight.read_text()) == of_a_call // (share or 4)


@pytest.mark.parametrize(("own_mb", "outcome"), [(1000, Outcome.QUEUE_TIMEOUT), (40, Outcome.MEMORY)])
def test_the_service_has_a_limit_below_the_machines_memory(
    tree: GroupTree, own_mb: int, outcome: Outcome
) -> None:
    (limit,) = [
        path for name in ("memory.limit_in_bytes", "memory.max") if (path := tree.roots[0] / name).exists()
    ]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert int(limit.read_text()) <= memory * 3 // 4
    limit.write_text(str(100 * MB))
    (group,) = tree.slots
    group.set_limit(own_mb * MB)
    runner = Runner(IsolationLayers(), 0, group, "")
    before = group.shortage()
    pid = os.fork()
    if pid == 0:
        group.join()
        filled = [b"x" * MB for _ in range(300)]
        os._exit(len(filled) & 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert runner._killed_for_memory(before) is outcome
