"""Patches of convolutions on CPUs: from a node and its layouts to the seconds of gathering them.

XLA's convolutions for CPUs are products whose left side, a row of the image's elements for every
element of a result's channel, is gathered on the way. Splitting the channels of the result leaves
it as large as it was. What is contiguous in a row (the channels of an image; the images, for the
gradient of a kernel) is a run, and every run has its price, however short. XLA leaves convolutions
in two dimensions with many channels to a library (YNNPACK), and computes the others by itself
(Eigen), those with zeros between an image's rows among them. Then runs that do not fill vectors are
gathered element by element, and a window with holes, as in the gradient of a strided convolution's
kernel, takes longer still. For the gradient of a kernel, both operands are transposed first.
`python -m benchmarks.convolution_patches` measures the prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from autopar.cost.compute import local_sizes
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, num_shards

_VECTOR = 4  # elements
# XLA leaves a convolution to the library if it reads or makes more channels than these.
_FEW_CHANNELS = 16
# The channels of the result and what is contiguous, as positions in `OpSize.sizes`: images,
# positions, in channels, out channels, window.
_CHANNELS_AND_RUN = {"forward": (3, 2), "input-gradient": (2, 3), "kernel-gradient": (3, 0)}


class Patches(NamedTuple):
    """What a convolution gathers on one device.

    runs:       of contiguous elements.
    elements:   gathered one by one.
    with_holes: elements of windows with holes.
    transposed: elements of operands.
    """

    runs: float
    elements: float = 0.0
    with_holes: float = 0.0
    transposed: float = 0.0


# Relative to `DeviceSpec.patch_element_s`.
_PRICES = Patches(runs=1.5, elements=1.0, with_holes=3.2, transposed=1.8)


def patches_of(
    node: Node, values: Sequence[Value], mesh: LogicalMesh, layouts: Sequence[Layout], ways: int
) -> Patches | None:
    """Of one run of a convolution; None of other nodes. `layouts`: of operands, then of results;
    `ways`: devices that divide the work."""
    work = node.work
    if work is None or work.kind not in _CHANNELS_AND_RUN:
        return None
    sizes = local_sizes(node, work, values, mesh, layouts)
    channels, run = (sizes[place] for place in _CHANNELS_AND_RUN[work.kind])
    elements = node.flops / 2 / ways / channels
    found = Patches(elements / run)
    if work.kind == "kernel-gradient":
        operands = zip((values[value] for value in node.operands), layouts, strict=False)
        local = (prod(one.shape) / num_shards(layout, mesh.shape) for one, layout in operands)
        found = found._replace(transposed=sum(local))
    in_plane = len(work.sizes[-1]) == 2 and work.kind != "input-gradient"
    if in_plane and max(run, channels) > _FEW_CHANNELS:
        return found
    if work.has_holes:
        return found._replace(with_holes=elements)
    return found._replace(elements=elements if run % _VECTOR else 0.0)


def patches_s(
    node: Node, values: Sequence[Value], mesh: LogicalMesh, layouts: Sequence[Layout], ways: int
) -> float:
    """Seconds of one run on a device that gathers patches; arguments as for `patches_of`."""
    element_s = None if mesh.device is None else mesh.device.patch_element_s
    if element_s is None or (gathered := patches_of(node, values, mesh, layouts, ways)) is None:
        return 0.0
    return element_s * sum(n * price for n, price in zip(gathered, _PRICES, strict=True))
