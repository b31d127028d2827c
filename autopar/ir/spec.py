"""How a tensor lies on a logical mesh: the vocabulary every layer shares.

A *layout* has one entry per mesh axis: the tensor dimension that the axis splits, `WHOLE` (each
device along the axis holds the same data) or `PARTIAL` (each holds one addend of the value, so a
reduction is due). A layout without `PARTIAL` is a *spec* and converts to a `PartitionSpec`. When
several axes split one dimension, the earlier axis is always the major one: this is the canonical
order, the only one autopar uses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import product

from jax.sharding import PartitionSpec

from autopar.errors import SpecError

WHOLE = -1
PARTIAL = -2

Layout = tuple[int, ...]
NodeLayouts = tuple[tuple[Layout, ...], tuple[Layout, ...]]  # of a node: operands, results


def is_partial(layout: Layout) -> bool:
    return PARTIAL in layout


def num_shards(layout: Layout, mesh_shape: Sequence[int]) -> int:
    """Over how many devices the tensor's bytes are divided."""
    shards = 1
    for entry, size in zip(layout, mesh_shape, strict=True):
        if entry >= 0:
            shards *= size
    return shards


def is_slice(source: Layout, target: Layout) -> bool:
    """Whether the target is part of what the source holds, so that nothing need be sent."""
    return all(s in (WHOLE, t) for s, t in zip(source, target, strict=True))


def fits(layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    """Whether every split dimension is divided evenly; one without elements is no use to split."""
    parts = [1] * len(shape)
    for entry, size in zip(layout, mesh_shape, strict=True):
        if entry >= 0:
            parts[entry] *= size
    return all(
        part == 1 or (dim and dim % part == 0) for dim, part in zip(shape, parts, strict=True)
    )


def all_layouts(
    shape: Sequence[int], mesh_shape: Sequence[int], *, with_partial: bool = False
) -> Iterator[Layout]:
    """Every layout that divides evenly; axes of size 1 stay `WHOLE`, which they are."""
    first = PARTIAL if with_partial else WHOLE
    choices = [range(first, len(shape)) if size > 1 else (WHOLE,) for size in mesh_shape]
    for layout in product(*choices):
        if fits(layout, shape, mesh_shape):
            yield layout


def to_partition_spec(layout: Layout, ndim: int, axis_names: Sequence[str]) -> PartitionSpec:
    assert not is_partial(layout), layout
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(ndim):
        names = tuple(n for n, e in zip(axis_names, layout, strict=True) if e == dim)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def from_partition_spec(
    spec: PartitionSpec,
    shape: Sequence[int],
    axis_names: Sequence[str],
    mesh_shape: Sequence[int],
    path: str,
) -> Layout:
    """The layout a user's `PartitionSpec` means; `path` names the array in errors."""
    if len(spec) > len(shape):
        raise SpecError(
            f"{path}: the spec {spec} has {len(spec)} entries but the array has "
            f"{len(shape)} dimensions {tuple(shape)}; give at most one entry per dimension."
        )
    layout = [WHOLE] * len(axis_names)
    for dim, entry in enumerate(spec):
        names = () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)
        positions = []
        for name in names:
            if name not in axis_names:
                raise SpecError(
                    f"{path}: the spec {spec} names the mesh axis {name!r}; the mesh has "
                    f"{tuple(axis_names)}. Use one of those, or None."
                )
            position = list(axis_names).index(name)
            if layout[position] != WHOLE:
                raise SpecError(
                    f"{path}: the spec {spec} uses the mesh axis {name!r} twice; "
                    "an axis can split one dimension only."
                )
            layout[position] = dim
            positions.append(position)
        if positions != sorted(positions):
            raise SpecError(
                f"{path}: the spec {spec} splits dimension {dim} by {names}; autopar keeps mesh "
                f"axes in mesh order {tuple(axis_names)}. Reorder the names in the spec."
            )
    if not fits(tuple(layout), shape, mesh_shape):
        sizes = dict(zip(axis_names, mesh_shape, strict=True))
        raise SpecError(
            f"{path}: the spec {spec} does not divide the shape {tuple(shape)} evenly on a mesh "
            f"of {sizes}. Choose dimensions that the axis sizes divide, or pad the array."
        )
    # An axis of size 1 splits nothing.
    return tuple(
        WHOLE if size == 1 else entry for entry, size in zip(layout, mesh_shape, strict=True)
    )


def spec_to_text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def spec_from_text(text: str) -> PartitionSpec:
    """The other way; what is no spec raises ValueError."""
    inner = text.removeprefix("P(").removesuffix(")")
    try:
        entries = ast.literal_eval(f"({inner},)") if inner else ()
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no spec") from error
    names = [e for entry in entries for e in (entry if isinstance(entry, tuple) else (entry,))]
    if not all(name is None or isinstance(name, str) for name in names):
        raise ValueError(f"{text!r} is no spec")
    return PartitionSpec(*entries)
