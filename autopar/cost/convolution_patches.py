"""Patches of convolutions on CPUs: from a node and its layouts to the seconds of gathering them.

XLA's convolutions for CPUs are products whose left side, a row of the image's elements for every
element of a result's channel, is gathered on the way. Splitting the channels of the result leaves
it as large as it was. What lies side by side in a row (the channels of an image; the images, for
the gradient of a kernel) is gathered in vectors if it fills them, else element by element; a window
with holes, as in the gradient of a strided convolution's kernel, takes longer still.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.compute import local_sizes
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout

_VECTOR = 4  # elements
# Relative to an element by itself.
_IN_VECTORS = 0.1
_WITH_HOLES = 3.0
# The channels of the result and what lies side by side, as positions in `OpSize.sizes`: images,
# positions, in channels, out channels, window.
_CHANNELS_AND_INNER = {"forward": (3, 2), "input-gradient": (2, 3), "kernel-gradient": (3, 0)}


def patches_s(
    node: Node, values: Sequence[Value], mesh: LogicalMesh, layouts: Sequence[Layout], ways: int
) -> float:
    """Seconds of one run on a device that gathers patches; `layouts`: of operands, then of results;
    `ways`: devices that divide the work."""
    element_s = None if mesh.device is None else mesh.device.patch_element_s
    if element_s is None or node.work is None or node.work.kind not in _CHANNELS_AND_INNER:
        return 0.0
    sizes = local_sizes(node, node.work, values, mesh, layouts)
    channels, inner = (sizes[place] for place in _CHANNELS_AND_INNER[node.work.kind])
    elements = node.flops / 2 / ways / channels
    if node.work.has_holes:
        return _WITH_HOLES * element_s * elements
    return (_IN_VECTORS if inner % _VECTOR == 0 else 1.0) * element_s * elements
