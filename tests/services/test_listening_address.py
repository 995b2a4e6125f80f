"""Where a run's own services listen."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from rstar2_megatron.services.loopback import listening_address


def test_one_machine_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert listening_address(1) == "127.0.0.1"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # a simulated cluster
    assert listening_address(2) == "127.0.0.1"


def test_several_nodes_get_an_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    try:
        address = listening_address(2)
    except OSError:
        pytest.skip("this machine has no network")
    assert not ipaddress.ip_address(address).is_loopback
    with socket.socket() as server:
        server.bind((address, 0))
