"""Parts of layers are recomputed before whole layers; each rung frees more than the one below."""

from __future__ import annotations

from dataclasses import replace

from autopar.rewrite.layers import Layer
from autopar.sharding.remat_ladder import RematLadder


def layer(number: int, freed: int, part: int = 0) -> Layer:
    whole = Layer(f"layer {number}", (number,), (), 10.0 * freed, freed, 0)
    own = Layer(f"layer {number} in part", (number,), (), float(part), part, 0)
    return replace(whole, part=own) if part else whole


def names(ladder: RematLadder, rung: int) -> list[str]:
    return [one.name for one in ladder.layers_at(rung)]


def test_parts_come_first_and_whole_layers_take_their_place() -> None:
    ladder = RematLadder([layer(0, 10, 4), layer(1, 10), layer(2, 10, 4)])
    assert ladder.top == 5
    assert names(ladder, 0) == []
    assert names(ladder, 1) == ["layer 0 in part"]
    assert names(ladder, 2) == ["layer 0 in part", "layer 2 in part"]
    assert names(ladder, 3) == ["layer 0", "layer 2 in part"]
    assert names(ladder, 4) == ["layer 0", "layer 1", "layer 2 in part"]
    assert names(ladder, 5) == ["layer 0", "layer 1", "layer 2"]
    freed = [ladder.freed_bytes(rung) for rung in range(ladder.top + 1)]
    assert freed == [0, 4, 8, 14, 24, 30]
    flops = [ladder.flops(rung) for rung in range(ladder.top + 1)]
    assert flops == [0, 4, 8, 104, 204, 300]


def test_the_first_rung_that_frees_enough() -> None:
    ladder = RematLadder([layer(0, 10, 4), layer(1, 10), layer(2, 10, 4)])
    assert [ladder.rung_that_frees(x) for x in (0, 1, 4, 5, 15, 31)] == [0, 1, 1, 2, 4, 5]


def test_without_parts_rungs_are_layers() -> None:
    layers = [layer(n, 10) for n in range(3)]
    ladder = RematLadder(layers)
    assert all(ladder.layers_at(n) == tuple(layers[:n]) for n in range(ladder.top + 1))
