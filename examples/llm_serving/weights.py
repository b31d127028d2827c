"""Loads a model's parameters: from a folder of `*.safetensors` to arrays in a plan's shards.

Every device's shard is read from a memory map of the file, one after another, so the host holds one
shard at a time and never the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.llm_serving.config import ModelConfig, ModelError
from examples.llm_serving.decoder import param_types
from examples.llm_serving.names import BASE_PREFIXES, IGNORED_ENDINGS, Source, find_sources
from examples.llm_serving.tensor_files import StoredArray, find_arrays

_FLOATS = ("F64", "F32", "F16", "BF16")


def load_params(
    folder: str | Path, config: ModelConfig, dtype: Any, shardings: Any
) -> dict[str, Any]:
    """The parameters in `dtype`; `shardings`: a `jax.sharding.Sharding` for each."""
    arrays = find_arrays(Path(folder))
    sources = find_sources(config)
    check_arrays(config, sources, arrays, str(folder))
    arrays = _with_prefix(config, arrays)

    def load(source: Source, sharding: jax.sharding.Sharding) -> jax.Array:
        views = [part.view(arrays[part.name].map()) for part in source.parts]
        return _in_shards(views, source, np.dtype(dtype), sharding)

    return jax.tree.map(load, sources, shardings)


def _in_shards(
    views: list[np.ndarray], source: Source, dtype: np.dtype, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Reads one shard at a time; devices with the same shard share one read."""
    devices_by_range: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(source.shape).items():
        whole = index or (slice(None),) * len(source.shape)
        ranges = tuple(one.indices(size)[:2] for one, size in zip(whole, source.shape, strict=True))
        devices_by_range.setdefault(ranges, []).append(device)
    placed = []
    for ranges, devices in devices_by_range.items():
        shard = _read(views, source.axis, ranges, dtype)
        # On CPU devices JAX may keep the given memory, so each device gets its own copy.
        copies = [
            shard,
            *(shard.copy() if devices[0].platform == "cpu" else shard for _ in devices[1:]),
        ]
        placed += [jax.device_put(a, device) for a, device in zip(copies, devices, strict=True)]
        jax.block_until_ready(placed[-len(devices) :])
    return jax.make_array_from_single_device_arrays(source.shape, sharding, placed)


def _read(
    views: list[np.ndarray], axis: int, ranges: tuple[tuple[int, int], ...], dtype: np.dtype
) -> np.ndarray:
    """These ranges of the views' concatenation along `axis`, which is never made as a whole."""
    shard = np.empty([end - begin for begin, end in ranges], dtype)
    begin, end = ranges[axis]
    index = [slice(*ends) for ends in ranges]
    into = [slice(None)] * shard.ndim
    offset = 0
    for view in views:
        first, last = max(begin, offset), min(end, offset + view.shape[axis])
        if first < last:
            index[axis] = slice(first - offset, last - offset)
            into[axis] = slice(first - begin, last - begin)
            shard[tuple(into)] = view[tuple(index)]
        offset += view.shape[axis]
    return shard


def check_arrays(
    config: ModelConfig, sources: Any, arrays: Mapping[str, StoredArray], where: str
) -> None:
    """Raises a `ModelError` that names the first parameter that the files lack or have in another
    form, or the first array of the files that is not a parameter."""
    arrays = _with_prefix(config, arrays)
    wanted = [(s.path, part) for s in jax.tree.leaves(sources) for part in s.parts]
    for path, part in wanted:
        stored = arrays.get(part.name)
        if stored is None:
            raise ModelError(
                f"{where}: {path} is missing: config.json asks for {part.name} of shape "
                f"{part.stored_shape}, and no file has it.{_hint(part.name, arrays)}"
            )
        if stored.shape != part.stored_shape:
            raise ModelError(
                f"{where}: {path} has another shape: {part.name} in {stored.path.name} is "
                f"{stored.shape}, config.json asks for {part.stored_shape}."
            )
        if stored.dtype not in _FLOATS:
            raise ModelError(
                f"{where}: {path} has another dtype: {part.name} in {stored.path.name} is "
                f"{stored.dtype}, expected one of {', '.join(_FLOATS)}. Quantised weights are not "
                "supported."
            )
    known = {part.name for _, part in wanted}
    if config.tied_head:
        known.add("lm_head.weight")
    for name in arrays:
        if name not in known and not name.endswith(IGNORED_ENDINGS):
            raise ModelError(
                f"{where}: {name} in {arrays[name].path.name} is extra: config.json describes a "
                f"{config.architecture} of {config.num_layers} layers that has no such parameter."
            )


def _hint(name: str, arrays: Mapping[str, StoredArray]) -> str:
    ending = name.rsplit(".", 2)[-2:]
    close = [other for other in arrays if other.rsplit(".", 2)[-2:] == ending]
    return f" Did you mean {close[0]}?" if close else ""


def _with_prefix(config: ModelConfig, arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """Adds the missing prefix to the names of a model that was saved without its head."""
    prefix = BASE_PREFIXES[config.architecture]
    if any(name.startswith(prefix) for name in arrays):
        return dict(arrays)
    return {
        name if name == "lm_head.weight" else prefix + name: array for name, array in arrays.items()
    }


def random_params(config: ModelConfig, dtype: Any, shardings: Any, seed: int = 0) -> Any:
    """Random parameters, each created on its devices: norms are one, biases zero, and matrices have
    a spread that preserves the scale of activations from layer to layer."""
    types = param_types(config, dtype)
    keys = iter(range(len(jax.tree.leaves(types))))

    def make(path: tuple[Any, ...], kind: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        name = str(getattr(path[-1], "key", ""))
        fan_in = np.prod(kind.shape[1:]) if name == "o" else kind.shape[-1]
        return _maker(name, kind.shape, np.dtype(kind.dtype), float(fan_in) ** -0.5, sharding)(
            np.uint32(seed), np.uint32(next(keys))
        )

    return jax.tree_util.tree_map_with_path(make, types, shardings)


_makers: dict[Any, Any] = {}


def _maker(name: str, shape: tuple[int, ...], dtype: np.dtype, spread: float, sharding: Any) -> Any:
    kind = "ones" if name == "scale" else "zeros" if name.endswith("bias") else "matrix"
    key = (kind, shape, dtype, spread, sharding)

    def make(seed: jax.Array, number: jax.Array) -> jax.Array:
        if kind == "ones":
            return jnp.ones(shape, dtype)
        if kind == "zeros":
            return jnp.zeros(shape, dtype)
        random_key = jax.random.fold_in(jax.random.key(seed), number)
        bound = 3**0.5 * spread
        return jax.random.uniform(random_key, shape, jnp.float32, -bound, bound).astype(dtype)

    if key not in _makers:
        _makers[key] = jax.jit(make, out_shardings=sharding)
    return _makers[key]
