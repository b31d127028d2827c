"""Transposes folded into products: `Program` → `Program`.

    t = (a · b)ᵀ   →   t = b · a

JAX computes the gradient of a weight as a product and transposes it afterwards. XLA swaps the
operands instead if it sees both. But if a loop adds the product up and the transpose comes after
the loop, the sums are stored transposed, and the whole update reads them so. Hence products are
swapped before the loop is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.core import ShapedArray

from autopar.ir.program import Equation, Program


def fold_transposes(program: Program) -> Program:
    """The program with every transpose folded into a product that only it reads, if swapping the
    operands has the same effect. Loop bodies stay as they are."""
    count = program.num_reads()
    products = {
        e.results[0]: e for e in program.equations if e.name == "dot_general" and not e.has_effect
    }
    swapped: dict[int, Equation] = {}  # product's result -> the product that replaces it
    dropped: set[int] = set()
    for equation in program.equations:
        if equation.name != "transpose" or equation.marks or equation.inner_marks:
            continue
        operand = equation.operands[0]
        product = products.get(operand) if isinstance(operand, int) else None
        if product is None or count[product.results[0]] != 1:
            continue
        if tuple(equation.params["permutation"]) == _swap_of(product, program.avals):
            swapped[product.results[0]] = replace(
                product,
                params=_swapped(product.params),
                operands=product.operands[::-1],
                results=equation.results,
            )
            dropped.add(equation.results[0])
    if not swapped:
        return program
    return replace(
        program,
        equations=tuple(
            swapped.get(e.results[0], e) if e.results else e
            for e in program.equations
            if not (e.name == "transpose" and e.results[0] in dropped)
        ),
    )


def _swap_of(product: Equation, avals: Sequence[ShapedArray]) -> tuple[int, ...]:
    """The permutation that swapping the operands amounts to: batch dimensions, then those of the
    second operand, then those of the first. Empty if they must not be swapped."""
    if product.params.get("out_sharding") is not None:
        return ()
    if len(product.inputs) < 2:  # a constant operand
        return ()
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = len(avals[product.inputs[0]].shape) - len(contracted) - len(batch)
    rank = len(avals[product.results[0]].shape)
    middle = len(batch) + first
    return (*range(len(batch)), *range(middle, rank), *range(len(batch), middle))


def _swapped(params: dict[str, Any]) -> dict[str, Any]:
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    precision = params["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    numbers = ((right, left), (right_batch, left_batch))
    return {**params, "dimension_numbers": numbers, "precision": precision}
