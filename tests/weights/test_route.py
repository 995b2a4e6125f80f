"""The weight route that follows from the placement of the workers."""

from __future__ import annotations

import pytest

from rstar2_megatron.weights.route import Place, make_route, possible_routes

EIGHT = [Place(0, (i,)) for i in range(8)]
STRIDED = [Place(0, (i, i + 2)) for i in (0, 1, 4, 5)]  # TP 2 as RLinf places it beside an actor of TP 4
TWO_NODES = [Place(n, (8 * n + i,)) for n in range(2) for i in range(8)]


def test_collocated_engines_read_the_actor_rank_on_their_gpu() -> None:
    assert possible_routes("auto", EIGHT, STRIDED, "cuda")[0] == "cuda_ipc"
    route = make_route("cuda_ipc", "A", EIGHT, STRIDED, bucket_bytes=1, directory="")
    assert route.actor_ranks == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert [route.engine_of(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_engines_on_other_gpus_of_the_node_share_its_memory() -> None:
    actor, rollout = EIGHT[:4], EIGHT[4:]
    assert possible_routes("auto", actor, rollout, "cuda") == ["shared_memory", "broadcast", "disk"]
    with pytest.raises(ValueError, match="cuda_ipc is not possible here: an engine has a GPU without"):
        possible_routes("cuda_ipc", actor, rollout, "cuda")


def test_two_nodes() -> None:
    assert possible_routes("auto", TWO_NODES, TWO_NODES, "cuda")[0] == "cuda_ipc"
    actor, rollout = TWO_NODES[:8], TWO_NODES[6:]
    assert possible_routes("auto", actor, rollout, "cuda") == ["broadcast", "disk"]
    with pytest.raises(ValueError, match="engines on node 1, the actor's first is 0; set it to auto"):
        possible_routes("shared_memory", actor, rollout, "cuda")
    route = make_route("broadcast", "A", actor, rollout, bucket_bytes=1, directory="")
    assert route.leaders == [0, 2]  # one for each node receives, the others read its memory
    assert route.followers(0) == [1] and route.followers(2) == [3, 4, 5, 6, 7, 8, 9]


def test_cpu_has_no_ipc() -> None:
    assert possible_routes("auto", [Place(0)], [Place(0)], "cpu")[0] == "shared_memory"
    assert possible_routes("disk", [Place(0)], [Place(0)], "cpu") == ["disk"]
    with pytest.raises(ValueError, match="there is no GPU"):
        possible_routes("cuda_ipc", [Place(0)], [Place(0)], "cpu")
