"""From data files to arrays: any boxes of an array, whatever boxes it was saved in.

Blocks that hold something wanted are read, checked, and copied to where it is wanted. In a group of
several processes each reads what its own devices need.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar import _jax
from autopar.checkpoints.format import (
    KEY,
    SCALARS,
    Leaf,
    Manifest,
    Shard,
    dtype_named,
    intersection,
    rows_of,
    scalar_value,
)
from autopar.checkpoints.leaves import canonical, key_data_type
from autopar.errors import CheckpointError
from autopar.ir.tiles import Box, slices


def read_arrays(
    folder: Path | str, manifest: Manifest, wanted: Sequence[tuple[str, jax.ShapeDtypeStruct]]
) -> list[jax.Array]:
    """The named leaves as arrays of the wanted types and shardings; those without a sharding on the
    default device. Shapes and types must be those of the checkpoint."""
    leaves = {leaf.key: leaf for leaf in manifest.leaves}
    with _data_files(Path(folder)) as data_files:
        return [_read_array(data_files, leaves[key], like) for key, like in wanted]


def read_numpy(folder: Path | str, manifest: Manifest, keys: Sequence[str]) -> list[Any]:
    """The named leaves as numpy arrays, Python numbers and keys of random bits, as they were."""
    leaves = {leaf.key: leaf for leaf in manifest.leaves}
    with _data_files(Path(folder)) as data_files:
        return [_read_value(data_files, leaves[key]) for key in keys]


def _read_value(data_files: _DataFiles, leaf: Leaf) -> Any:
    if leaf.kind in SCALARS:
        return scalar_value(leaf)
    whole = tuple((0, n) for n in leaf.shape)
    array = _read_boxes(data_files, leaf, [whole])[whole]
    if leaf.kind != KEY:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf.impl)


def _read_array(data_files: _DataFiles, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return _read_keys(data_files, leaf, like)
    sharding = like.sharding
    if sharding is None:
        whole = tuple((0, n) for n in like.shape)
        array = jax.numpy.asarray(_read_boxes(data_files, leaf, [whole], like.dtype)[whole])
    else:
        indices = sharding.addressable_devices_indices_map(like.shape)
        boxes = {
            device: tuple(s.indices(n)[:2] for s, n in zip(index, like.shape, strict=True))
            for device, index in indices.items()
            if index is not None
        }
        parts = _read_boxes(data_files, leaf, list(boxes.values()), like.dtype)
        places = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in boxes]
        shards = jax.device_put([parts[box] for box in boxes.values()], places)
        array = jax.make_array_from_single_device_arrays(
            like.shape, sharding, shards, dtype=canonical(like.dtype)
        )
    return _jax.with_weak_type(array) if like.weak_type else array


def _read_keys(data_files: _DataFiles, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    data = key_data_type(like)
    sharding = like.sharding
    # The data has one dimension more, at the end, which these do not name.
    same_for_data = sharding is None or isinstance(sharding, (NamedSharding, SingleDeviceSharding))
    place = sharding if same_for_data else None
    data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=place)
    array = _read_array(data_files, leaf, data)
    keys = jax.random.wrap_key_data(array, impl=_jax.key_implementation(like.dtype))
    return keys if same_for_data else jax.device_put(keys, sharding)


def _read_boxes(
    data_files: _DataFiles, leaf: Leaf, boxes: Sequence[Box], dtype: Any = None
) -> dict[Box, np.ndarray]:
    """Boxes of an array, each with its values."""
    if leaf.kind in SCALARS:
        return {box: np.asarray(scalar_value(leaf), dtype) for box in boxes}
    parts = {
        box: np.empty([stop - start for start, stop in box], dtype_named(leaf.dtype))
        for box in boxes
    }
    for shard in leaf.shards:
        for block, data in _blocks(data_files, leaf, shard, list(parts)):
            for box, part in parts.items():
                common = intersection(box, block)
                if common is not None:
                    part[_within(common, box)] = data[_within(common, block)]
    return parts


def _within(box: Box, around: Box) -> tuple[slice, ...]:
    return slices(tuple((a - c, b - c) for (a, b), (c, _) in zip(box, around, strict=True)))


def _blocks(
    data_files: _DataFiles, leaf: Leaf, shard: Shard, boxes: Sequence[Box]
) -> Iterator[tuple[Box, np.ndarray]]:
    """The blocks of a shard that hold something of the boxes: (box, values)."""
    rows = rows_of(shard.box)
    row_bytes = shard.num_bytes // rows[0]
    for number, checksum in enumerate(shard.crc32):
        first = number * shard.block_rows
        last = min(first + shard.block_rows, rows[0])
        block = shard.box
        if block:
            start = shard.box[0][0]
            block = ((start + first, start + last), *shard.box[1:])
        if all(intersection(box, block) is None for box in boxes):
            continue
        offset = shard.offset + first * row_bytes
        data = data_files.read(shard.file, offset, (last - first) * row_bytes, leaf.key)
        if zlib.crc32(data) != checksum:
            raise CheckpointError(
                f"{data_files.folder / shard.file}: is damaged: bytes {offset} to "
                f"{offset + len(data)}, of {leaf.key or 'the array'}, have another checksum than "
                "when they were written. Restore another step."
            )
        values = np.frombuffer(data, dtype_named(leaf.dtype))
        yield block, values.reshape([stop - start for start, stop in block])


class _DataFiles:
    """Files of one checkpoint, each opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}

    def read(self, name: str, offset: int, num_bytes: int, key: str) -> bytearray:
        data = bytearray(num_bytes)
        left = memoryview(data)
        try:
            if name not in self._open:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                self._open[name] = os.open(self.folder / name, flags)
            while left:
                count = os.preadv(self._open[name], [left], offset + num_bytes - len(left))
                if not count:
                    break
                left = left[count:]
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / name}: cannot be read: {error.strerror}. It holds {key}."
            ) from error
        if left:
            raise CheckpointError(
                f"{self.folder / name}: is damaged: it ends within {key or 'the array'}, "
                f"{len(left)} bytes before its end. Restore another step."
            )
        return data

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


@contextmanager
def _data_files(folder: Path) -> Iterator[_DataFiles]:
    data_files = _DataFiles(folder)
    try:
        yield data_files
    finally:
        data_files.close()
