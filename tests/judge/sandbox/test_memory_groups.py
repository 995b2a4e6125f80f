"""The slots' control groups: what a call weighs, and whose fault it is that memory was short."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import httpx
import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.sandbox.cgroup import CpuShare, GroupTree, SlotGroup
from tests.judge.calls import HELD, control_group, let_go, until_marked
from tests.judge.conftest import Run
from tests.judge.sandbox.conftest import need

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
    group = tree.slots[0]
    weights = [root / "slot-0" / name for root in tree.roots for name in ("cpu.shares", "cpu.weight")]
    (weight,) = {path for path in weights if path.exists()}
    slot = weight.parent
    of_a_call = {"cpu.shares": 1024, "cpu.weight": 100}[weight.name]
    has_idle = (slot / "cpu.idle").exists()
    for share, part in (
        (CpuShare.NEW, 1),
        (CpuShare.IDLE, 0),
        (CpuShare.DEMOTED, 4),
        (CpuShare.IDLE, 0),
        (CpuShare.NO_CALL, 1),
    ):
        assert group.set_share(share)
        if has_idle:
            assert (slot / "cpu.idle").read_text() == f"{int(share is CpuShare.IDLE)}\n"
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
        (0, CpuShare.NEW, 1),
        (1, CpuShare.NEW, 2),
        (1, CpuShare.NO_CALL, 2),  # until the next one begins
        (1, CpuShare.NEW, 2),
        (0, CpuShare.IDLE, 1),
        (1, CpuShare.NO_CALL, 0),
        (1, CpuShare.NEW, 1),
        (2, CpuShare.DEMOTED, 4),  # short of CPU
        (1, CpuShare.IDLE, 4),
        (2, CpuShare.IDLE, 0),
        (0, CpuShare.NO_CALL, 0),
    ):
        _wait(_child(tree.slots[slot], share))
        check(calls)
    many = (CpuShare.NEW, CpuShare.IDLE, CpuShare.NO_CALL) * 100
    for last, calls in ((CpuShare.NEW, 3), (CpuShare.IDLE, 0)):
        for pid in [_child(group, *many, last) for group in tree.slots]:
            _wait(pid)
        check(calls)


def _child(group: SlotGroup, *shares: CpuShare) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if all(map(group.set_share, shares)) else 2)
        finally:
            os._exit(1)
    return pid


def _wait(pid: int) -> None:
    assert os.waitpid(pid, 0)[1] == 0


_TWO_PROCESSES = """
import os
until_full, full = os.pipe()
child = os.fork()
if not child: os.close(full)
filled = bytearray(200 << 20)
filled[::4096] = bytes([1]) * len(filled[::4096])
if child:
    os.close(full)
    os.waitpid(child, 0)
else:
    os.read(until_full, 1)
"""


def test_a_call_whose_processes_pass_its_limit_together_has_used_up_its_memory(run: Run, layers: set[str]) -> None:
    need(layers, "memory_cgroup")
    assert run(_TWO_PROCESSES)["outcome"] == "memory"


async def test_a_call_that_others_leave_no_memory_is_not_blamed(judge: JudgeService, layers: set[str]) -> None:
    """All calls of a judge have three quarters of the machine's memory together, which is less than their limits promise."""
    need(layers, "memory_cgroup")
    async with (
        JudgeClient(judge.url, time_limit_s=60.0) as client,
        httpx.AsyncClient(base_url=judge.url, trust_env=False, timeout=60) as plain,
    ):
        call = asyncio.create_task(client.run(HELD))
        (process,) = await until_marked(judge, 1)
        all_calls = control_group(process, "memory").parent
        (limit,) = [path for name in ("memory.limit_in_bytes", "memory.max") if (path := all_calls / name).exists()]
        (used,) = [path for name in ("memory.usage_in_bytes", "memory.current") if (path := all_calls / name).exists()]
        await let_go(judge, call)
        usual = limit.read_text()
        assert int(usual) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4

        async def told(size: int, **options: str) -> tuple[str, str]:
            body = {"type": "python", "solution": f"x = b'x' * ({size} << 20)", "options": options}
            while True:
                low = (int(used.read_text()) // MB + 60) * MB
                limit.write_text(str(low))
                result = (await plain.post("/run", json=body)).json()
                if int(limit.read_text()) == low:  # else a judge that started elsewhere has shared the memory out anew
                    return result["outcome"], result["reason"]

        try:
            assert await told(150) == ("queue_timeout", "queue_timeout")
            assert await told(150, session="short-of-memory") == ("internal_error", "internal_error")
            assert await told(10) == ("ok", "")
        finally:
            limit.write_text(usual)
