"""Where a worker listens, and what it shows of itself."""

from __future__ import annotations

import socket
from typing import Any

import jax
import pytest

from autopar.runtime.ray.session import Limits, RaySession
from autopar.runtime.ray.worker import MeshWorker, _bind_address
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


def place_of(rank: int) -> WorkerPlace:
    return WorkerPlace(
        rank, rank, 2, 0, "n", (rank,), (0, 1), "gpu", "127.0.0.1", "a secret", "/tmp/x"
    )


class StopHereError(Exception):
    """In place of joining a mesh."""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_of_a_mesh_says_where_its_coordinator_listens(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def initialize(*args: Any, **options: Any) -> None:
        given.update(options)
        raise StopHereError

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    coordinator = f"127.0.0.1:{free_port()}"
    worker = object.__new__(MeshWorker)
    with pytest.raises(StopHereError):
        worker._begin(place_of(rank), coordinator, "", 1.0, Any)  # type: ignore[arg-type]
    assert given["coordinator_bind_address"] == (coordinator if rank == 0 else None)


def test_neither_a_place_nor_a_session_shows_the_token() -> None:
    assert "secret" not in repr(place_of(0))
    limits = Limits(1, 1, 1, 1, 1)
    session = RaySession(None, "id", "a secret", "cpu", 1, limits, {}, "executor")
    assert session.token == "a secret" and "secret" not in repr(session)
