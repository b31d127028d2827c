"""Where a worker listens, and what it shows of itself."""

from __future__ import annotations

import socket

import pytest

from autopar.runtime.ray.worker import _bind_address
from autopar.runtime.remote.place import WorkerPlace


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_coordinator_listens_at_its_own_address_only() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    assert _bind_address(coordinator) == coordinator


def test_an_address_that_this_host_does_not_have() -> None:
    assert _bind_address(f"203.0.113.7:{free_port()}") is None  # reserved for documentation


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="already in use"):
            _bind_address(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_place_does_not_show_the_token() -> None:
    place = WorkerPlace(0, 0, 1, 0, "n", (0,), (0,), "cpu", "127.0.0.1", "a secret", "/tmp/x")
    assert "secret" not in repr(place)
