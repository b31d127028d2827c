"""Cross-mesh resharding, as CONFORMANCE has it: values are equal, and every byte crosses once."""

from __future__ import annotations

from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from autopar.ir.spec import WHOLE, to_partition_spec
from autopar.ir.tiles import check_tile_plan
from autopar.lower.tiles import plan_tiles
from autopar.runtime.transfers import send_tiles

PLACES = {"replicated": (WHOLE, WHOLE), "dim 0": (WHOLE, 0), "dim 1": (WHOLE, 1)}

CASES = {
    f"(1,2) {source} to (1,2) {target}": ((4, 8, 16), (1, 2), a, (1, 2), b)
    for source, a in PLACES.items()
    for target, b in PLACES.items()
}
CASES |= {
    "replicated to replicated on four": (
        (6, 8, 16), (2, 2), (WHOLE, WHOLE), (2, 2), (WHOLE, WHOLE),
    ),
    "two dimensions to replicated": ((2, 64, 64), (2, 2), (1, 2), (2, 2), (WHOLE, WHOLE)),
    "two dimensions, one mesh axis each, to replicated": (
        (2, 64, 64), (2, 2), (0, 1), (2, 2), (WHOLE, WHOLE),
    ),
    "cube to dims 0 and 2": ((64, 64, 64), (2, 2), (1, 0), (2, 2), (0, 2)),
    "replicated cube to dims 0 and 2": ((64, 64, 64), (2, 2), (WHOLE, WHOLE), (2, 2), (0, 2)),
    "(1,2) to (2,1)": ((4, 8, 16), (1, 2), (WHOLE, 1), (2, 1), (0, WHOLE)),
    "(1,2) to (2,1), replicated": ((4, 8, 16), (1, 2), (WHOLE, WHOLE), (2, 1), (WHOLE, WHOLE)),
    "(1,4) to (2,2)": ((4, 8, 16), (1, 4), (WHOLE, 0), (2, 2), (1, 0)),
    "(1,4) to (2,2), one axis replicated": ((4, 8, 16), (1, 4), (WHOLE, 2), (2, 2), (WHOLE, 0)),
    "4 to 2": ((4, 8, 16), (1, 4), (WHOLE, 0), (1, 2), (WHOLE, 1)),
    "4 to 2, replicated": ((4, 8, 16), (2, 2), (WHOLE, WHOLE), (1, 2), (WHOLE, WHOLE)),
    "2 to 4": ((4, 8, 16), (1, 2), (WHOLE, 0), (1, 4), (WHOLE, 1)),
    "2 to 4, replicated": ((4, 8, 16), (1, 2), (WHOLE, 0), (2, 2), (WHOLE, WHOLE)),
}  # fmt: skip


@pytest.mark.representatives(
    "(1,2) replicated to (1,2) dim 0", "(1,2) replicated to (1,2) replicated"
)
@pytest.mark.parametrize(
    ("shape", "source_mesh", "source", "target_mesh", "target"), CASES.values(), ids=CASES.keys()
)
def test_case(shape, source_mesh, source, target_mesh, target) -> None:
    plan = plan_tiles(shape, 4, source, source_mesh, target, target_mesh)
    check_tile_plan(plan)
    assert plan.link_bytes == plan.lower_bound_bytes == 4 * prod(shape)
    # All these can be cut evenly: no device sends or receives more than its share.
    assert plan.max_sender_bytes == plan.link_bytes // prod(source_mesh) or (
        plan.max_sender_bytes <= plan.max_receiver_bytes
    )
    assert plan.max_receiver_bytes == plan.link_bytes // prod(target_mesh)

    devices = jax.devices()
    meshes = [
        Mesh(np.array(own).reshape(shape), ("x", "y"))
        for own, shape in (
            (devices[: prod(source_mesh)], source_mesh),
            (devices[-prod(target_mesh) :], target_mesh),
        )
    ]
    placed, wanted = (
        NamedSharding(mesh, to_partition_spec(layout, len(shape), mesh.axis_names))
        for mesh, layout in zip(meshes, (source, target), strict=True)
    )
    values = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    array = jax.device_put(values, placed)
    moved = send_tiles(plan, wanted)(array)
    assert moved.sharding == wanted
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    assert not array.is_deleted()
