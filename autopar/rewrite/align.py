"""Aligns two traces of one step: the `Program`s of the batch and of a micro-batch → one program.

Both traces number their values equally if, and only if, the function does the same at both batch
sizes. A program that was derived (`rewrite.micro_batch_trace`) shares equations with the whole
batch's and is aligned already. The aligned program has the shapes and parameters of the micro-batch
and the floating-point constants of the whole batch: a mean over B rows stays a division by B, so
that means of micro-batches add up to the mean of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from autopar.errors import TraceError
from autopar.ir.program import Constant, Equation, Operand, Program


def align(full: Program, micro: Program, name: str) -> Program:
    """The micro-batch's program with the floating-point constants of the full one."""
    for whole, part in zip(full.equations, micro.equations, strict=False):
        if whole is part:
            continue
        ranks = [(_rank(full.avals[r]), _rank(micro.avals[r])) for r in part.results]
        if not _same_structure(whole, part) or any(a != b for a, b in ranks):
            raise _depends_on_batch_size(whole, name)
    if len(full.equations) != len(micro.equations):
        longer = max(full.equations, micro.equations, key=len)
        shorter = min(len(full.equations), len(micro.equations))
        raise _depends_on_batch_size(longer[shorter], name)
    if full.inputs != micro.inputs or not _same_operands(full.outputs, micro.outputs):
        raise TraceError(
            f"{name}: what it returns depends on the batch size, so it cannot be run on "
            "micro-batches. Use num_micro_batches=1, or return the same arrays at every size."
        )
    captured = tuple(
        (value, _float_of(array, whole))
        for (value, array), (_, whole) in zip(micro.captured, full.captured, strict=True)
    )
    equations = tuple(
        _aligned(whole, part, name)
        for whole, part in zip(full.equations, micro.equations, strict=True)
    )
    return replace(micro, equations=equations, captured=captured)


def _same_structure(whole: Equation, part: Equation) -> bool:
    return (
        whole.name == part.name
        and whole.results == part.results
        and _same_operands(whole.operands, part.operands)
        and whole.params.keys() == part.params.keys()
        and len(whole.bodies) == len(part.bodies)
    )


def _rank(aval: ShapedArray) -> int:
    return len(getattr(aval, "shape", ()))


def _depends_on_batch_size(equation: Equation, name: str) -> TraceError:
    return TraceError(
        f"{name}: at {equation.source_line} the program depends on the batch size: traced with the "
        "whole batch and with one micro-batch it has different operations from there on. Write the "
        "step so that it does the same at every batch size, or use fewer micro-batches (a "
        "micro-batch of one row is often the cause), or num_micro_batches=1."
    )


def _same_operands(first: tuple[Operand, ...], second: tuple[Operand, ...]) -> bool:
    if len(first) != len(second):
        return False
    return all(
        a == b if isinstance(a, int) or isinstance(b, int) else True
        for a, b in zip(first, second, strict=True)
    )


def _aligned(whole: Equation, part: Equation, name: str) -> Equation:
    if whole is part:
        return part
    floats = {key: whole.params[key] for key, v in part.params.items() if isinstance(v, float)}
    if not floats and not part.bodies and not any(map(_is_float_constant, part.operands)):
        return part
    operands = tuple(
        w if _is_float_constant(p) else p
        for w, p in zip(whole.operands, part.operands, strict=True)
    )
    bodies = tuple(align(w, p, name) for w, p in zip(whole.bodies, part.bodies, strict=True))
    return part.of_values(operands, bodies=bodies, params={**part.params, **floats})


def _is_float_constant(operand: Operand) -> bool:
    return isinstance(operand, Constant) and _is_float(operand.aval.dtype)


@lru_cache(maxsize=256)
def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _float_of(part: Any, whole: Any) -> Any:
    """The whole batch's constant if it is floating point and has the same shape."""
    is_float = _is_float(jnp.result_type(part))
    return whole if is_float and np.shape(part) == np.shape(whole) else part
