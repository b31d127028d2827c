"""What a checkpoint's manifest says, as frozen data, and its text.

A checkpoint is a folder `step_00000012` with `manifest.json` and data files, some per writer. The
manifest names every leaf of the saved pytree and where the parts of its bytes lie. It is data,
never code: `read_manifest` checks format, checksum and every field before it believes a file.

A *shard* is a box of an array, row-major, in one data file. It is cut into *blocks* of whole rows,
each with a checksum of its own, so that a part of a shard can be read and checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import CheckpointError
from autopar.ir.tiles import Box

FORMAT = "autopar-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

ARRAY, KEY = "array", "key"
SCALARS = {"bool": bool, "int": int, "float": float, "complex": complex}

PathEntry = tuple[str, str | int]  # ("attribute", name), ("index", i), ("key", k), ("other", text)

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


Entry = tuple[str, Shard]  # what a writer tells of each shard that it wrote: of which leaf


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
    step: int
    leaves: tuple[Leaf, ...]
    writers: tuple[str, ...]
    autopar_version: str
    jax_version: str


def with_shards(leaves: Sequence[Leaf], entries: Sequence[Entry]) -> tuple[Leaf, ...]:
    """Leaves with the shards that writers wrote of them. A box that two writers have, as processes
    that each hold a copy of an array, is taken from the first."""
    found: dict[str, dict[Box, Shard]] = {leaf.key: {} for leaf in leaves}
    for key, shard in entries:
        found[key].setdefault(shard.box, shard)
    return tuple(replace(leaf, shards=tuple(found[leaf.key].values())) for leaf in leaves)


def scalar_text(value: bool | int | float | complex) -> str:
    """A Python number as text that gives exactly this number back."""
    if isinstance(value, complex):
        return f"{value.real.hex()} {value.imag.hex()}"
    return value.hex() if isinstance(value, float) else hex(value)


def scalar_value(leaf: Leaf) -> Any:
    if leaf.kind == "complex":
        real, imag = leaf.value.split(" ")
        return complex(float.fromhex(real), float.fromhex(imag))
    if leaf.kind == "float":
        return float.fromhex(leaf.value)
    return SCALARS[leaf.kind](int(leaf.value, 16))


def dtype_named(name: str) -> np.dtype:
    """The numpy type of a name; those of `ml_dtypes` are known once JAX is imported."""
    dtype = np.dtype(name)
    is_plain = dtype.names is None and dtype.subdtype is None and not dtype.hasobject
    if dtype.name != name or not is_plain or dtype.itemsize == 0:
        raise ValueError(f"{name!r} is not a type of array elements")
    return dtype


def rows_of(box: Box) -> tuple[int, ...]:
    """The shape of a box as rows: scalars are one row."""
    return tuple(stop - start for start, stop in box) or (1,)


# -- text


def manifest_text(manifest: Manifest) -> str:
    leaves = [{**vars(leaf), "shards": [*map(vars, leaf.shards)]} for leaf in manifest.leaves]
    body = {**vars(manifest), "leaves": leaves}
    document = {"format": FORMAT, "version": FORMAT_VERSION, "checkpoint": body}
    document["sha256"] = _digest(body)
    return json.dumps(document, separators=(",", ":"))


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest."""
    where = folder / MANIFEST
    try:
        document = json.loads(where.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}, so it is no checkpoint, or not a whole one. Restore "
            "another step; autopar.checkpoint_steps(…) lists those that are there."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is damaged: not JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{where}: not the manifest of an autopar checkpoint.")
    version = document.get("version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise CheckpointError(
            f"{where}: checkpoint format {version!r}, this autopar reads {FORMAT_VERSION}. "
            + ("Update autopar." if newer else "The file is damaged.")
        )
    body: Any = document.get("checkpoint")
    if document.get("sha256") != _digest(body):
        raise CheckpointError(
            f"{where}: is damaged: the checksum does not match. Restore another step."
        )
    try:
        manifest = _decode(body)
        check_manifest(manifest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: malformed ({error!r}). Restore another step.") from error
    return manifest


def _decode(body: dict[str, Any]) -> Manifest:
    return Manifest(
        step=_whole(body["step"]),
        leaves=tuple(_decode_leaf(leaf) for leaf in body["leaves"]),
        writers=tuple(_text(name) for name in body["writers"]),
        autopar_version=_text(body["autopar_version"]),
        jax_version=_text(body["jax_version"]),
    )


def _decode_leaf(body: dict[str, Any]) -> Leaf:
    if not isinstance(body["weak_type"], bool):
        raise ValueError(f"weak_type {body['weak_type']!r}")
    return Leaf(
        key=_text(body["key"]),
        path=tuple(_path_entry(*entry) for entry in body["path"]),
        kind=_text(body["kind"]),
        shape=tuple(_whole(n) for n in body["shape"]),
        dtype=_text(body["dtype"]),
        weak_type=body["weak_type"],
        impl=_text(body["impl"]),
        value=_text(body["value"]),
        shards=tuple(decode_shard(shard) for shard in body["shards"]),
    )


def decode_shard(body: dict[str, Any]) -> Shard:
    """From what JSON makes of its fields."""
    return Shard(
        box=tuple((_whole(start), _whole(stop)) for start, stop in body["box"]),
        file=_text(body["file"]),
        offset=_whole(body["offset"]),
        num_bytes=_whole(body["num_bytes"]),
        block_rows=_whole(body["block_rows"]),
        crc32=tuple(_whole(n) for n in body["crc32"]),
    )


def _path_entry(kind: Any, name: Any) -> PathEntry:
    if kind == "index" or (kind == "key" and not isinstance(name, str)):
        return kind, _whole(name, least=0 if kind == "index" else None)
    if kind not in ("attribute", "key", "other"):
        raise ValueError(f"a path with {kind!r}")
    return kind, _text(name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _whole(value: Any, least: int | None = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    if least is not None and value < least:
        raise ValueError(f"{value} is less than {least}")
    return value


# -- checks


def check_manifest(manifest: Manifest) -> None:
    """Every element of every array lies in exactly one shard; ValueError if not."""
    keys = [leaf.key for leaf in manifest.leaves]
    if len(set(keys)) != len(keys):
        raise ValueError("two leaves of one name")
    for leaf in manifest.leaves:
        if leaf.kind in SCALARS:
            scalar_value(leaf)
        elif leaf.kind in (ARRAY, KEY):
            _check_array(leaf)
        else:
            raise ValueError(f"{leaf.key}: a leaf of the kind {leaf.kind!r}")


def _check_array(leaf: Leaf) -> None:
    itemsize = dtype_named(leaf.dtype).itemsize
    if leaf.kind == KEY and (not leaf.impl or not leaf.shape):
        raise ValueError(f"{leaf.key}: a key without an implementation")
    for shard in leaf.shards:
        if not _FILE_NAME.fullmatch(shard.file):
            raise ValueError(f"{leaf.key}: the data file {shard.file!r}")
        inside = len(shard.box) == len(leaf.shape) and all(
            start < stop <= size for (start, stop), size in zip(shard.box, leaf.shape, strict=True)
        )
        rows = rows_of(shard.box)
        num_blocks = -(-rows[0] // shard.block_rows) if shard.block_rows else 0
        if not inside or shard.num_bytes != prod(rows) * itemsize:
            raise ValueError(f"{leaf.key}: a part {shard.box} of {shard.num_bytes} bytes")
        if len(shard.crc32) != num_blocks:
            raise ValueError(f"{leaf.key}: {len(shard.crc32)} checksums for {num_blocks} blocks")
    boxes = sorted(shard.box for shard in leaf.shards)
    if sum(prod(rows_of(box)) for box in boxes) != prod(leaf.shape):
        raise ValueError(f"{leaf.key}: parts do not make up the array of shape {leaf.shape}")
    if len(set(boxes)) == len(boxes) and _lie_in_a_grid(boxes):
        return
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if intersection(box, other) is not None:
                raise ValueError(f"{leaf.key}: the parts {box} and {other} overlap")


def _lie_in_a_grid(boxes: Sequence[Box]) -> bool:
    """Whether ranges of boxes, in every dimension, are equal or apart: then boxes are, too. It
    spares comparing each with each."""
    for ranges in zip(*boxes, strict=True):
        in_order = sorted(set(ranges))
        if any(one[1] > other[0] for one, other in pairwise(in_order)):
            return False
    return True


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes of one array share; None if that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None
