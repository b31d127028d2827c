"""Products that come out as they are wanted: a `Program` without transposes of products.

    t = a · b, transposed   →   t = b · a

The gradient of a weight is a product that JAX transposes afterwards. XLA swaps the operands
instead where it sees both; but where the product is added up in a loop and transposed behind it,
the sums lie the wrong way round, and the whole update reads them so. The product is swapped before
the loop is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.program import Equation, Program


def with_turned_products(program: Program) -> Program:
    """The same program, where a transpose that is the only reader of a product and does no more
    than swap its operands' dimensions is part of it. Bodies of loops stay as they are."""
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


def _swap_of(product: Equation, avals: Any) -> tuple[int, ...]:
    """Where each dimension of the swapped product is in the product: batch dimensions first, then
    what were the second operand's own, then the first's. Empty if it must not be swapped."""
    if product.params.get("out_sharding") is not None:
        return ()
    if not all(isinstance(o, int) for o in product.operands):
        return ()
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = len(avals[product.operands[0]].shape) - len(contracted) - len(batch)
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
