"""Ports for services that start a little later."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from rstar2_megatron.services.process import free_port, free_ports

MANY = 400  # random choices of 10,000 ports, among which some port comes twice: but for 3 in 10,000 times


def test_a_free_port_is_none_that_an_outgoing_connection_may_get() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 30_000:
        pytest.skip(f"this kernel gives ports from {lowest} on to outgoing connections")
    assert all(free_port() < lowest for _ in range(20))


def test_taken_ports_are_passed_over() -> None:
    with contextlib.ExitStack() as held:
        for _ in range(MANY):
            held.enter_context(socket.create_server(("127.0.0.1", free_port())))


def test_several_ports_differ_while_nobody_listens_on_them() -> None:
    assert len(set(free_ports(MANY))) == MANY
