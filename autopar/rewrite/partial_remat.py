"""`Layer`s → the same, with the part of each that is dear to keep and cheap to make again.

Attention's scores take more memory than all else that a layer keeps, and little time to make again:
they are a product over few features. A layer that is recomputed whole repeats its large products
too. So the part of a layer is what its backward pass reads and depends on products that take less
time than keeping their results; a scan's backward trips recompute the same
(`rewrite.scan_residuals`). What stays is the minimum vertex cut of `rewrite.residuals`, with such
products and without: the part frees the difference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.ir.program import Equation, Program
from autopar.rewrite.layers import Flow, Layer
from autopar.rewrite.residuals import ResidualChoice, choose_residuals, is_cheap, repeat_cost
from autopar.tracer.copy_equations import needed_equations
from autopar.tracer.costs import aval_bytes, equation_flops

# Bytes that could be moved in the time that keeping a byte is worth; a scan's stacks cost as much.
_KEEPING_COST = 3
_LEAST_SHARE = 1 / 8  # of the bytes that the whole layer frees, by which a part is worth a barrier
_CHEAPER = 2  # as many bytes per operation as the whole layer, at least


def with_parts(
    program: Program, layers: Sequence[Layer], batch: Collection[int] | None
) -> tuple[Layer, ...]:
    """`batch`: as for `find_layers`."""
    if not any(_is_cheap_product(program, i) for layer in layers for i in layer.equations):
        return tuple(layers)
    flow = Flow(program, batch)
    return tuple(replace(layer, part=_part_of(layer, flow)) for layer in layers)


def _is_cheap_product(program: Program, index: int) -> bool:
    equation = program.equations[index]
    if equation.name != "dot_general":
        return False
    cost = repeat_cost(equation, program.avals)
    kept = aval_bytes(program.avals[equation.results[0]])
    return cost is not None and cost < _KEEPING_COST * kept


def _part_of(layer: Layer, flow: Flow) -> Layer | None:
    """What of the layer may be recomputed alone; None if that would free little, or cost much."""
    program = flow.program
    if layer.scan is not None or not any(_is_cheap_product(program, i) for i in layer.equations):
        return None
    equations = [program.equations[i] for i in layer.equations]
    read = set(flow.residuals(layer.equations))
    available = _available(layer, flow, read)
    cheap = choose_residuals(equations, read, available, program.avals)
    chosen = choose_residuals(
        equations,
        read,
        available,
        program.avals,
        store_cost=lambda v: _KEEPING_COST * aval_bytes(program.avals[v]),
        repeat_cost=lambda e: repeat_cost(e, program.avals),
    )
    again = _from_products(equations, chosen)
    before, after = set(cheap.stored), set(chosen.stored)
    part = replace(
        layer,
        name=f"{layer.name} in part",
        kept=_kept(equations, again, after, flow),
        flops=sum(_product_flops(equations[i], program) for i in chosen.recomputed),
        residual_bytes=flow.bytes_of(before - after),
        kept_bytes=flow.bytes_of(after - before),
        part=None,
    )
    return part if _is_worth_it(part, layer) else None


def _available(layer: Layer, flow: Flow, read: Collection[int]) -> set[int]:
    """Values that the backward pass has in any case: parameters, constants, data, and activations
    that are kept for others."""
    program = flow.program
    inputs = [v for v in layer.inputs if v in flow.data or flow.is_read_backward(v)]
    made = [r for i in layer.equations for r in program.equations[i].results]
    kept = [v for v in made if v not in read and flow.is_read_backward(v)]
    return {*flow.persistent, *flow.free, *flow.data, *inputs, *kept}


def _from_products(equations: Sequence[Equation], chosen: ResidualChoice) -> set[int]:
    """Values that are made again by products, or from their results. (Compilers make again by
    themselves what is cheap.)"""
    found: set[int] = set()
    for position in chosen.recomputed:
        equation = equations[position]
        if not is_cheap(equation) or not found.isdisjoint(equation.inputs):
            found.update(equation.results)
    return found.difference(chosen.stored)


def _kept(
    equations: Sequence[Equation], again: set[int], after: set[int], flow: Flow
) -> tuple[int, ...]:
    """What stays of what the equations make and the backward pass reads, or makes the rest from."""
    made = {r for e in equations for r in e.results}
    copied, _ = needed_equations(equations, again, after)
    made_again = {r for e in copied for r in e.results}
    read = {v for v in made if v in after or flow.is_read_backward(v)}
    return tuple(sorted(read - made_again))


def _product_flops(equation: Equation, program: Program) -> float:
    return equation_flops(equation, program.avals) if equation.name == "dot_general" else 0.0


def _is_worth_it(part: Layer, layer: Layer) -> bool:
    freed = part.freed_bytes
    if freed <= _LEAST_SHARE * max(layer.freed_bytes, 1):
        return False
    return part.flops * layer.freed_bytes * _CHEAPER <= layer.flops * freed
