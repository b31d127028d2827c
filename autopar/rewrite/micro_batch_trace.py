"""A micro-batch's step without a trace: the whole batch's `TracedStep` → that of one micro-batch.

An equation restricted to some rows of the batch computes those rows of its results, if it treats
rows alike. So the micro-batch's program is the whole batch's with smaller shapes. Which dimensions
shrink follows from *ties*: an addition ties each dimension of its operands to that of its result, a
product those it contracts, a reshape the outermost ones of its groups. Tied dimensions hold rows
together or not at all; a union-find collects them, and the classes of the batch's first dimensions
hold rows. A dimension along which places matter (of an `iota`, a slice, a concatenation, an unknown
op) is *fixed*, as are those of other inputs and captured arrays. If a fixed dimension would hold
rows, or a value would in two dimensions, there is no such program, and the step must be traced.

Constants stay those of the whole batch, which is what the step computes on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.row_ties import SIZES, RowTies
from autopar.rewrite.scan_remat import scan_parts
from autopar.tracer.copy_equations import needed_equations


def derive_micro_batch(
    whole: TracedStep, leaves: Sequence[jax.ShapeDtypeStruct], numbered: bool = False
) -> TracedStep | None:
    """The step as a trace with these leaves would give it; None if that cannot be derived.
    `numbered`: also where rows are known by their number, as in `x[jnp.arange(B), labels]`; what
    an equation does with the numbers of a micro-batch is then to be looked at."""
    rows = {whole.avals[i].shape[0] for i in whole.batch if whole.avals[i].shape}
    parts = {leaves[i].shape[0] for i in whole.batch if leaves[i].shape}
    if len(rows) != 1 or len(parts) != 1:
        return None
    num = rows.pop() // parts.pop()
    dims = _row_dims(whole, num, numbered)
    if dims is None:
        return None
    program = _shrunk(whole.program, dims, num)
    avals = tuple(program.avals[v] for v in program.inputs)
    out_avals = tuple(program.avals[o] if isinstance(o, int) else o.aval for o in program.outputs)
    call = replace(whole.call, leaves=tuple(leaves))
    return replace(whole, program=program, avals=avals, out_avals=out_avals, call=call)


def _row_dims(whole: TracedStep, num: int, numbered: bool) -> dict[int, int] | None:
    """Value -> the dimension that holds rows; None if `num` parts of them are no program."""
    program, avals = whole.program, whole.program.avals
    ties = RowTies(avals)
    for index, value in enumerate(program.inputs):
        is_batch = index in whole.batch and bool(avals[value].shape)
        ties.fix(value, range(1, ties.rank(value)) if is_batch else range(ties.rank(value)))
    ties.add_body(program)
    batch = [program.inputs[i] for i in whole.batch if whole.avals[i].shape]
    dims = ties.rows([(value, 0) for value in batch], numbered)
    if dims is None or any(avals[v].shape[d] % num for v, d in dims.items()):
        return None
    needed, _ = needed_equations(program.equations, set(program.output_values), set(program.inputs))
    if not any(result in dims for equation in needed for result in equation.results):
        return None  # no result depends on the batch, so nothing tells what rows are
    return {**dims, **_unread_rows(program, avals[batch[0]].shape[0])}


def _unread_rows(program: Program, size: int) -> dict[int, int]:
    """Broadcasts that derivatives leave behind: nobody reads them, so nothing says whether they
    hold rows. They do if they have as many, so that they are no arrays of the whole batch."""
    equations = list(program.all_equations())
    bodies = [body for equation in equations for body in equation.bodies]
    read = {value for part in (program, *bodies) for value in part.output_values}
    handed: list[tuple[Operand, int]] = []  # to a scan, as a constant of its body
    for equation in reversed(equations):  # bodies before their loops
        operands = equation.operands
        if equation.name == "scan":
            outside = scan_parts(equation, operands)
            inside = scan_parts(equation, equation.bodies[0].inputs).consts
            handed.extend(zip(outside.consts, inside, strict=True))
            kept = [o for o, v in zip(outside.consts, inside, strict=True) if v in read]
            operands = (*kept, *outside.carry, *outside.xs)
        read.update(values_in(operands))
    broadcasts = [e for e in equations if e.name == "broadcast_in_dim"]
    along_rows = [e for e in broadcasts if 0 not in e.params["broadcast_dimensions"]]
    unread = {value for equation in along_rows for value in equation.results} - read
    for operand, value in reversed(handed):
        if isinstance(operand, int) and operand in unread:
            unread.add(value)
    return {value: 0 for value in unread if program.avals[value].shape[:1] == (size,)}


def _shrunk(program: Program, dims: dict[int, int], num: int) -> Program:
    """The program on one of `num` equal parts of the rows."""
    avals = list(program.avals)
    types: dict[tuple[ShapedArray, int], ShapedArray] = {}
    for value, dim in dims.items():
        key = avals[value], dim
        if key not in types:
            types[key] = _jax.resized_aval(key[0], _with_size(key[0].shape, dim, num))
        avals[value] = types[key]
    return _with_avals(program, avals, dims, num)


def _with_avals(
    program: Program, avals: list[ShapedArray], dims: dict[int, int], num: int
) -> Program:
    equations = []
    for equation in program.equations:
        bodies = tuple(_with_avals(body, avals, dims, num) for body in equation.bodies)
        resized = _resized(equation, dims, num)
        equations.append(resized.of_values(resized.operands, bodies=bodies) if bodies else resized)
    return Program(program.inputs, program.outputs, tuple(equations), avals, program.captured)


def _resized(equation: Equation, dims: dict[int, int], num: int) -> Equation:
    """The equation with parameters for smaller shapes."""
    sizes = SIZES.get(equation.name)
    if sizes is None:
        return equation
    name, of_operand = sizes
    value = equation.operands[0] if of_operand else equation.results[0]
    dim = dims.get(value) if isinstance(value, int) else None
    given = equation.params[name]
    if dim is None or (of_operand and given[dim] == 1):  # rows are selected one by one
        return equation
    if equation.name in ("random_bits", "random_split") and equation.inputs[0] in dims:
        return equation  # rows are those of the keys
    params = {**equation.params, name: _with_size(given, dim, num)}
    return equation.of_values(equation.operands, params=params)


def _with_size(shape: Sequence[int], dim: int, num: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
