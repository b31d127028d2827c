"""From arrays to a data file: every process writes the shards of which it holds the first copy.

The driver and the workers of a cluster call this, each for its own shards. `own_parts` finds them,
`snapshot` copies them to the host, and `write_parts` writes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.ir.tiles import Box, shifted
from autopar.runtime.checkpoints import files
from autopar.runtime.checkpoints.format import Entry, RowsFrom, Shard, rows_of
from autopar.runtime.checkpoints.objects import Location, location

BLOCK_BYTES = 16 * 2**20  # per checksum, about
_ALIGNMENT = 64


@dataclass(frozen=True)
class WrittenShard:
    """A box of the leaf `key`, with its data as an array of one device, or of numpy."""

    key: str
    box: Box
    data: jax.Array | np.ndarray


def write_shards(
    folder: Location | str, writer_name: str, arrays: Sequence[tuple[str, Any]]
) -> list[Entry]:
    """Write the shards of which this process holds the first copy to one file. PRNG keys are
    written as their data."""
    return write_parts(folder, writer_name, own_parts(arrays))


def own_parts(arrays: Iterable[tuple[str, Any]]) -> list[WrittenShard]:
    """The shards that this process writes; nothing is copied."""
    parts = []
    for key, array in arrays:
        first_row: tuple[int, ...] = ()
        if isinstance(array, RowsFrom):
            first_row, array = array.first, array.array
        if not isinstance(array, jax.Array):
            array = np.asarray(array)
            parts.append(WrittenShard(key, tuple((0, n) for n in array.shape), array))
            continue
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                ranges = zip(shard.index, array.shape, strict=True)
                box = shifted(tuple(s.indices(n)[:2] for s, n in ranges), first_row)
                parts.append(WrittenShard(key, box, _without_cache(shard.data)))
    return [part for part in parts if part.data.size]


def _without_cache(array: jax.Array) -> jax.Array:
    """The same buffer as a new array. JAX caches host copies in arrays: in the user's, it would
    keep a second copy of the state alive."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def snapshot(arrays: Iterable[tuple[str, Any]]) -> list[WrittenShard]:
    """The shards that this process writes, copied to host memory: the arrays may then be donated or
    changed."""
    parts = own_parts(arrays)
    for part in parts:
        if isinstance(part.data, jax.Array):
            part.data.copy_to_host_async()
    return [WrittenShard(part.key, part.box, _own_copy(part.data)) for part in parts]


def _own_copy(data: jax.Array | np.ndarray) -> np.ndarray:
    is_host_memory = not isinstance(data, jax.Array) or _platform(data) == "cpu"
    return np.array(data) if is_host_memory else np.asarray(data)


def _platform(array: jax.Array) -> str:
    return next(iter(array.sharding.device_set)).platform


def write_parts(folder: Location | str, writer_name: str, parts: list[WrittenShard]) -> list[Entry]:
    """Write parts to `<writer_name>.data` and sync it. Empties the list: parts are copied from
    their devices one ahead, so host memory holds at most two."""
    if not parts:
        return []
    path = location(folder) / f"{writer_name}.data"
    try:
        return _write_file(path, parts)
    except OSError as error:
        raise files.as_checkpoint_error(f"writing {path}", error) from error


def _write_file(path: Location, parts: list[WrittenShard]) -> list[Entry]:
    file = files.new_file(path)
    entries: list[Entry] = []
    offset = 0
    parts.reverse()
    try:
        while parts:
            part = parts.pop()
            if parts and isinstance(parts[-1].data, jax.Array):
                parts[-1].data.copy_to_host_async()
            padding = -offset % _ALIGNMENT
            file.write(bytes(padding))
            shard = _write_part(file, path.name, offset + padding, part)
            offset = shard.offset + shard.num_bytes
            entries.append((part.key, shard))
    except BaseException:
        file.abandon()
        raise
    file.finish()
    return entries


def _write_part(file: files.NewFile, name: str, offset: int, part: WrittenShard) -> Shard:
    array = np.asarray(part.data)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = array.reshape(-1).view(np.uint8).data
    row_bytes = array.nbytes // rows_of(part.box)[0]
    block_rows = max(1, BLOCK_BYTES // row_bytes)
    checksums = []
    for start in range(0, array.nbytes, block_rows * row_bytes):
        block = data[start : start + block_rows * row_bytes]
        checksums.append(zlib.crc32(block))
        file.write(block)
    return Shard(part.box, name, offset, array.nbytes, block_rows, tuple(checksums))
