"""The primitives of the installed JAX, found by looking through its modules.

`jax.extend.core.primitives` is JAX's public list; packages of `jax._src` add those that it leaves
out. A release may lack some of the modules.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

from jax.extend.core import Primitive

PACKAGES = ("jax._src.lax", "jax._src.random", "jax._src.state")
MODULES = (
    "jax.extend.core.primitives",
    "jax._src.ad_checkpoint",
    "jax._src.ad_util",
    "jax._src.callback",
    "jax._src.checkify",
    "jax._src.core",
    "jax._src.cudnn.fused_attention_stablehlo",
    "jax._src.cudnn.scaled_matmul_stablehlo",
    "jax._src.custom_batching",
    "jax._src.custom_derivatives",
    "jax._src.custom_partitioning",
    "jax._src.debugging",
    "jax._src.dispatch",
    "jax._src.export._export",
    "jax._src.export.shape_poly",
    "jax._src.ffi",
    "jax._src.hijax",
    "jax._src.interpreters.ad",
    "jax._src.pallas.pallas_call",
    "jax._src.pallas.primitives",
    "jax._src.pjit",
    "jax._src.prng",
    "jax._src.program_order",
    "jax._src.shard_map",
    "jax._src.xla_metadata",
)


@cache
def primitives() -> dict[str, Any]:
    """Primitives by name."""
    found: dict[str, Any] = {}
    for module in _modules():
        for value in vars(module).values():
            if isinstance(value, Primitive):
                found.setdefault(value.name, value)
    return dict(sorted(found.items()))


def _modules() -> Iterator[ModuleType]:
    names = list(MODULES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        names += [info.name for info in pkgutil.walk_packages(path, f"{package}.")]
    for name in names:
        try:
            yield importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("jax"):
                raise
