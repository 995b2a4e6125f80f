"""The machine misbehaves: its clock jumps, its disk is full, it is asked by hundreds of clients at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from tests.judge.calls import HELD, let_go, until_marked
from tests.judge.waiting import until

# Shifts the wall clock of the processes it is loaded into by the seconds that stand in a file.
SHIFTED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) {
    static volatile long *seconds = NULL;
    if (!seconds) {
        int fd = open(getenv("CLOCK_SHIFT_FILE"), O_RDONLY);
        if (fd < 0) return 0;
        seconds = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    }
    return *seconds;
}
int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *) = NULL;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, t);
    if (clock == CLOCK_REALTIME) t->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the shifted clock")
async def test_clock_jumps_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library, shift = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "shift"
    source.write_text(SHIFTED_CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(struct.pack("<q", 0))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_SHIFT_FILE", str(shift))
    with running_judge(num_workers=2, time_limit_s=60.0) as service:
        monkeypatch.delenv("LD_PRELOAD")
        async with JudgeClient(service.url, time_limit_s=60.0) as client:
            for jump_s in (3600, -7200):
                calls = [asyncio.create_task(client.run(HELD)) for _ in range(3)]
                await until_marked(service, 2)
                with shift.open("r+b") as file:
                    file.write(struct.pack("<q", jump_s))
                with redis.Redis.from_url(service.redis_uri) as server:
                    assert abs(server.time()[0] - time.time() - jump_s) < 60  # it did jump
                assert [result.outcome for result in await let_go(service, *calls)] == [Outcome.OK] * 3
            assert client.counters["retries"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=1777", "tmpfs", directory], capture_output=True)
    if done.returncode != 0:
        pytest.skip("cannot mount a small file system")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.ci
async def test_full_scratch_disk_costs_waiting_only(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr("tempfile.tempdir", None)
    log = small_disk.parent / "judge.log"
    with running_judge(num_workers=2, log_path=log) as service:
        async with JudgeClient(service.url, max_outage_s=60) as client:
            assert (await client.run("print(1)")).ok
            filling = small_disk / "filling"
            with filling.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(65536))
            # more than Redis' append-only file can take now
            calls = [asyncio.create_task(client.run(f"print({i})  # {'x' * 20_000}")) for i in range(40)]
            await until(lambda: "No space left" in log.read_text(), "Redis refuses")
            async with httpx.AsyncClient(timeout=60) as http:  # the reason reaches the one who waits
                refused = await http.post(f"{service.url}/run", json={"type": "python", "solution": "print(1)"})
            assert refused.status_code == 503
            assert "No space left on device" in refused.text and f"its data lies in {small_disk}" in refused.text
            filling.unlink()
            results = await asyncio.wait_for(asyncio.gather(*calls), 120)
            assert [r.stdout for r in results] == [f"{i}\n" for i in range(40)]
            assert service.alive()
    assert os.listdir(small_disk) == []


@pytest.mark.ci
async def test_hundreds_of_clients_at_once(judge: JudgeService) -> None:
    async with JudgeClient(judge.url, max_concurrency=600, request_timeout_s=120) as client:
        calls = (client.run(f"print({i})") for i in range(600))
        results = await asyncio.wait_for(asyncio.gather(*calls), 120)
        assert [r.stdout for r in results] == [f"{i}\n" for i in range(600)]
        assert client.counters["outcome_ok"] == 600
