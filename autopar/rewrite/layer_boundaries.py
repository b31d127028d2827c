"""Layers from the user's marks: from a `Program` to its `Layer`s.

`autopar.mark_layer_boundary()` leaves no equation: each equation knows the marks before it in the
forward pass (`Equation.marks`), through every transform that copies equations. n marks make n + 1
layers, including the one before the first mark (an embedding) and the one after the last (head and
loss). An effect of its own keeps a mark in place through JAX's transformations; a plain `jax.jit`
of such a step pays about 0.2 ms a call: JAX dispatches programs with effects by its slower path.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.errors import TraceError
from autopar.ir.program import Program
from autopar.rewrite.layers import Flow, Layer


def layers_by_marks(program: Program, batch: Collection[int] | None = None) -> tuple[Layer, ...]:
    """The layers between the marks of the forward pass, in order; `batch` as for `find_layers`."""
    _refuse_marks_in_loops(program)
    marks = max((e.marks for e in program.equations), key=len, default=())
    if not marks:
        raise TraceError(
            "layers=ManualLayers(): the step marks no layer boundary. Call "
            "autopar.mark_layer_boundary() between the layers of the model's forward code, or use "
            "layers=AutoLayers()."
        )
    flow = Flow(program, batch)
    groups: list[list[int]] = [[] for _ in range(len(marks) + 1)]
    reached = 0
    for index in flow.forward_equations():
        # An equation added in between has no marks and belongs with the one before it.
        reached = max(reached, len(program.equations[index].marks))
        groups[reached].append(index)
    for number, group in enumerate(groups):
        if not group:
            raise TraceError(_without_work(marks, number))
    return flow.layers(groups)


def _without_work(marks: tuple[str, ...], number: int) -> str:
    if number == 0:
        where = f"before the layer boundary at {marks[0]}"
    elif number == len(marks):
        where = f"after the layer boundary at {marks[-1]}"
    else:
        where = f"between the layer boundaries at {marks[number - 1]} and {marks[number]}"
    return (
        f"layers=ManualLayers(): {where} the forward pass computes nothing, so there is no layer. "
        "Remove that call of autopar.mark_layer_boundary(), or move it to where one layer ends and "
        "the next one begins."
    )


def _refuse_marks_in_loops(program: Program) -> None:
    for equation in program.equations:
        if equation.inner_marks:
            raise TraceError(
                f"layer boundary inside a {equation.inner_marks[0]}. The trips of a loop cannot be "
                "put on different stages. Call autopar.mark_layer_boundary() outside of it, unroll "
                "the loop in Python, or use layers=AutoLayers(), which unrolls a scan over layers."
            )
