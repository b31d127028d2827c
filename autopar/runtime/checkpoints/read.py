"""From data files to arrays: reads any boxes of an array, whatever boxes it was saved in.

Reads and checks the blocks that overlap with the wanted boxes and copies the overlaps. In a group
of processes each reads what its own devices need.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from autopar import _jax
from autopar.errors import CheckpointError
from autopar.ir.files import open_to_read
from autopar.ir.tiles import Box, shifted, slices
from autopar.runtime.checkpoints.format import (
    KEY,
    SCALARS,
    Leaf,
    Manifest,
    RowsFrom,
    Shard,
    dtype_named,
    intersection,
    rows_of,
    scalar_value,
)
from autopar.runtime.checkpoints.leaves import canonical, key_data_type
from autopar.runtime.checkpoints.objects import Location, ObjectPath, location

_NUM_THREADS = 8


def read_arrays(
    folder: Location | str,
    manifest: Manifest,
    wanted: Sequence[tuple[str, jax.ShapeDtypeStruct | RowsFrom]],
) -> list[jax.Array]:
    """The named leaves, or rows of them, as arrays of the wanted dtypes and shardings, or on the
    default device without a sharding. Shapes and dtypes must be those of the checkpoint."""
    leaves = {leaf.key: leaf for leaf in manifest.leaves}
    types = [like.array if isinstance(like, RowsFrom) else like for _, like in wanted]
    jobs = [
        replace(_job(leaves[key], type_), first_row=getattr(like, "first", ()))
        for (key, like), type_ in zip(wanted, types, strict=True)
    ]
    return [
        _finished(_assembled(job, parts), type_)
        for job, type_, parts in zip(
            jobs, types, _parts_in_order(location(folder), jobs), strict=True
        )
    ]


def read_numpy(folder: Location | str, manifest: Manifest, keys: Sequence[str]) -> list[Any]:
    """The named leaves as numpy arrays, Python numbers and PRNG keys, as they were saved."""
    leaves = {leaf.key: leaf for leaf in manifest.leaves}
    jobs = [_Job(leaves[key], leaves[key].shape, None) for key in keys]
    values = []
    for job, parts in zip(jobs, _parts_in_order(location(folder), jobs), strict=True):
        value = parts[_whole(job.shape)]
        if job.leaf.kind in SCALARS:
            value = scalar_value(job.leaf)
        elif job.leaf.kind == KEY:
            value = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=job.leaf.impl)
        values.append(value)
    return values


@dataclass(frozen=True)
class _Job:
    """A leaf to be read. For PRNG keys, shape and sharding are those of their data."""

    leaf: Leaf
    shape: tuple[int, ...]
    sharding: Sharding | None
    dtype: Any = None  # of a Python number, as an array
    first_row: tuple[int, ...] = ()  # of the leaf, that is the array's

    def boxes(self) -> dict[Any, Box]:
        """The box of each device of this process; without a sharding, None has the whole array."""
        if self.sharding is None:
            return {None: _whole(self.shape)}
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return {
            device: shifted(
                tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)),
                self.first_row,
            )
            for device, index in indices.items()
            if index is not None
        }


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def _job(leaf: Leaf, like: jax.ShapeDtypeStruct) -> _Job:
    if not jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return _Job(leaf, tuple(like.shape), like.sharding, canonical(like.dtype))
    data = key_data_type(like)
    sharding = like.sharding if _holds_for_data(like.sharding) else None
    return _Job(leaf, data.shape, sharding, data.dtype)


def _holds_for_data(sharding: Sharding | None) -> bool:
    """The data of keys has one more dimension, at the end, which these shardings do not name."""
    return isinstance(sharding, (NamedSharding, SingleDeviceSharding))


def _assembled(job: _Job, parts: dict[Box, np.ndarray]) -> jax.Array:
    if job.sharding is None:
        return jax.numpy.asarray(parts[_whole(job.shape)])
    boxes = job.boxes()
    kind = job.sharding.memory_kind
    places = [SingleDeviceSharding(device, memory_kind=kind) for device in boxes]
    shards = jax.device_put([parts[box] for box in boxes.values()], places)
    return jax.make_array_from_single_device_arrays(
        job.shape, job.sharding, shards, dtype=job.dtype
    )


def _finished(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Wrapped as PRNG keys, or with a weak type, where wanted."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(array, impl=_jax.key_implementation(like.dtype))
        moves = like.sharding is not None and not _holds_for_data(like.sharding)
        return jax.device_put(keys, like.sharding) if moves else keys
    return _jax.with_weak_type(array) if like.weak_type else array


def _parts_in_order(folder: Location, jobs: Sequence[_Job]) -> Iterator[dict[Box, np.ndarray]]:
    """The parts of each leaf, in order; threads read a few leaves ahead."""
    ahead: deque[Future[dict[Box, np.ndarray]]] = deque()
    with _data_files(folder) as data_files, ThreadPoolExecutor(_NUM_THREADS) as pool:
        for job in jobs:
            boxes = list(job.boxes().values())
            ahead.append(pool.submit(_read_boxes, data_files, job.leaf, boxes, job.dtype))
            if len(ahead) > _NUM_THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _read_boxes(
    data_files: _DataFiles, leaf: Leaf, boxes: Sequence[Box], dtype: Any = None
) -> dict[Box, np.ndarray]:
    """The values of boxes of an array."""
    if leaf.kind in SCALARS:
        return {box: np.asarray(scalar_value(leaf), dtype) for box in boxes}
    for shard in leaf.shards:  # before allocating memory that a damaged file claims to need
        data_files.check(shard, leaf.key)
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
    """(box, values) of the blocks of a shard that overlap with the boxes."""
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

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._open: dict[str, _OpenFile | _OpenObject] = {}
        self._lock = threading.Lock()

    def check(self, shard: Shard, key: str) -> None:
        """The file exists and is long enough for the shard."""
        missing = shard.offset + shard.num_bytes - self._file(shard.file, key).size
        if missing > 0:
            raise self._too_short(shard.file, key, missing)

    def read(self, name: str, offset: int, num_bytes: int, key: str) -> bytes | bytearray:
        try:
            data = self._file(name, key).read(offset, num_bytes)
        except OSError as error:
            raise self._unreadable(name, key, error) from error
        if len(data) < num_bytes:
            raise self._too_short(name, key, num_bytes - len(data))
        return data

    def _file(self, name: str, key: str) -> _OpenFile | _OpenObject:
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = _opened(self.folder / name)
                except OSError as error:
                    raise self._unreadable(name, key, error) from error
            return self._open[name]

    def _unreadable(self, name: str, key: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / name}: cannot be read: {error.strerror}. It holds {key}."
        )

    def _too_short(self, name: str, key: str, missing: int) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / name}: is damaged: it ends {missing} bytes before the end of "
            f"{key or 'the array'}. Restore another step."
        )

    def close(self) -> None:
        for file in self._open.values():
            file.close()


@dataclass(frozen=True)
class _OpenFile:
    descriptor: int
    size: int

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """These bytes, or those up to the end of the file."""
        data = bytearray(num_bytes)
        done = 0
        while done < num_bytes:
            count = os.preadv(self.descriptor, [memoryview(data)[done:]], offset + done)
            if not count:
                break
            done += count
        return data if done == num_bytes else data[:done]

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class _OpenObject:
    path: ObjectPath
    size: int

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self.path.read(offset, num_bytes)

    def close(self) -> None:
        """Nothing is open."""


def _opened(path: Location) -> _OpenFile | _OpenObject:
    if isinstance(path, ObjectPath):
        return _OpenObject(path, path.size())
    return _OpenFile(*open_to_read(path))


@contextmanager
def _data_files(folder: Location) -> Iterator[_DataFiles]:
    data_files = _DataFiles(folder)
    try:
        yield data_files
    finally:
        data_files.close()
