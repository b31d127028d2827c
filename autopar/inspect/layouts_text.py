"""Layouts and resharding steps as text: `P('x', None)` or a sentence, and `all-gather(x)`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.cost.report import Step
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, spec_to_text, to_partition_spec


def layout_text(layout: Layout, ndim: int, axis_names: Sequence[str]) -> str:
    """`P('x', None)`, or `P() partial along x` for partial sums."""
    partial = [n for n, e in zip(axis_names, layout, strict=True) if e == PARTIAL]
    plain = tuple(WHOLE if e == PARTIAL else e for e in layout)
    text = spec_to_text(to_partition_spec(plain, ndim, axis_names))
    return f"{text} partial along {', '.join(partial)}" if partial else text


def layout_sentence(layout: Layout, mesh_shape: Sequence[int], axis_names: Sequence[str]) -> str:
    """`dimension 0 split 8 ways over x`."""
    parts = []
    for dim in sorted({e for e in layout if e >= 0}):
        axes = [a for a, e in enumerate(layout) if e == dim]
        count = prod(mesh_shape[a] for a in axes)
        names = " and ".join(axis_names[a] for a in axes)
        parts.append(f"dimension {dim} split {count} ways over {names}")
    copies = prod(size for size, e in zip(mesh_shape, layout, strict=True) if e == WHOLE)
    if not parts:
        return f"replicated on {copies} devices"
    return ", ".join(parts) + (f", {copies} copies" if copies > 1 else "")


def step_name(step: Step, mesh: LogicalMesh) -> str:
    return f"{step.kind}({','.join(mesh.axis_names[a] for a in step.axes)})"
