"""A checkpoint's manifest as frozen data.

    manifest.json ↔ Manifest

A checkpoint is a folder `step_00000012` with `manifest.json` and data files, some per writer. The
manifest names every leaf of the saved pytree and says where its bytes are. It is data, never code:
`read_manifest` checks format, checksum and every field.

A *shard* is a box of an array, row-major, in one data file. It consists of *blocks* of whole rows,
each with its own checksum, so that a part of a shard can be read and checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from autopar.errors import CheckpointError
from autopar.ir.sealed import SealedFormat
from autopar.ir.tiles import Box
from autopar.runtime.checkpoints.objects import Location, read_limited

_FORMAT = SealedFormat(
    "autopar-checkpoint", 1, "checkpoint", CheckpointError, "Restore another step."
)
MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 2**28  # a leaf with eight shards has less than 2 KiB

ARRAY, KEY = "array", "key"
SCALARS = {"bool": bool, "int": int, "float": float, "complex": complex}

PathEntry = tuple[str, str | int]  # ("attribute", name), ("index", i), ("key", k), ("other", text)

_STEP = re.compile(r"step_(\d{8,})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Shard:
    """A box of an array in a data file.

    block_rows: rows of each block but the last, along the first dimension.
    crc32:      of each block.
    """

    box: Box
    file: str
    offset: int
    num_bytes: int
    block_rows: int
    crc32: tuple[int, ...]


Entry = tuple[str, Shard]  # (key of the leaf, a shard of it that a writer wrote)


@dataclass(frozen=True)
class Leaf:
    """One leaf of the saved pytree.

    key:       its path as a user would write it, such as `.params['w']`.
    path:      the same in parts.
    kind:      "array", "key" (of random bits), or the type of a Python number.
    shape, dtype: of an array's elements; of a key, those of its data, with one dimension more.
    weak_type: JAX would give way to another array's type.
    impl:      of keys: their implementation.
    value:     of Python numbers.
    """

    key: str
    path: tuple[PathEntry, ...]
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    weak_type: bool = False
    impl: str = ""
    value: str = ""
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """metadata: what the user saved beside the state, as JSON."""

    step: int
    leaves: tuple[Leaf, ...]
    writers: tuple[str, ...]
    autopar_version: str
    jax_version: str
    metadata: str | None = field(default=None, metadata={"omit_none": True})


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None if it is not that of a checkpoint."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def with_shards(leaves: Sequence[Leaf], entries: Sequence[Entry]) -> tuple[Leaf, ...]:
    """Leaves with the shards that writers wrote. Of a box that two writers have, since each holds
    a copy of the array, the first is taken."""
    shards_of: dict[str, dict[Box, Shard]] = {leaf.key: {} for leaf in leaves}
    for key, shard in entries:
        shards_of[key].setdefault(shard.box, shard)
    return tuple(replace(leaf, shards=tuple(shards_of[leaf.key].values())) for leaf in leaves)


def scalar_text(value: bool | int | float | complex) -> str:
    """A Python number as text, exactly."""
    if isinstance(value, complex):
        return f"{value.real.hex()} {value.imag.hex()}"
    return value.hex() if isinstance(value, float) else hex(value)


def scalar_value(leaf: Leaf) -> bool | int | float | complex:
    """The Python number that `scalar_text` wrote."""
    if leaf.kind == "complex":
        real, imag = leaf.value.split(" ")
        return complex(float.fromhex(real), float.fromhex(imag))
    if leaf.kind == "float":
        return float.fromhex(leaf.value)
    return SCALARS[leaf.kind](int(leaf.value, 16))


def dtype_named(name: str) -> np.dtype:
    """NumPy's type of this name; importing JAX adds the types of `ml_dtypes`."""
    dtype = np.dtype(name)
    is_plain = dtype.names is None and dtype.subdtype is None and not dtype.hasobject
    if dtype.name != name or not is_plain or dtype.itemsize == 0:
        raise ValueError(f"{name!r} is not a type of array elements")
    return dtype


def rows_of(box: Box) -> tuple[int, ...]:
    """The shape of a box; a scalar is one row."""
    return tuple(stop - start for start, stop in box) or (1,)


def manifest_text(manifest: Manifest) -> str:
    """The content of `manifest.json`."""
    return _FORMAT.text(manifest)


