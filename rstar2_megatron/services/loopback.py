"""Keeps the rendezvous of collectives on loopback when a run uses one machine.

torch's TCPStore listens on every interface, whatever host it is given. RLinf builds its groups (channels, send/recv) from
TCPStore, so a run on 127.0.0.1 would be reachable from outside. RLinf imports the module named by RLINF_EXT_MODULE in each
worker and calls its `register()`. `register()` binds the store of a loopback rendezvous to 127.0.0.1. Other hosts are
unchanged. The engine's processes also call `register()`.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from typing import Any

_LOOPBACK = ("127.0.0.1", "localhost")


def register() -> None:
    """Patch torch's rendezvous. RLinf calls it in every worker process. Safe to call twice."""
    # The attribute `torch.distributed.rendezvous` is a function that hides the module of that name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if getattr(rendezvous.TCPStore, "_rstar2_loopback", False):
        return
    make_store = rendezvous.TCPStore

    @functools.wraps(make_store, updated=())
    def tcp_store(host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
        is_master = args[1] if len(args) > 1 else kwargs.get("is_master", False)
        if is_master and host_name in _LOOPBACK and kwargs.get("master_listen_fd") is None:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen(512)
                kwargs["master_listen_fd"] = listener.detach()
        return make_store(host_name, port, *args, **kwargs)

    tcp_store._rstar2_loopback = True  # type: ignore[attr-defined]
    rendezvous.TCPStore = tcp_store  # type: ignore[attr-defined]


def listening_address(num_nodes: int) -> str:
    """Address on which a service must listen so that every node of the run reaches it.

    Loopback for a run on one machine, otherwise this node's address on the network of RAY_ADDRESS.
    """
    head = os.environ.get("RAY_ADDRESS", "").rpartition(":")[0]
    if num_nodes == 1 or head in _LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head or "10.255.255.255", 9))  # sends nothing: the kernel chooses the interface
        return str(probe.getsockname()[0])


def environment() -> dict[str, str]:
    """Environment variables that keep a run on one machine on loopback. Set them before RLinf is imported."""
    return {
        "RLINF_EXT_MODULE": "rstar2_megatron.services.loopback",
        # Ray's switch for a one-machine cluster: without it Ray replaces 127.0.0.1 by an outside address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }
