"""Which way the weights go from the actor to the engines. Pure arithmetic on where both stand.

- cuda_ipc: each engine reads the buffer of the actor rank on its own GPU;
- shared_memory: the actor's first rank writes a memfd, every engine of the node reads it;
- broadcast: to the first engine of every node over RLinf's collectives (NCCL beside GPUs, gloo otherwise),
  from there by shared memory to the others of that node;
- disk: files in a directory that all nodes see; slowest, needs nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_attempts = itertools.count(1)  # only the driver makes routes

RouteKind = Literal["cuda_ipc", "shared_memory", "broadcast", "disk"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands: its node, and the numbers of its accelerators in the cluster."""

    node: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightRoute:
    """What every worker of a weight sync must know; the same object for all."""

    kind: RouteKind
    actor_group: str
    rollout_group: str
    leader_of: tuple[int, ...]
    """For each engine, the engine of its node that receives a broadcast."""
    actor_ranks: tuple[tuple[int, ...], ...] = ()
    """For each engine, the actor rank on each of its devices (cuda_ipc)."""
    bucket_bytes: int = 512 << 20
    directory: str = ""
    attempt: int = 0
    """Counts the syncs of a run and their repetitions; messages of an earlier one are void."""
    actor_nodes: tuple[int, ...] = ()
    """The node of each actor rank (cuda_ipc)."""

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.leader_of))

    def followers(self, leader: int) -> list[int]:
        return [rank for rank, other in enumerate(self.leader_of) if other == leader and rank != leader]

    def keeps_host_copy(self, actor_rank: int, number: int) -> bool:
        """Whether this rank writes the copy of bucket `number` that restarts engines of its node (cuda_ipc).

        The ranks that serve an engine of the node take turns, so that each one copies a share.
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
    """The routes to try, best first: the one that is asked for, or all that can work.

    Raises ValueError when the one that is asked for cannot work, with the reason.
    """
    obstacles: dict[RouteKind, str] = {}
    on_gpu = {(place.node, d) for place in actor for d in place.devices[:1]}
    if device != "cuda":
        obstacles["cuda_ipc"] = "there is no GPU"
    elif not all(place.devices and {(place.node, d) for d in place.devices} <= on_gpu for place in rollout):
        obstacles["cuda_ipc"] = "an engine stands on a GPU without an actor rank"
    apart = sorted({place.node for place in rollout} - {actor[0].node})
    if apart:
        obstacles["shared_memory"] = (
            f"there are engines on node {apart[0]}, the actor's first is {actor[0].node}"
        )
    everything: tuple[RouteKind, ...] = ("cuda_ipc", "shared_memory", "broadcast", "disk")
    if wanted == "auto":
        return [route for route in everything if route not in obstacles]
    if wanted in obstacles:
        raise ValueError(
            f"actor.weight_sync.route={wanted} is not possible here: {obstacles[wanted]}; set it to auto"
        )
    return [wanted]


def make_route(
    kind: RouteKind,
    actor_group: str,
    rollout_group: str,
    actor: Sequence[Place],
    rollout: Sequence[Place],
    *,
    bucket_bytes: int,
    directory: str,
) -> WeightRoute:
    """The route of this kind between these workers, for one attempt at a sync."""
    first_on: dict[int, int] = {}
    for rank, place in enumerate(rollout):
        first_on.setdefault(place.node, rank)
    rank_on = {(place.node, d): rank for rank, place in enumerate(actor) for d in place.devices[:1]}
    actor_ranks: tuple[tuple[int, ...], ...] = ()
    if kind == "cuda_ipc":
        actor_ranks = tuple(tuple(rank_on[place.node, d] for d in place.devices) for place in rollout)
    return WeightRoute(
        kind,
        actor_group,
        rollout_group,
        leader_of=tuple(first_on[place.node] for place in rollout),
        actor_ranks=actor_ranks,
        bucket_bytes=bucket_bytes,
        directory=directory,
        attempt=next(_attempts),
        actor_nodes=tuple(place.node for place in actor),
    )