def read_manifest(folder: Location) -> Manifest:
    """Read and check a checkpoint's manifest."""
    where = folder / MANIFEST
    try:
        text = read_limited(where, MANIFEST_LIMIT_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}, so it is not a checkpoint, or an incomplete one. "
            "Restore another step; autopar.checkpoint_steps(…) lists them."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error}") from error
    try:
        manifest = _FORMAT.read(Manifest, text, str(where))
        check_manifest(manifest)
    except (TypeError, ValueError, RecursionError) as error:
        raise _FORMAT.malformed(str(where), error) from error
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Every element of every array is in exactly one shard; ValueError if not."""
    if manifest.step < 0:
        raise ValueError(f"the step {manifest.step}")
    keys = [leaf.key for leaf in manifest.leaves]
    if len(set(keys)) != len(keys):
        raise ValueError("two leaves of one name")
    for leaf in manifest.leaves:
        for entry in leaf.path:
            _check_path_entry(*entry)
        if leaf.kind in SCALARS:
            scalar_value(leaf)
        elif leaf.kind in (ARRAY, KEY):
            _check_array(leaf)
        else:
            raise ValueError(f"{leaf.key}: a leaf of the kind {leaf.kind!r}")
    _check_shares(manifest)


def _check_shares(manifest: Manifest) -> None:
    """Every byte of a data file belongs to one shard: a small file cannot become large arrays."""
    parts = sorted(
        (shard.file, shard.offset, shard.offset + shard.num_bytes, leaf.key)
        for leaf in manifest.leaves
        for shard in leaf.shards
    )
    for one, other in pairwise(parts):
        if one[0] == other[0] and other[1] < one[2]:
            raise ValueError(f"{one[3]} and {other[3]} share bytes of {one[0]!r}")


def _check_path_entry(kind: str, name: str | int) -> None:
    is_index = isinstance(name, int) and name >= 0
    is_valid = {
        "index": is_index,
        "key": True,
        "attribute": isinstance(name, str),
        "other": isinstance(name, str),
    }
    if not is_valid.get(kind):
        raise ValueError(f"a path with the {kind} {name!r}")


def _check_array(leaf: Leaf) -> None:
    itemsize = dtype_named(leaf.dtype).itemsize
    if (
        any(size < 0 for size in leaf.shape)
        or prod(max(size, 1) for size in leaf.shape) * itemsize >= 2**63
    ):
        raise ValueError(f"{leaf.key}: the shape {leaf.shape}")
    if leaf.kind == KEY and (not leaf.impl or not leaf.shape):
        raise ValueError(f"{leaf.key}: a key without an implementation")
    for shard in leaf.shards:
        if not _FILE_NAME.fullmatch(shard.file):
            raise ValueError(f"{leaf.key}: the data file {shard.file!r}")
        inside = len(shard.box) == len(leaf.shape) and all(
            0 <= start < stop <= size
            for (start, stop), size in zip(shard.box, leaf.shape, strict=True)
        )
        rows = rows_of(shard.box)
        num_blocks = -(-rows[0] // shard.block_rows) if shard.block_rows > 0 else 0
        if not inside or shard.offset < 0 or shard.num_bytes != prod(rows) * itemsize:
            raise ValueError(
                f"{leaf.key}: a shard {shard.box} of {shard.num_bytes} bytes at {shard.offset}"
            )
        if len(shard.crc32) != num_blocks:
            raise ValueError(f"{leaf.key}: {len(shard.crc32)} checksums for {num_blocks} blocks")
    boxes = sorted(shard.box for shard in leaf.shards)
    if sum(prod(rows_of(box)) for box in boxes) != prod(leaf.shape):
        raise ValueError(f"{leaf.key}: shards do not make up the array of shape {leaf.shape}")
    if len(set(boxes)) == len(boxes) and _form_grid(boxes):
        return
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if intersection(box, other) is not None:
                raise ValueError(f"{leaf.key}: the shards {box} and {other} overlap")


def _form_grid(boxes: Sequence[Box]) -> bool:
    """Whether the ranges of boxes are equal or disjoint in every dimension: then different boxes
    are disjoint, and need not be compared pair by pair."""
    for ranges in zip(*boxes, strict=True):
        in_order = sorted(set(ranges))
        if any(one[1] > other[0] for one, other in pairwise(in_order)):
            return False
    return True


def intersection(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of one array; None if they are disjoint."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


@dataclass(frozen=True)
class RowsFrom:
    """An array, or its type, that is rows of a leaf, from `first` on, per leading dimension."""

    first: tuple[int, ...]
    array: Any
