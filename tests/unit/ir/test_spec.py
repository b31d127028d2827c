from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import SpecError
from autopar.ir.spec import (
    PARTIAL,
    WHOLE,
    all_layouts,
    fits,
    from_partition_spec,
    is_partial,
    num_shards,
    to_partition_spec,
)

NAMES = ("x", "y")


def parse(spec: P, shape: tuple[int, ...], mesh_shape: tuple[int, ...] = (2, 4)):
    return from_partition_spec(spec, shape, NAMES, mesh_shape, "state.params['w']")


@pytest.mark.parametrize(
    ("layout", "shards"),
    [((WHOLE, WHOLE), 1), ((0, WHOLE), 2), ((1, 0), 8), ((0, 0), 8), ((PARTIAL, 1), 4)],
)
def test_num_shards_counts_splitting_axes_only(layout, shards) -> None:
    assert num_shards(layout, (2, 4)) == shards


def test_is_partial() -> None:
    assert is_partial((PARTIAL, 0)) and is_partial((WHOLE, PARTIAL))
    assert not is_partial((WHOLE, 0))


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        ((0, 1), (2, 4), True),
        ((0, 1), (2, 6), False),
        ((0, 0), (8, 1), True),
        ((0, 0), (4, 8), False),  # 4 rows over 2 × 4 devices
        ((PARTIAL, WHOLE), (3, 5), True),
        ((WHOLE, WHOLE), (), True),
        ((1, WHOLE), (3, 0), False),  # no elements to split
    ],
)
def test_fits_means_divided_evenly(layout, shape, expected) -> None:
    assert fits(layout, shape, (2, 4)) is expected


def test_all_layouts_are_all_that_fit_and_no_other() -> None:
    assert list(all_layouts((8, 3), (2, 4))) == [(WHOLE, WHOLE), (WHOLE, 0), (0, WHOLE), (0, 0)]
    assert list(all_layouts((4,), (2, 4))) == [(WHOLE, WHOLE), (WHOLE, 0), (0, WHOLE)]
    assert list(all_layouts((), (2,), with_partial=True)) == [(PARTIAL,), (WHOLE,)]


def test_all_layouts_leave_axes_of_size_one_whole() -> None:
    assert set(all_layouts((8,), (1, 2), with_partial=True)) == {
        (WHOLE, PARTIAL),
        (WHOLE, WHOLE),
        (WHOLE, 0),
    }


@pytest.mark.parametrize(
    ("layout", "ndim", "spec"),
    [
        ((WHOLE, WHOLE), 2, P()),
        ((0, WHOLE), 2, P("x")),
        ((1, 0), 2, P("y", "x")),
        ((WHOLE, 1), 3, P(None, "y")),
        ((1, 1), 3, P(None, ("x", "y"))),
        ((WHOLE, WHOLE), 0, P()),
    ],
)
def test_partition_specs_there_and_back(layout, ndim, spec) -> None:
    assert to_partition_spec(layout, ndim, NAMES) == spec
    assert parse(spec, (8,) * ndim) == layout


def test_the_earlier_axis_is_the_major_one_in_jax_too() -> None:
    """Where jax puts the tiles is where the canonical order says."""
    mesh = jax.make_mesh((2, 4), NAMES)
    layout = (0, 0)
    sharding = NamedSharding(mesh, to_partition_spec(layout, 1, NAMES))
    tiles = sharding.devices_indices_map((16,))
    for (x, y), device in np.ndenumerate(mesh.devices):
        start = 2 * (4 * x + y)
        assert tiles[device] == (slice(start, start + 2, None),)


def test_names_in_a_tuple_of_one_mean_the_name() -> None:
    assert parse(P(("y",), None), (8, 8)) == (WHOLE, 0)


def test_an_axis_of_size_one_splits_nothing() -> None:
    assert parse(P("x", "y"), (3, 8), (1, 4)) == (WHOLE, 1)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (P("x", None, "y"), (8, 8), r"3 entries but the array has 2 dimensions \(8, 8\)"),
        (P("z"), (8,), r"names the mesh axis 'z'; the mesh has \('x', 'y'\)"),
        (P("x", "x"), (8, 8), "uses the mesh axis 'x' twice"),
        (P(("x", "x")), (8,), "uses the mesh axis 'x' twice"),
        (P(("y", "x")), (8,), "Reorder the names in the spec"),
        (P("x"), (3,), r"does not divide the shape \(3,\) evenly"),
        (P(("x", "y")), (4,), "does not divide"),
    ],
)
def test_specs_that_cannot_be_are_named_by_path(spec, shape, message) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        parse(spec, shape)
    assert str(raised.value).startswith("state.params['w']: ")
