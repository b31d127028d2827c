"""Arrays in `*.safetensors` files: from a folder to memory maps by name; only headers are read.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> type, shape,
start and end of the bytes behind the header), and the bytes. Larger models have several files, and
`model.safetensors.index.json` with `weight_map`: name -> file.
"""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from examples.llm_serving.config import ModelError

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file: `start` counts bytes from the file's beginning; `dtype` is the file's
    name for it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def map(self) -> np.ndarray:
        """The array in the file's memory map, which is open as long as a view of it lives."""
        dtype = _TYPES[self.dtype]
        if not prod(self.shape):
            return np.zeros(self.shape, dtype)
        data = np.memmap(self.path, np.uint8, "r", self.start, (prod(self.shape) * dtype.itemsize,))
        return data.view(dtype).reshape(self.shape)


def find_arrays(folder: Path) -> dict[str, StoredArray]:
    """All arrays of a model's folder."""
    if (folder / INDEX).exists():
        return _by_index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder}: has no *.safetensors. Convert other weights (pytorch_model.bin) with "
            "transformers' save_pretrained."
        )
    found: dict[str, StoredArray] = {}
    for path in files:
        for name, array in read_header(path).items():
            if name in found:
                raise ModelError(f"{path}: {name} is also in {found[name].path.name}.")
            found[name] = array
    return found


def _by_index(folder: Path) -> dict[str, StoredArray]:
    path = folder / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        entries = dict(weight_map)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: expected a JSON object with a weight_map: {error!r}.") from error
    headers: dict[str, dict[str, StoredArray]] = {}
    found = {}
    for name, file in entries.items():
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise ModelError(
                f"{path}: {name} should be in {file!r}, which is not a file of this folder. The "
                "index may only name files next to it."
            )
        if file not in headers:
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise ModelError(f"{path}: {name} should be in {file}, which does not have it.")
        found[name] = headers[file][name]
    return found


def read_header(path: Path) -> dict[str, StoredArray]:
    """The arrays of one file; a `ModelError` if it is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: is missing, but the index names it.") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}.") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    begin = 8 + length
    return {
        name: _entry(path, name, entry, begin, size - begin)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _entry(path: Path, name: str, entry: Any, begin: int, num_bytes: int) -> StoredArray:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{name} lacks dtype, shape or data_offsets") from error
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)):
        raise _damaged(path, f"{name} has shape {shape} at {entry['data_offsets']}")
    if not isinstance(dtype, str):
        raise _damaged(path, f"{name} has dtype {dtype!r}")
    known = _TYPES.get(dtype)
    if end > num_bytes or start > end:
        raise _damaged(path, f"{name} ends at byte {end} of {num_bytes}; was the file cut off?")
    if known is not None and end - start != prod(shape) * known.itemsize:
        raise _damaged(path, f"{name} of {dtype} {shape} has {end - start} bytes")
    return StoredArray(path, dtype, shape, begin + start)


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: is damaged: {what}. Download it again.")
