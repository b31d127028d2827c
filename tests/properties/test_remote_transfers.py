"""Transfers between the meshes of workers.

Both sides list the same tiles in the same order, however the devices are spread over workers, and
every device gets its shard. Receives are posted in the order of the sends.
"""

from __future__ import annotations

import random
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.pipeline import Recv, Send
from autopar.ir.remote import Endpoint, RemoteTransfer, ShardedType, recv_order
from autopar.ir.schedule import SCHEDULES
from autopar.ir.tiles import TilePlan, slices
from autopar.lower.instructions import emit_programs
from autopar.runtime.remote.transfers import (
    IncomingTiles,
    OutgoingTiles,
    _landing_places,
    _origins,
    target_places,
)
from tests.properties.test_pipeline_programs import random_case
from tests.properties.test_tiles import plans, shards_of

few = settings(deadline=None, max_examples=40)
FIRST_TARGET = 100  # number of the first worker of the target mesh


def transfer_of(plan: TilePlan) -> RemoteTransfer:
    def sharded_type(mesh: tuple[int, ...], layout: tuple[int, ...]) -> ShardedType:
        names = ("x", "y")[: len(mesh)]
        grid = tuple(range(int(np.prod(mesh))))
        return ShardedType(plan.shape, np.dtype(np.int32), mesh, names, layout, grid)

    return RemoteTransfer(
        sharded_type(plan.source_mesh, plan.source_layout),
        sharded_type(plan.target_mesh, plan.target_layout),
        plan,
    )


def endpoints_of(num_devices: int, first_worker: int, sizes: list[int]) -> list[Endpoint]:
    """Devices dealt out to workers, some to each."""
    ends: list[Endpoint] = []
    worker = first_worker
    while len(ends) < num_devices:
        count = sizes[(worker - first_worker) % len(sizes)]
        ends += [Endpoint(worker, device) for device in range(count)]
        worker += 1
    return ends[:num_devices]


sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@few
@given(plans(), sizes, sizes)
def test_every_part_is_sent_once_to_each_worker(
    plan: TilePlan, source_sizes: list[int], target_sizes: list[int]
) -> None:
    transfer = transfer_of(plan)
    sources = endpoints_of(len(transfer.source.grid), 0, source_sizes)
    targets = endpoints_of(len(transfer.target.grid), FIRST_TARGET, target_sizes)
    sent = []
    for worker in sorted({end.worker for end in sources}):
        leaving = OutgoingTiles([transfer], [True], sources, targets, worker)
        sent += leaving.links()
    assert len(sent) == len(plan.tiles)
    whole = np.arange(np.prod(plan.shape)).reshape(plan.shape)
    received = [np.zeros(plan.shape, int) for _ in targets]
    for tile, places in zip(plan.tiles, target_places(transfer, targets), strict=True):
        workers = [targets[place].worker for place in places]
        assert len(set(workers)) == len(workers), "a worker gets a tile once"
        for place in places:
            received[place][slices(tile.box)] += 1
    # A worker copies to its other devices what one of them has received.
    origins = _origins(plan)
    landing = _landing_places(plan, tuple(end.worker for end in targets))
    for place, end in enumerate(targets):
        at = [p for p in landing[origins[place]] if targets[p].worker == end.worker]
        assert len(at) == 1
        received[place] = received[at[0]]
    landed = tuple(
        cut if cut >= 0 else own for cut, own in zip(plan.landing, plan.target_layout, strict=True)
    )
    if landed == plan.target_layout:  # nothing is left to gather
        for shard, counts in zip(
            shards_of(whole, plan.target_layout, plan.target_mesh), received, strict=True
        ):
            assert np.array_equal(counts, np.isin(whole, shard))


@few
@given(plans(), sizes, sizes)
def test_both_sides_list_the_same_tiles(
    plan: TilePlan, source_sizes: list[int], target_sizes: list[int]
) -> None:
    assume(prod(plan.target_mesh) <= 8)
    transfer = transfer_of(plan)
    sources = endpoints_of(len(transfer.source.grid), 0, source_sizes)
    targets = endpoints_of(len(transfer.target.grid), FIRST_TARGET, target_sizes)
    senders, receivers = ({end.worker for end in ends} for ends in (sources, targets))
    links = {w: OutgoingTiles([transfer], [True], sources, targets, w).links() for w in senders}
    for receiver in receivers:
        coming = IncomingTiles([transfer], sources, targets, receiver, jax.devices())
        for sender in senders:
            listed = [
                (link.source, target)
                for link in links[sender]
                for target in link.targets
                if target.worker == receiver
            ]
            got = [(t.source, t.target) for t in coming.tiles if t.source.worker == sender]
            # A sender goes through its devices one by one; `tiles()` sorts by number.
            assert sorted(map(repr, listed)) == sorted(map(repr, got))


@pytest.mark.parametrize("name", SCHEDULES)
@few
@given(st.integers(0, 2**32 - 1))
def test_receives_are_posted_as_they_are_sent(name: str, seed: int) -> None:
    pipeline, schedule = random_case(name, random.Random(seed))
    programs = emit_programs(pipeline, schedule)
    for mesh, program in enumerate(programs.meshes):
        order = recv_order(programs, mesh)
        posted: dict[int, list[int]] = {}
        for place, instruction in enumerate(program.instructions):
            if not isinstance(instruction, Recv):
                continue
            for due in order[place]:
                recv = program.instructions[due]
                assert isinstance(recv, Recv) and recv.from_mesh == instruction.from_mesh
                posted.setdefault(recv.from_mesh, []).append(recv.tag)
            assert instruction.tag in posted[instruction.from_mesh], "posted when it is needed"
        for source, tags in posted.items():
            sent = [
                i.tag
                for i in programs.meshes[source].instructions
                if isinstance(i, Send) and i.to_mesh == mesh
            ]
            assert tags == sent
