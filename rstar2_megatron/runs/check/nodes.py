"""The nodes of a check: programs run on them through an agent each, carried there by Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

from rstar2_megatron.runs.check.agent import Answer, NodeAgent
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.result import CheckFailed

_CARRY_S = 30.0  # what Ray may add to a program's deadline
_JOIN_S = 60.0


class Nodes:
    """Programs on all nodes or on the first. Without Ray (`start_ray` not called, or failed) there is only this node."""

    def __init__(self, device: Literal["cpu", "cuda"], slots: tuple[int, ...]) -> None:
        """slots: of every node that programs may use, by their numbers on it."""
        self.device, self.slots = device, slots
        self.patience = 1.0
        """Factor of every deadline: programs take longer with the weights of a wide model."""
        self._files = tempfile.TemporaryDirectory(prefix="rstar2-check-")
        self._meetings = 0
        self._local = NodeAgent(os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._agents: list[Any] = []
        self._addresses: list[str] = []
        self._head: Any = None

    def __len__(self) -> int:
        return max(1, len(self._agents))

    # ------------------------------------------------------------------------------------------- Ray

    def start_ray(self, num_nodes: int, join_s: float = _JOIN_S) -> list[str]:
        """Attach to RAY_ADDRESS, or start a head of our own; an agent on each node. Returns the nodes' addresses.

        Raises CheckFailed when there are fewer than `num_nodes` nodes after `join_s`.
        """
        # Here: Ray takes seconds, and reads its environment when it is imported, which our room `cluster` sets before.
        from rstar2_megatron.cluster.existing_ray import ClusterError, check_answers, wait_for_nodes
        from rstar2_megatron.cluster.ray_head import RayHead  # isort: split

        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not os.environ.get("RAY_ADDRESS"):
            if num_nodes > 1:
                raise CheckFailed(
                    f"cluster.num_nodes={num_nodes}, but RAY_ADDRESS is not set",
                    remedy="start Ray on every node (docs/multi_node.md) and set RAY_ADDRESS=HEAD:PORT here",
                )
            self._head = RayHead(num_cpus=16)
            self._head.start()
        else:
            try:
                check_answers(os.environ["RAY_ADDRESS"])
            except ClusterError as error:
                raise CheckFailed(str(error)) from error
        address = os.environ["RAY_ADDRESS"]
        ray.init(address=address, namespace="rstar2-check", logging_level=logging.ERROR, log_to_driver=False)
        try:
            alive = wait_for_nodes(address, num_nodes, join_s)
        except ClusterError as error:
            raise CheckFailed(str(error)) from error
        own = ray.get_runtime_context().get_node_id()
        alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
        agents: list[Any] = []
        for node in alive[:num_nodes]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") if node["NodeID"] == own else None
            agents.append(ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=where).remote(visible))
        ready, late = ray.wait(
            [agent.free_port.remote("127.0.0.1") for agent in agents], num_returns=len(agents), timeout=join_s
        )
        if late:
            raise CheckFailed(f"{len(late)} of {len(agents)} nodes started no worker within {join_s:.0f} s")
        ray.get(ready)
        self._agents = agents
        self._addresses = [node["NodeManagerAddress"] for node in alive[:num_nodes]]
        return self._addresses

    # ---------------------------------------------------------------------------------------- programs

    def everywhere(self, program: str, deadline_s: float, **arguments: Any) -> list[Answer]:
        """The program once on each node, without accelerators; answers by node."""
        jobs = [[Job(node=node, device=self.device)] for node in range(len(self))]
        return self._run(program, jobs, arguments, deadline_s)

    def ranks(self, program: str, count: int, deadline_s: float, **arguments: Any) -> list[Any]:
        """The program in `count` ranks of the first node that meet in a process group; values by rank. Raises CheckFailed."""
        return values(self.on_each(program, count, deadline_s, nodes=1, **arguments)[0])

    def on_each(
        self, program: str, count: int, deadline_s: float, nodes: int | None = None, **arguments: Any
    ) -> list[list[Answer]]:
        """`count` ranks on every node, each node a group of its own; answers by node and rank."""
        jobs = []
        for node in range(nodes or len(self)):
            meeting = self._meeting(node)
            jobs.append([self._job(rank, count, meeting, node, rank) for rank in range(count)])
        answers = self._run(program, jobs, arguments, deadline_s)
        return [[a for a in answers if a.node == node] for node in range(len(jobs))]

    def across(self, program: str, count: int, deadline_s: float, **arguments: Any) -> list[Any]:
        """`count` ranks on every node, all in one group; values by rank. Raises CheckFailed."""
        import ray

        host = self._addresses[0]
        port = ray.get(self._agents[0].free_port.remote(host), timeout=_CARRY_S)
        world, meeting = count * len(self), f"tcp://{host}:{port}"
        jobs = [
            [self._job(node * count + slot, world, meeting, node, slot) for slot in range(count)] for node in range(len(self))
        ]
        return values(self._run(program, jobs, arguments, deadline_s))

    def engine(self, program: str, slots: tuple[int, ...], deadline_s: float, **arguments: Any) -> Any:
        """The program in one process of the first node that sees these accelerators. Raises CheckFailed."""
        job = Job(device=self.device, devices=slots, init_method=self._meeting(0))
        return values(self._run(program, [[job]], arguments, deadline_s))[0]

    def _job(self, rank: int, world: int, meeting: str, node: int, slot: int) -> Job:
        return Job(rank, world, meeting, self.device, (self.slots[slot],), node)

    def _meeting(self, node: int) -> str:
        """The rendezvous address of ranks of one node."""
        if node:  # a port: what this node has for temporary files may not be there
            import ray

            port = ray.get(self._agents[node].free_port.remote("127.0.0.1"), timeout=_CARRY_S)
            return f"tcp://127.0.0.1:{port}"
        # A file, not a port: another program may take a port before the first rank listens on it. Not in the scratch
        # directory: locks of network file systems are slow or missing.
        self._meetings += 1
        return f"file://{self._files.name}/meeting-{self._meetings}"

    def _run(self, program: str, jobs: Sequence[Sequence[Job]], arguments: dict[str, Any], deadline_s: float) -> list[Answer]:
        deadline_s *= self.patience
        if not self._agents:
            return self._local.run(program, jobs[0], arguments, deadline_s)
        import ray

        calls = [
            agent.run.remote(program, list(own), arguments, deadline_s) for agent, own in zip(self._agents, jobs, strict=False)
        ]
        ray.wait(calls, num_returns=len(calls), timeout=deadline_s + _CARRY_S)
        answers: list[Answer] = []
        for own, call in zip(jobs, calls, strict=True):
            try:
                answers += ray.get(call, timeout=0.1)
            except Exception as error:
                said = f"node {own[0].node} did not answer: {type(error).__name__}: {error}"
                answers += [Answer(job.rank, job.node, error=said) for job in own]
        return answers

    # ------------------------------------------------------------------------------------------- ending

    def free(self) -> None:
        """End the processes of all nodes, so that their memory is free."""
        self._local.close()
        if self._agents:
            import ray

            with contextlib.suppress(Exception):
                ray.get([agent.close.remote() for agent in self._agents], timeout=_CARRY_S)

    def close(self) -> None:
        """End processes, agents, and the Ray head if it is ours. Safe to call twice."""
        self.free()
        self._agents = []
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        if self._head is not None:
            self._head.stop()
            self._head = None
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
