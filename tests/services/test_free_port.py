"""Ports for services that start a little later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rstar2_megatron.services import process


def test_a_free_port_is_none_that_an_outgoing_connection_may_get() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest <= process._PORTS.start:
        pytest.skip(f"this kernel gives ports from {lowest} on to outgoing connections")
    for _ in range(20):
        port = process.free_port()
        assert port in process._PORTS and port < lowest
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_taken_ports_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = process.free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(process, "_PORTS", [port] * 100)
        assert process.free_port() != port


def test_several_ports_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is random, so the same port may come twice while nobody listens on it yet."""
    drawn = iter([7001, 7001, 7002, 7001, 7003])
    monkeypatch.setattr(process, "free_port", lambda: next(drawn))
    assert process.free_ports(3) == [7001, 7002, 7003]
