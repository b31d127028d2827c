"""Which programs are equal: from a `Program` to a hash."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any

import numpy as np
from jax.core import ShapedArray

from autopar.ir.program import Program


def program_fingerprint(program: Program) -> str:
    """A hash of every equation with its parameters and shapes: equal programs can share a plan.
    It ignores the values of constants, so that a learning rate may change, and the numbers of
    values, so that equal stages of one program agree."""
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}

    def number(value: int) -> int:
        return numbers.setdefault(value, len(numbers))

    def visit(part: Program) -> None:
        for equation in part.equations:
            types = [_type_text(part.avals[r]) for r in equation.results]
            operands = [number(o) if isinstance(o, int) else "c" for o in equation.operands]
            params = _plain(equation.params)
            types.append(repr([number(r) for r in equation.results]))
            digest.update(repr((equation.name, params, operands, types)).encode())
            for body in equation.bodies:
                visit(body)
        outputs = [number(o) if isinstance(o, int) else "c" for o in part.outputs]
        digest.update(repr((tuple(map(number, part.inputs)), outputs)).encode())

    visit(program)
    digest.update(repr([_type_text(program.avals[v]) for v in program.inputs]).encode())
    return digest.hexdigest()


def _type_text(aval: ShapedArray) -> str:
    return f"{getattr(aval, 'dtype', '')}{list(getattr(aval, 'shape', ()))}"


def _plain(value: Any) -> Any:
    """A parameter as data that prints the same in every process; functions and the like by type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return [(name, _plain(v)) for name, v in sorted(value.items())]
    return str(value) if isinstance(value, (np.dtype, Enum)) else type(value).__name__
