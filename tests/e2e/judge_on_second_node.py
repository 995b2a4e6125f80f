"""Starts a judge worker as a process of the second raylet: python judge_on_second_node.py RAY_ADDRESS REDIS_URI

The Ray actor that runs it is detached, so that it lives as long as the cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
class JudgeWorker:
    def start(self, redis_uri: str) -> str:
        command = [sys.executable, "-m", "rstar2_megatron.judge", "worker", "--redis-uri", redis_uri]
        self.process = subprocess.Popen([*command, "--workers", "2", "--exit-with-parent"])
        return os.environ["RLINF_NODE_RANK"]


def main(address: str, redis_uri: str) -> None:
    ray.init(address=address, logging_level="ERROR", log_to_driver=False, namespace="judge")
    head = ray.get_runtime_context().get_node_id()
    (second,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != head]
    where = NodeAffinitySchedulingStrategy(second, soft=False)
    worker = JudgeWorker.options(scheduling_strategy=where, lifetime="detached", name="judge").remote()
    print("judge worker on node", ray.get(worker.start.remote(redis_uri), timeout=60))


if __name__ == "__main__":
    main(*sys.argv[1:])
