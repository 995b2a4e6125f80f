"""The nodes of a check: programs run on this one by an agent, and on each other by one that Ray carried there."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Literal

from rstar2_megatron.runs.check.agent import Answer, NodeAgent
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.result import CheckFailed
from rstar2_megatron.services.process import free_port

_CARRY_S = 30.0  # what Ray may add to a program's deadline
_JOIN_S = 60.0


class Nodes:
    """Programs on all nodes, or on this one alone until `start_ray` has found the others."""

    def __init__(self, device: Literal["cpu", "cuda"], slots: tuple[int, ...]) -> None:
        """slots: of every node that programs may use, by their numbers on it."""
        self.device, self.slots = device, slots
        self.patience = 1.0
        """Factor of every deadline: programs take longer with the weights of a wide model."""
        self._files = tempfile.TemporaryDirectory(prefix="rstar2-check-")
        self._meetings = 0
        self._local = NodeAgent(os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._others: list[Any] = []
        self._address = "127.0.0.1"
        self._ray: Any = None  # the module, once `start_ray` has set its environment

    def __len__(self) -> int:
        return 1 + len(self._others)

    # ------------------------------------------------------------------------------------------- Ray

    def start_ray(self, num_nodes: int, join_s: float = _JOIN_S) -> list[str]:
        """Attach to RAY_ADDRESS; an agent on each other node. Returns the nodes' addresses.

        One node needs no Ray without it. Raises CheckFailed when there are fewer than `num_nodes` nodes after `join_s`.
        """
        if not os.environ.get("RAY_ADDRESS"):
            if num_nodes > 1:
                raise CheckFailed(
                    f"cluster.num_nodes={num_nodes}, but RAY_ADDRESS is not set",
                    remedy="start Ray on every node (docs/multi_node.md) and set RAY_ADDRESS=HEAD:PORT here",
                )
            return [self._address]
        # Here: Ray takes seconds, and reads its environment when it is imported, which our room `cluster` sets before.
        from rstar2_megatron.cluster.existing_ray import ClusterError, check_answers, wait_for_nodes  # isort: split

        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        address = os.environ["RAY_ADDRESS"]
        self._ray = ray
        try:
            check_answers(address)
            ray.init(address=address, namespace="rstar2-check", logging_level=logging.ERROR, log_to_driver=False)
            alive = wait_for_nodes(address, num_nodes, join_s)
        except ClusterError as error:
            raise CheckFailed(str(error)) from error
        own = ray.get_runtime_context().get_node_id()
        alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
        others: list[Any] = []
        for node in alive[1:num_nodes]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            others.append(ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=where).remote())
        try:
            ray.get([agent.free_port.remote("127.0.0.1") for agent in others], timeout=join_s)
        except ray.exceptions.GetTimeoutError:
            raise CheckFailed(f"not each of {len(others)} other nodes started a worker within {join_s:.0f} s") from None
        self._others, self._address = others, alive[0]["NodeManagerAddress"]
        return [node["NodeManagerAddress"] for node in alive[:num_nodes]]

    # ---------------------------------------------------------------------------------------- programs

    def everywhere(self, program: str, deadline_s: float, **arguments: Any) -> list[Answer]:
        """The program once on each node, without accelerators; answers by node."""
        jobs = [[Job(node=node, device=self.device)] for node in range(len(self))]
        return self._run(program, jobs, arguments, deadline_s)

    def ranks(self, program: str, count: int, deadline_s: float, **arguments: Any) -> list[Any]:
        """The program in `count` ranks of this node that meet in a process group; values by rank. Raises CheckFailed."""
        return values(self._run(program, [self._group(0, count)], arguments, deadline_s))

    def one(self, program: str, deadline_s: float, **arguments: Any) -> Any:
        """The program in a single rank of this node; its value. Raises CheckFailed."""
        return self.ranks(program, 1, deadline_s, **arguments)[0]

    def on_each(self, program: str, count: int, deadline_s: float, **arguments: Any) -> list[list[Answer]]:
        """`count` ranks on every node, each node a group of its own; answers by node and rank."""
        jobs = [self._group(node, count) for node in range(len(self))]
        answers = self._run(program, jobs, arguments, deadline_s)
        return [[a for a in answers if a.node == node] for node in range(len(jobs))]

    def across(self, program: str, count: int, deadline_s: float, **arguments: Any) -> list[Any]:
        """`count` ranks on every node, all in one group; values by rank. Raises CheckFailed."""
        world, meeting = count * len(self), f"tcp://{self._address}:{free_port(self._address)}"
        jobs = [
            [self._job(node * count + slot, world, meeting, node, slot) for slot in range(count)] for node in range(len(self))
        ]
        return values(self._run(program, jobs, arguments, deadline_s))

    def engine(self, program: str, slots: tuple[int, ...], deadline_s: float, **arguments: Any) -> Any:
        """The program in one process of this node that sees these accelerators. Raises CheckFailed."""
        job = Job(device=self.device, devices=slots, init_method=self._meeting())
        return values(self._run(program, [[job]], arguments, deadline_s))[0]

    def _group(self, node: int, count: int) -> list[Job]:
        """Ranks of one node that meet there."""
        meeting = self._meeting()
        if node:  # a port: what this node has for temporary files may not be there
            port = self._ray.get(self._others[node - 1].free_port.remote("127.0.0.1"), timeout=_CARRY_S)
            meeting = f"tcp://127.0.0.1:{port}"
        return [self._job(rank, count, meeting, node, rank) for rank in range(count)]

    def _job(self, rank: int, world: int, meeting: str, node: int, slot: int) -> Job:
        return Job(rank, world, meeting, self.device, (self.slots[slot],), node)

    def _meeting(self) -> str:
        """The rendezvous address of ranks of this node."""
        # A file, not a port: another program may take a port before the first rank listens on it. Not in the scratch
        # directory: locks of network file systems are slow or missing.
        self._meetings += 1
        return f"file://{self._files.name}/meeting-{self._meetings}"

    def _run(self, program: str, jobs: Sequence[list[Job]], arguments: dict[str, Any], deadline_s: float) -> list[Answer]:
        """jobs: by node, this one first."""
        deadline_s *= self.patience
        ends = time.monotonic() + deadline_s + _CARRY_S
        calls = [
            agent.run.remote(program, own, arguments, deadline_s) for agent, own in zip(self._others, jobs[1:], strict=False)
        ]
        answers = self._local.run(program, jobs[0], arguments, deadline_s)
        for own, call in zip(jobs[1:], calls, strict=True):
            try:
                answers += self._ray.get(call, timeout=max(0.1, ends - time.monotonic()))
            except Exception as error:
                said = f"node {own[0].node} did not answer: {type(error).__name__}: {error}"
                answers += [Answer(job.rank, job.node, error=said) for job in own]
        return answers

    # ------------------------------------------------------------------------------------------- ending

    def free(self) -> None:
        """End the processes of all nodes, so that their memory is free."""
        self._local.close()
        if self._others:
            with contextlib.suppress(Exception):
                self._ray.get([agent.close.remote() for agent in self._others], timeout=_CARRY_S)

    def close(self) -> None:
        """End processes and agents. Safe to call twice."""
        self.free()
        self._others = []
        if self._ray is not None:
            with contextlib.suppress(Exception):
                self._ray.shutdown()
        self._files.cleanup()


def values(answers: Sequence[Answer]) -> list[Any]:
    """The values of all answers by rank. Raises CheckFailed with the first error that is not another one's consequence."""
    failed = [answer for answer in answers if answer.error]
    if failed:
        first = min(failed, key=lambda answer: ("within its deadline" in answer.error, answer.rank))
        last = first.error.strip().splitlines()[-1]
        details = "\n\n".join(f"node {a.node} rank {a.rank}:\n{a.error}\n{a.log}" for a in failed)
        raise CheckFailed(f"node {first.node} rank {first.rank}: {last}", details=details)
    return [answer.value for answer in sorted(answers, key=lambda answer: answer.rank)]
