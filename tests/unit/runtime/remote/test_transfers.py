"""Programs that cut and join tiles are loaded before the first transfer: on a GPU, one that is
loaded later may wait for a transfer that waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.remote import Endpoint
from autopar.lower.tiles import plan_tiles
from autopar.runtime.remote.transfers import IncomingTiles, OutgoingTiles
from autopar.runtime.transports.base import InTile
from autopar.runtime.transports.cuda import _room, expect_landings
from tests.properties.test_remote_transfers import transfer_of


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The programs that XLA compiles during the test."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_is_compiled_once_cuts_and_joins_are_warm(compiled: list[str], kept: bool) -> None:
    shape = (4, 6 if kept else 10)  # one that no other test has compiled
    plan = plan_tiles(shape, 4, (0,), (2,), (1,), (2,))  # from rows to columns
    transfer = transfer_of(plan)
    sources = [Endpoint(0, device) for device in range(2)]
    targets = [Endpoint(1, device) for device in range(2)]
    leaving = OutgoingTiles([transfer], [kept], sources, targets, 0)
    coming = IncomingTiles([transfer], sources, targets, 1, jax.devices()[:2])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    values = np.arange(4 * shape[1], dtype=np.int32).reshape(shape)
    array = jax.device_put(values, NamedSharding(mesh, P("x")))
    warmed: set[Any] = set()
    leaving.warm_up(warmed)
    coming.warm_up(warmed)
    assert warmed
    compiled.clear()
    sent = leaving.tiles([array])
    landed = [
        jax.device_put(np.asarray(tile.data), jax.devices()[wanted.target.device])
        for tile, wanted in zip(sent, coming.tiles, strict=True)
    ]
    (got,) = coming.assemble(landed)
    np.testing.assert_array_equal(np.asarray(got), values)
    assert not compiled


def test_what_is_warm_is_not_run_again() -> None:
    transfer = transfer_of(plan_tiles((4, 6), 4, (0,), (2,), (1,), (2,)))
    ends = [Endpoint(0, 0), Endpoint(0, 1)]
    leaving = OutgoingTiles([transfer] * 2, [True] * 2, ends, ends, 0)
    warmed: set[Any] = set()
    leaving.warm_up(warmed)
    assert len(warmed) == 2  # one for each device


def test_room_for_tiles_is_made_by_programs_that_are_loaded(compiled: list[str]) -> None:
    end = Endpoint(1, 3)
    tiles = [InTile((5, 7), np.dtype(np.float32), Endpoint(0, 0), end, (end,))] * 2
    expect_landings(tiles, jax.devices())
    assert compiled
    compiled.clear()
    room = _room((5, 7), np.dtype(np.float32), jax.devices()[3])()
    assert room.shape == (5, 7) and not compiled
