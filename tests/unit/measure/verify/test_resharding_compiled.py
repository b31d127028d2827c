"""The cost of resharding is that of what XLA makes of it: every pair of layouts of a matrix on a
grid, compiled for eight H100s, sends the bytes that the table says.

Where an axis is idle in the product that makes the matrix, XLA gives its devices a part of the
product; such layouts are left out.
"""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from autopar import _jax
from autopar.cost.reshard import reshard_table
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, to_partition_spec
from autopar.measure.verify.targets import load_target
from autopar.runtime.hlo import read_collectives
from tests.unit.measure.verify.test_gpu_compiler import pytestmark as pytestmark

ROWS, COLUMNS, SUMMED = 1024, 2048, 4096
AXES = ("x", "y")


def sent_bytes(mesh: Mesh, source: Layout, steps: list[Layout]) -> float:
    """Per device, by the compiled program: from a product in layout `source` through the others."""

    def place(layout: Layout) -> NamedSharding:
        return NamedSharding(mesh, to_partition_spec(layout, 2, AXES))

    def operand(dim: int) -> NamedSharding:
        entries = tuple({PARTIAL: 0, dim: 1}.get(entry, WHOLE) for entry in source)
        return place(entries)

    def step(a, b):
        result = a.T @ b
        for layout in steps:
            result = jax.lax.with_sharding_constraint(result, place(layout))
        return 2 * result + 1

    jitted = jax.jit(step, in_shardings=(operand(0), operand(1)), out_shardings=place(steps[-1]))
    shapes = [jax.ShapeDtypeStruct((SUMMED, n), jnp.float32) for n in (ROWS, COLUMNS)]
    return sum(op.sent_bytes for op in read_collectives(jitted.lower(*shapes).compile().as_text()))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_the_bytes_sent_are_those_that_are_priced(shape: tuple[int, int]) -> None:
    devices = _jax.gpu_topology_devices(1, 8, load_target("h100-80gb").config)
    mesh = Mesh(np.array(devices).reshape(shape), AXES)
    priced = LogicalMesh(shape, alpha=(0.0, 0.0), beta=(1.0, 1.0))
    table = reshard_table(priced, (ROWS, COLUMNS), 4.0 * ROWS * COLUMNS, with_partial=True)
    wrong = []
    for source, target in product(table.layouts, repeat=2):
        if source == target or PARTIAL in target or WHOLE in source:
            continue
        path = [source, *table.path(source, target)]
        steps = [layout for layout in path if PARTIAL not in layout]
        sent, wanted = sent_bytes(mesh, source, steps), table.cost(source, target)
        if sent != pytest.approx(wanted, rel=0.02):
            wrong.append((source, target, sent, wanted))
    assert not wrong
