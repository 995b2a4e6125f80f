"""A worker that Ray's memory monitor ends: one sentence with the figures and the keys to change."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: the monitor's threshold is set when Ray starts.
PROGRAM = """
import os
from rstar2_megatron.services import loopback
os.environ.update(loopback.environment())
import psutil, ray
from rstar2_megatron.cluster.calls import PendingCall, WorkerLost
from rstar2_megatron.cluster.ray_head import RayHead

ROOM_GB = 1.5
memory = psutil.virtual_memory()
os.environ["RAY_memory_usage_threshold"] = str((memory.total - memory.available + ROOM_GB * 2**30) / memory.total)
os.environ["RAY_memory_monitor_refresh_ms"] = "100"
head = RayHead(num_cpus=1, object_store_mb=80)
head.start()
try:
    ray.init(address="auto", log_to_driver=False)

    @ray.remote(max_restarts=0)
    class Hungry:
        def eat(self):
            import time
            kept = []
            while len(kept) < 48:  # 6 GB at most
                kept.append(bytearray(os.urandom(1 << 20) * 128))
                time.sleep(0.1)
            while True:
                time.sleep(1)  # until the monitor has looked

    worker = Hungry.remote()
    try:
        PendingCall("Actors.train_step", [worker.eat.remote()], [3]).result(120.0)
    except WorkerLost as error:
        print(error.rank, error)
finally:
    ray.shutdown()
    head.stop()
"""


@pytest.mark.ci
def test_a_worker_ended_for_memory_is_told_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("3 ")] or [done.stderr[-2000:]]
    assert "Actors.train_step: Ray's memory monitor ended the worker" in told, done.stderr[-2000:]
    assert " GB of " in told and "runner.max_tokens_per_mbs" in told and "--dry-run" in told
    assert done.stdout.count("\n") == 1, "more than the sentence"
