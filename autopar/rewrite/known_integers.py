"""Integers of a program that are known before it runs: equations → numpy arrays.

A scan's counter is one: a carry to which each trip adds a constant, or a slice of `jnp.arange`. In
a scan's body a known scalar has a value per trip, in the order of the rows that the scan slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.rewrite.scan_remat import scan_parts

Known = dict[int, np.ndarray]  # value -> itself, or the scalars of all trips

_MOST = 4096  # elements: numbers of layers are small

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
}


def read_integer(operand: Operand, known: Known) -> np.ndarray | None:
    if not isinstance(operand, Constant):
        return known.get(operand)
    return as_integers(operand.value) if np.shape(operand.value) == () else None


def as_integers(array: Any) -> np.ndarray | None:
    """The array, if it is one of integers. NumPy does not know JAX's own types, such as those of
    random keys."""
    dtype = getattr(array, "dtype", type(array))
    is_integer = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
    return np.asarray(array) if is_integer else None


def note_integers(equation: Equation, known: Known) -> None:
    """Add the equation's result to what is known, if it is an integer made from such."""
    if equation.name == "iota":
        shape = equation.params["shape"]
        if (
            len(shape) == 1
            and shape[0] <= _MOST
            and np.dtype(equation.params["dtype"]).kind in "iu"
        ):
            known[equation.results[0]] = np.arange(shape[0], dtype=equation.params["dtype"])
        return
    function = _function_of(equation)
    if function is None:
        return
    operands = [read_integer(o, known) for o in equation.operands]
    if all(o is not None for o in operands):
        known[equation.results[0]] = np.asarray(function(*operands))


def _function_of(equation: Equation) -> Callable[..., Any] | None:
    if equation.name == "convert_element_type":
        dtype = np.dtype(equation.params["new_dtype"])
        return (lambda x: x.astype(dtype)) if dtype.kind in "biu" else None
    if equation.name == "select_n" and len(equation.operands) == 3:
        return lambda which, no, yes: np.where(which, yes, no)
    return _ELEMENTWISE.get(equation.name)


def known_in_body(scan: Equation, known: Known) -> Known:
    """The integer scalars of the body, with a value per trip, by row."""
    (body,) = scan.bodies
    length = scan.params["length"]
    inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
    found: Known = {}
    for value, operand in zip(inside.xs, outside.xs, strict=True):
        rows = read_integer(operand, known)
        if rows is not None and rows.shape == (length,):
            found[value] = rows
    for value, operand in zip(inside.consts, outside.consts, strict=True):
        number = read_integer(operand, known)
        if number is not None and number.shape == ():
            found[value] = np.broadcast_to(number, (length,))
    trips = np.arange(length)[::-1] if scan.params["reverse"] else np.arange(length)
    for value, output, operand in zip(inside.carry, body.outputs, outside.carry, strict=False):
        step, start = _step(body, value, output), read_integer(operand, known)
        if step is not None and start is not None and start.shape == ():
            found[value] = start + step * trips
    for equation in body.equations:
        note_integers(equation, found)
    return found


def _step(body: Program, carry: int, output: Operand) -> int | None:
    """What each trip adds to a carry; None if that is not known."""
    if output == carry:
        return 0
    maker = next((e for e in body.equations if output in e.results), None)
    if maker is None or maker.name != "add" or carry not in maker.operands:
        return None
    (other,) = [o for o in maker.operands if o != carry] or [carry]
    number = read_integer(other, {})
    return None if number is None else int(number)
