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
        made = GroupTree(3, 4)
    except OSError as error:
        pytest.skip(f"no memory control groups: {error}")
    yield made
    made.remove()


def test_a_demoted_group_has_a_small_weight_or_none(tree: GroupTree) -> None:
    if tree.without_cpu is not None:
        pytest.skip(f"no CPU groups: {tree.without_cpu}")
    group, slot = tree.slots[0], tree.roots[-2 if len(tree.roots) == 3 else -1] / "slot-0"
    (weight,) = [path for name in ("cpu.shares", "cpu.weight") if (path := slot / name).exists()]
    of_a_call = {"cpu.shares": 1024, "cpu.weight": 100}[weight.name]
    has_idle = (slot / "cpu.idle").exists()
    for share, part in ((Share.NEW, 1), (Share.IDLE, 0), (Share.DEMOTED, 4), (Share.IDLE, 0), (Share.NO_CALL, 1)):
        assert group.set_share(share)
        if has_idle:
            assert (slot / "cpu.idle").read_text() == f"{int(share is Share.IDLE)}\n"
        if part or not has_idle:
            assert int(weight.read_text()) == of_a_call // (part or 4)


def test_the_group_of_all_slots_weighs_as_its_new_calls(tree: GroupTree) -> None:
    """The slots are processes of their own, and begin and end calls at the same time."""
    if tree.without_cpu is not None:
        pytest.skip(f"no CPU groups: {tree.without_cpu}")
    (parent,) = [root for root in tree.roots if (root / "slot-0" / "cpu.idle").exists()] or [None]
    if parent is None:
        pytest.skip("no idle groups: Linux before 5.15")
    (weight,) = [path for name in ("cpu.shares", "cpu.weight") if (path := parent / name).exists()]
    of_a_call = {"cpu.shares": 1024, "cpu.weight": 100}[weight.name]

    def check(calls: int) -> None:
        assert (parent / "cpu.idle").read_text() == f"{int(not calls)}\n"
        assert not calls or int(weight.read_text()) == calls * of_a_call

    for slot, share, calls in (
        (0, Share.NEW, 1),
        (1, Share.NEW, 2),
        (1, Share.NO_CALL, 2),  # until the next one begins
        (1, Share.NEW, 2),
        (0, Share.IDLE, 1),
        (1, Share.NO_CALL, 0),
        (1, Share.NEW, 1),
        (2, Share.DEMOTED, 4),  # short of CPU
        (1, Share.IDLE, 4),
        (2, Share.IDLE, 0),
        (0, Share.NO_CALL, 0),
    ):
        _wait(_child(tree.slots[slot], share))
        check(calls)
    many = (Share.NEW, Share.IDLE, Share.NO_CALL) * 100
    for last, calls in ((Share.NEW, 3), (Share.IDLE, 0)):
        for pid in [_child(group, *many, last) for group in tree.slots]:
            _wait(pid)
        check(calls)


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
def test_the_service_has_a_limit_below_the_machines_memory(tree: GroupTree, own_mb: int, outcome: Outcome) -> None:
    (limit,) = [path for name in ("memory.limit_in_bytes", "memory.max") if (path := tree.roots[0] / name).exists()]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert int(limit.read_text()) <= memory * 3 // 4
    limit.write_text(str(100 * MB))
    group = tree.slots[0]
    group.set_limit(own_mb * MB)
    runner = Runner(IsolationLayers(), 0, group, "")
    runner.shortage_before = group.shortage()
    pid = os.fork()
    if pid == 0:
        group.join()
        filled = [b"x" * MB for _ in range(300)]
        os._exit(len(filled) & 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert runner._killed_for_memory() is outcome
