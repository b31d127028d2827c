"""Integers of a program that are known before it runs: equations → numpy arrays.

A scan's counter is one: a carry to which each trip adds a constant, or a slice of `jnp.arange`. In
a scan's body a known scalar has a value per trip, in the order of the rows that the scan slices.
`KnownElements` are those of any array, such as the first column of the indices in
`x[jnp.arange(B), labels]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.rewrite.scan_remat import scan_parts

Known = dict[int, np.ndarray]  # value -> itself, or the scalars of all trips

_MOST = 4096  # elements: numbers of layers are small
_LARGEST = 2**24  # elements of indices
_DEEPEST = 100  # operations that make an index
_MOVES = (
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "concatenate",
)  # fmt: skip

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
    "copy_p": lambda x: x,
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


class KnownElements:
    """The integers of a program, its bodies included, as masked arrays: what is not known before
    the step runs is masked."""

    def __init__(self, program: Program) -> None:
        self.avals = program.avals
        self.maker: dict[int, Equation] = {}
        self._same: dict[int, Operand] = {}  # an input of a body -> the operand that it is
        self._found: dict[int, np.ma.MaskedArray | None] = {}
        self._captured: dict[int, Any] = {}
        self._depth = 0
        self._enter(program)

    def _enter(self, program: Program) -> None:
        self._captured.update(program.captured)
        for equation in program.equations:
            self.maker.update((result, equation) for result in equation.results)
            for body in equation.bodies:
                self._same.update(constants_of_body(equation, body))
                self._enter(body)

    def read(self, operand: Operand) -> np.ma.MaskedArray | None:
        """None if no element is known."""
        if isinstance(operand, Constant):
            array = read_integer(operand, {})
            return None if array is None else np.ma.MaskedArray(array)
        if operand in self._same:
            return self.read(self._same[operand])
        if operand not in self._found:
            self._found[operand] = None
            if self._depth < _DEEPEST:
                self._depth += 1
                self._found[operand] = self._made(operand)
                self._depth -= 1
        return self._found[operand]

    def _made(self, value: int) -> np.ma.MaskedArray | None:
        equation = self.maker.get(value)
        dtype = getattr(self.avals[value], "dtype", None)
        is_number = isinstance(dtype, np.dtype) and dtype.kind in "biu"
        if not is_number or self.avals[value].size > _LARGEST:
            return None
        if value in self._captured:
            return np.ma.MaskedArray(np.asarray(self._captured[value]))
        if equation is None or equation.bodies:
            return None
        params = equation.params
        if equation.name == "iota":
            places = np.arange(params["shape"][params["dimension"]], dtype=dtype)
            dim = params["dimension"]
            return _spread(np.ma.MaskedArray(places), (dim,), params["shape"])
        if equation.name not in _MOVES and _function_of(equation) is None:
            return None
        operands = [self.read(o) for o in equation.operands]
        if equation.name == "concatenate":
            return _joined(operands, [self.avals[v] for v in equation.inputs], params["dimension"])
        known = [operand for operand in operands if operand is not None]
        if not known or len(known) < len(operands) or params.get("dimensions") is not None:
            return None
        if equation.name in _MOVES:
            shape = self.avals[value].shape
            if equation.name == "broadcast_in_dim":
                return _spread(known[0], params["broadcast_dimensions"], shape)
            return _in_order(known[0], params).reshape(shape)
        if any(np.ma.is_masked(operand) for operand in known):
            return None
        function = _function_of(equation)
        assert function is not None
        with np.errstate(all="ignore"):
            return np.ma.MaskedArray(function(*map(np.asarray, known)))


def _in_order(array: np.ma.MaskedArray, params: dict[str, Any]) -> np.ma.MaskedArray:
    return array.transpose(params["permutation"]) if "permutation" in params else array


def _joined(
    arrays: Sequence[np.ma.MaskedArray | None], avals: Sequence[ShapedArray], dim: int
) -> np.ma.MaskedArray | None:
    if len(arrays) != len(avals) or all(array is None for array in arrays):
        return None
    parts = [
        np.ma.masked_all(aval.shape, aval.dtype) if array is None else array
        for array, aval in zip(arrays, avals, strict=True)
    ]
    return np.ma.concatenate(parts, dim)


def constants_of_body(equation: Equation, body: Program) -> list[tuple[int, Operand]]:
    """(input of a loop's body, operand) where every trip has all of the operand."""
    operands = equation.operands
    if equation.name == "cond":
        return list(zip(body.inputs, operands[1:], strict=True))
    if equation.name == "scan":
        num_consts, _ = _jax.scan_sizes(equation.params)
        return list(zip(body.inputs[:num_consts], operands, strict=False))
    num_cond, num_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    is_condition = body is equation.bodies[0]
    consts = operands[:num_cond] if is_condition else operands[num_cond : num_cond + num_body]
    return list(zip(body.inputs, consts, strict=False))


def _spread(
    array: np.ma.MaskedArray, dims: tuple[int, ...], shape: tuple[int, ...]
) -> np.ma.MaskedArray:
    placed = [1] * len(shape)
    for dim, size in zip(dims, array.shape, strict=True):
        placed[dim] = size
    data = np.broadcast_to(array.data.reshape(placed), shape)
    mask = np.broadcast_to(np.ma.getmaskarray(array).reshape(placed), shape)
    return np.ma.MaskedArray(data, mask)
