"""The memory of all calls together has a limit of its own, and a call that ends for it is not the program's failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.sandbox.call import Runner
from rstar2_megatron.judge.sandbox.cgroup import GroupTree, Share, SlotGroup
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
    for share, part in (
        (Share.NEW, 1),
        (Share.IDLE, 0),
        (Share.DEMOTED, 4),
        (Share.IDLE, 0),
        (Share.NO_CALL, 1),
    ):
        assert group.set_share(share)
        if has_idle:
            assert (slot / "cpu.idle").read_text() == f"{int(share is Share.IDLE)}\n"
        if part or not has_idle:
            assert int(weight.read_text()) == of_a_call // (part or 4)


def test_all_slots_are_idle_while_calls_run_and_all_are_idle() -> None:
    """The slots are processes of their own, and begin and end calls at the same time."""
    try:
        tree = GroupTree(3, 4)
    except OSError as error:
        pytest.skip(f"no memory control groups: {error}")
    try:
        if tree.without_cpu is not None:
            pytest.skip(f"no CPU groups: {tree.without_cpu}")
        (parent,) = [root for root in tree.roots if (root / "slot-0" / "cpu.idle").exists()] or [None]
        if parent is None:
            pytest.skip("no idle groups: Linux before 5.15")
        (weight,) = [path for name in ("cpu.shares", "cpu.weight") if (path := parent / name).exists()]
        usual = {"cpu.shares": "4096\n", "cpu.weight": "400\n"}[weight.name]

        def check(is_idle: bool) -> None:
            assert (parent / "cpu.idle").read_text() == f"{int(is_idle)}\n"
            assert is_idle or weight.read_text() == usual

        check(False)
        for slot, share, is_idle in (
            (0, Share.NEW, False),
            (0, Share.IDLE, True),
            (1, Share.NEW, False),
            (1, Share.NO_CALL, True),
            (2, Share.DEMOTED, False),
            (1, Share.IDLE, False),
            (2, Share.IDLE, True),
            (0, Share.NO_CALL, True),
            (1, Share.NO_CALL, True),
            (2, Share.NO_CALL, False),
        ):
            _wait(_child(tree.slots[slot], share))
            check(is_idle)
        many = (Share.NEW, Share.IDLE, Share.NO_CALL) * 100
        for last in (Share.NEW, Share.IDLE):
            for pid in [_child(group, *many, last) for group in tree.slots]:
                _wait(pid)
            check(last is Share.IDLE)
    finally:
        tree.remove()


def _child(group: SlotGroup, *shares: Share) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if all(map(group.set_share, shares)) else 2)
        finally:
            os._exit(1)
    return pid


def _wait(pid: int) -> None:
    assert os.waitpid(pid, 0)[1] == 0


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
