"""Chooses the route of weights from the actor to the engines, from the placement of both. Pure.

- cuda_ipc: each engine reads the buffer of the actor rank on its own GPU.
- shared_memory: the actor's first rank writes a memfd, which every engine of its node reads.
- broadcast: RLinf's collectives (NCCL on GPUs, gloo otherwise) send to the first engine of every node, which passes the
  weights to the other engines of its node by shared memory.
- disk: files in a directory that all nodes share. The slowest route, without further requirements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

_attempts = itertools.count(1)  # only the driver makes routes

STEP_TIMEOUT_S = 25.0  # of one bucket: the next route begins within 30 s

RouteKind = Literal["cuda_ipc", "shared_memory", "broadcast", "disk"]
"""The cheapest first."""


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of a worker: its node, the cluster-wide numbers of its accelerators, its group and rank in RLinf."""

    node: int
    devices: tuple[int, ...] = ()
    address: tuple[str, int] = ("", 0)


@dataclass(frozen=True, slots=True)
class WeightRoute:
    """Parameters of one weight sync, equal for all workers. A lost engine takes no part."""

    kind: RouteKind
    actor_group: str
    leader_of: tuple[int | None, ...]
    """For each engine, the engine of its node that receives the broadcast; None for a lost one."""
    addresses: tuple[tuple[str, int], ...] = ()
    """For each engine, group and rank of its worker in RLinf."""
    actor_ranks: tuple[tuple[int, ...], ...] = ()
    """For each engine, the actor rank on each of its devices (cuda_ipc)."""
    bucket_bytes: int = 512 << 20
    directory: str = ""
    attempt: int = 0
    """Increases with every sync and every retry. Messages of an earlier attempt are ignored."""
    actor_nodes: tuple[int, ...] = ()
    """The node of each actor rank (cuda_ipc)."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """Longest wait for one bucket, in a collective or until the engine has loaded it."""

    @property
    def leaders(self) -> list[int]:
        return sorted({leader for leader in self.leader_of if leader is not None})

    @property
    def engines(self) -> list[int]:
        """Engines that are not lost."""
        return [engine for engine, leader in enumerate(self.leader_of) if leader is not None]

    def followers(self, leader: int) -> list[int]:
        return [rank for rank, other in enumerate(self.leader_of) if other == leader and rank != leader]

    def keeps_host_copy(self, actor_rank: int, number: int) -> bool:
        """Whether this rank writes its node's host copy of bucket `number`, for engine restarts (cuda_ipc).

        The actor ranks of the node write the buckets in turn.
        """
        node = self.actor_nodes[actor_rank]
        sharing = [r for ranks in self.actor_ranks for r in ranks if self.actor_nodes[r] == node]
        return sorted(sharing)[number % len(sharing)] == actor_rank

    def engine_of(self, actor_rank: int) -> int | None:
        """The engine that reads this actor rank's memory (cuda_ipc)."""
        return next((e for e, ranks in enumerate(self.actor_ranks) if actor_rank in ranks), None)


def possible_routes(
    wanted: Literal["auto"] | RouteKind, actor: Sequence[Place], rollout: Sequence[Place], device: str
) -> list[RouteKind]:
    """The routes to try, best first: the `wanted` route, or with `auto` every possible one.

    Raises ValueError, with the reason, when the `wanted` route is not possible.
    """
    obstacles: dict[RouteKind, str] = {}
    on_gpu = {(place.node, d) for place in actor for d in place.devices[:1]}
    if device != "cuda":
        obstacles["cuda_ipc"] = "there is no GPU"
    elif not all(place.devices and {(place.node, d) for d in place.devices} <= on_gpu for place in rollout):
        obstacles["cuda_ipc"] = "an engine has a GPU without an actor rank"
    apart = sorted({place.node for place in rollout} - {actor[0].node})
    if apart:
        obstacles["shared_memory"] = f"there are engines on node {apart[0]}, the actor's first is {actor[0].node}"
    if wanted == "auto":
        return [route for route in get_args(RouteKind) if route not in obstacles]
    if wanted in obstacles:
        raise ValueError(f"actor.weight_sync.route={wanted} is not possible here: {obstacles[wanted]}; set it to auto")
    return [wanted]


def make_route(
    kind: RouteKind,
    actor_group: str,
    actor: Sequence[Place],
    rollout: Sequence[Place | None],
    *,
    bucket_bytes: int,
    directory: str,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> WeightRoute:
    """The route of this kind for one attempt at a weight sync. rollout: None for a lost engine."""
    first_on: dict[int, int] = {}
    for rank, place in enumerate(rollout):
        if place is not None:
            first_on.setdefault(place.node, rank)
    rank_on = {(place.node, d): rank for rank, place in enumerate(actor) for d in place.devices[:1]}
    actor_ranks: tuple[tuple[int, ...], ...] = ()
    if kind == "cuda_ipc":
        actor_ranks = tuple(() if place is None else tuple(rank_on[place.node, d] for d in place.devices) for place in rollout)
    return WeightRoute(
        kind,
        actor_group,
        leader_of=tuple(None if place is None else first_on[place.node] for place in rollout),
        addresses=tuple(("", 0) if place is None else place.address for place in rollout),
        actor_ranks=actor_ranks,
        bucket_bytes=bucket_bytes,
        directory=directory,
        attempt=next(_attempts),
        actor_nodes=tuple(place.node for place in actor),
        step_timeout_s=step_timeout_s,
    )
