"""Tables of layers, as the tests of the stage search want them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import LayerTable, Submesh
from autopar.stages.ranges import Setting


def table(submesh: Submesh, latency_s: Sequence[float] | np.ndarray, **figures: Any) -> LayerTable:
    """A variant with the given times; what is not given is zero, numbers are for every layer."""
    latency = np.asarray(latency_s, float)
    names = ("once_s", "held_bytes", "in_flight_bytes", "working_bytes")
    rows = {name: np.zeros(len(latency)) + figures.pop(name, 0.0) for name in names}
    shape = figures.pop("mesh_shape", (prod(submesh),))
    return LayerTable(submesh, shape, latency, latency / 3, **rows, **figures)


def setting(cluster: ClusterSpec, num_layers: int, num_micro_batches: int, **rest: Any) -> Setting:
    crossing = np.zeros(num_layers - 1) + rest.pop("boundary_bytes", 0.0)
    return Setting(cluster, crossing, num_micro_batches, **rest)
