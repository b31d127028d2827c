"""Hand-written layouts of a DLRM: embedding tables split along one of their dimensions.

The tables hold nearly all parameters and the MLPs nearly all work, so practice splits the tables
over all devices and the batch of the MLPs (Naumov et al., 2019): an all-to-all carries the rows
that were looked up from the tables' devices to the samples' devices.
"""

from __future__ import annotations

from typing import Literal

from jax.sharding import PartitionSpec as P

from .handwritten import ALL, HandWritten, Rule, Specs, largest_dim, replicated

Dimension = Literal["tables", "rows", "features"]
_SAMPLES = P(ALL)
# The spec of the array (table, row, feature), and of what a lookup gives (sample, table, feature)
# before it goes to the samples' devices. With rows split, each device has a term of every sum.
_SPLIT: dict[Dimension, tuple[P, list[P]]] = {
    "tables": (P(ALL, None, None), [P(None, ALL, None)]),
    "rows": (P(None, ALL, None), []),
    "features": (P(None, None, ALL), [P(None, None, ALL)]),
}


def table_parallel(num_devices: int, dimension: Dimension, *, zero: bool = False) -> HandWritten:
    """Tables split along `dimension` over all devices, MLPs data parallel; with `zero` their
    kernels are split and gathered as in FSDP."""
    spec, looked_up = _SPLIT[dimension]
    activations: dict[str, Specs] = {"*": _SAMPLES, "lookup": [*looked_up, P(ALL, None, None)]}
    name = f"tables by {dimension}" + (" + ZeRO-3" if zero else "")
    rest = largest_dim(ALL, num_devices) if zero else replicated
    return HandWritten(name, (num_devices, 1), _tables_and(spec, rest), _SAMPLES, activations)


def _tables_and(spec: P, rest: Rule) -> Rule:
    def parameter(path: str, shape: tuple[int, ...]) -> P:
        return spec if "'tables'" in path else rest(path, shape)

    return parameter
