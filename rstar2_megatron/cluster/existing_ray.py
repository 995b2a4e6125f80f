"""A Ray cluster that somebody else started and RAY_ADDRESS names: does it answer, has it its nodes."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import ray

_ANSWER_S = 10.0
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty SETTINGS frame of HTTP/2
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS


class ClusterError(RuntimeError):
    """The Ray cluster of RAY_ADDRESS does not answer, or has too few nodes."""


def check_answers(address: str) -> None:
    """Raises ClusterError when no gRPC server answers at HOST:PORT: Ray would wait minutes for a head that is not there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", "local": Ray resolves them
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(_GREETING)
            encrypted = os.environ.get("RAY_USE_TLS", "0") == "1"
            if not encrypted and connection.recv(9)[3:4] != _SETTINGS[3:4]:  # the type of the first frame
                raise ConnectionError("the process that listens there is not a Ray head")
    except OSError as error:
        raise ClusterError(
            f"RAY_ADDRESS={address} does not answer: {error}. Start Ray there by `ray start --head`, with its port open to "
            "this node; or unset RAY_ADDRESS for a run on this node"
        ) from error


def wait_for_nodes(address: str, wanted: int, timeout_s: float) -> list[dict[str, Any]]:
    """The living nodes, as Ray describes them, once there are `wanted`. Ray must be connected. Raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < wanted:
        if time.monotonic() > deadline:
            hosts = ", ".join(node["NodeManagerAddress"] for node in alive)
            raise ClusterError(
                f"the Ray cluster at RAY_ADDRESS={address} has {len(alive)} of cluster.num_nodes={wanted} nodes after "
                f"{timeout_s:g} s (cluster.node_wait_timeout_s): {hosts}; start the others with `ray start "
                f"--address={address}` (RLINF_NODE_RANK set), the head's port open to them, or lower cluster.num_nodes"
            )
        time.sleep(0.5)
    return alive
