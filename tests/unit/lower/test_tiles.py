"""Which tiles are sent, by whom, and what the checker refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.spec import WHOLE
from autopar.ir.tiles import Gather, Tile, TilePlan, check_tile_plan, shard_box
from autopar.lower.tiles import plan_tiles


def boxes(*ranges: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return ranges


def test_equal_layouts_send_shard_by_shard() -> None:
    plan = plan_tiles((4, 6), 4, (0,), (2,), (0,), (2,))
    assert plan.tiles == (
        Tile(0, 0, boxes((0, 2), (0, 6))),
        Tile(1, 1, boxes((2, 4), (0, 6))),
    )
    assert plan.gathers == ()
    assert plan.max_sender_bytes == plan.max_receiver_bytes == 48


def test_a_replicated_target_gets_parts_and_gathers_them() -> None:
    plan = plan_tiles((4, 6), 4, (WHOLE,), (2,), (WHOLE,), (2,))
    assert plan.tiles == (
        Tile(0, 0, boxes((0, 2), (0, 6))),
        Tile(1, 1, boxes((2, 4), (0, 6))),
    )
    parts = ((0, boxes((0, 2), (0, 6))), (1, boxes((2, 4), (0, 6))))
    assert plan.gathers == (Gather((0, 1), parts, boxes((0, 4), (0, 6))),)
    assert plan.landing == (0,)
    assert plan.gathered_bytes == plan.link_bytes


def test_parts_are_cut_along_whatever_divides() -> None:
    plan = plan_tiles((3, 4), 4, (WHOLE,), (1,), (WHOLE, 1), (2, 2))
    assert plan.landing == (1, WHOLE)
    assert [tile.box[1] for tile in plan.tiles] == [(0, 1), (2, 3), (1, 2), (3, 4)]
    assert [tile.target for tile in plan.tiles] == [0, 1, 2, 3]


def test_what_cannot_be_cut_has_one_receiver() -> None:
    plan = plan_tiles((3,), 4, (WHOLE,), (2,), (WHOLE,), (2,))
    assert plan.tiles == (Tile(0, 0, boxes((0, 3))),)
    assert plan.gathers == (Gather((0, 1), ((0, boxes((0, 3))),), boxes((0, 3))),)
    assert plan.landing == (WHOLE,)


def test_one_axis_is_cut_and_the_other_gets_copies() -> None:
    plan = plan_tiles((3, 5), 4, (WHOLE,), (1,), (WHOLE, WHOLE), (3, 2))
    assert plan.landing == (0, WHOLE)
    assert [tile.target for tile in plan.tiles] == [0, 2, 4]
    (gather,) = plan.gathers
    assert gather.devices == (0, 1, 2, 3, 4, 5)
    assert plan.gathered_bytes == 4 * (6 * 15 - 15)


def test_scalars() -> None:
    plan = plan_tiles((), 4, (WHOLE,), (2,), (WHOLE, WHOLE), (2, 2))
    check_tile_plan(plan)
    assert plan.tiles == (Tile(0, 0, ()),)
    assert plan.link_bytes == plan.lower_bound_bytes == 4


def test_empty_arrays_send_nothing() -> None:
    plan = plan_tiles((0, 4), 4, (WHOLE,), (2,), (1,), (2,))
    check_tile_plan(plan)
    assert plan.tiles == ()
    assert plan.link_bytes == 0


def test_replicated_senders_share_the_work() -> None:
    plan = plan_tiles((8, 6), 4, (WHOLE,), (4,), (0,), (4,))
    assert sorted(tile.source for tile in plan.tiles) == [0, 1, 2, 3]


def test_tiles_are_cut_among_senders_if_that_unloads_the_busiest() -> None:
    """Three receivers of a third each; by whole tiles one of two senders would send two of them."""
    plan = plan_tiles((6, 4), 4, (WHOLE,), (2,), (0,), (3,))
    check_tile_plan(plan)
    assert plan.max_sender_bytes == plan.link_bytes // 2


def test_no_more_tiles_than_needed() -> None:
    """The receivers are the bottleneck, so that cutting among four senders would gain nothing."""
    plan = plan_tiles((8, 8), 4, (WHOLE,), (4,), (1,), (2,))
    assert len(plan.tiles) == 2


def test_shards_of_one_dimension_split_twice() -> None:
    assert shard_box((8,), (0, 0), (2, 2), 2) == ((4, 6),)
    assert shard_box((8, 3), (1, 0), (1, 4), 3) == ((6, 8), (0, 3))


GOOD = plan_tiles((4, 6), 4, (0,), (2,), (WHOLE,), (2,))


def without(plan: TilePlan, **changes) -> TilePlan:
    return replace(plan, **changes)


BROKEN = {
    "a tile is missing": (without(GOOD, tiles=GOOD.tiles[1:]), "not received"),
    "a tile twice": (without(GOOD, tiles=(*GOOD.tiles, GOOD.tiles[0])), "twice"),
    "a sender without the data": (
        without(GOOD, tiles=(replace(GOOD.tiles[0], source=1), *GOOD.tiles[1:])),
        "not held",
    ),
    "no gather": (without(GOOD, gathers=()), "lacks part"),
    "a gather with gaps": (
        without(GOOD, gathers=(replace(GOOD.gathers[0], parts=GOOD.gathers[0].parts[:1]),)),
        "has gaps",
    ),
    "gathered twice": (without(GOOD, gathers=GOOD.gathers * 2), "two gathers"),
}


@pytest.mark.parametrize(("plan", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_the_checker_refuses(plan: TilePlan, message: str) -> None:
    check_tile_plan(GOOD)
    with pytest.raises(AssertionError, match=message):
        check_tile_plan(plan)
