"""Which programs are equal: from a `Program` to a hash."""

from __future__ import annotations

import hashlib
import weakref
from enum import Enum
from typing import Any

import numpy as np
from jax.core import ShapedArray

from autopar.ir.program import Operand, Program

# id of a program -> the program and its fingerprint, while the program lives: a plan's key and its
# binding ask for the same one.
_known: dict[int, tuple[weakref.ref[Program], str]] = {}


def program_fingerprint(program: Program) -> str:
    """A hash of every equation with its parameters and shapes: equal programs can share a plan.
    It ignores the values of constants, so that a learning rate may change, and the numbers of
    values, so that equal stages of one program agree."""
    known = _known.get(id(program))
    if known is not None and known[0]() is program:
        return known[1]
    fingerprint, number = _fingerprint(program), id(program)
    _known[number] = weakref.ref(program, lambda _: _known.pop(number, None)), fingerprint
    return fingerprint


def _fingerprint(program: Program) -> str:
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}
    types: dict[Any, str] = {}

    def number(operand: Operand) -> int | str:
        return numbers.setdefault(operand, len(numbers)) if isinstance(operand, int) else "c"

    def type_of(aval: ShapedArray) -> str:
        key = (getattr(aval, "dtype", ""), getattr(aval, "shape", ()))
        text = types.get(key)
        if text is None:
            text = types[key] = f"{key[0]}{list(key[1])}"
        return text

    def visit(part: Program) -> None:
        avals, texts = part.avals, []
        for equation in part.equations:
            operands = [number(o) for o in equation.operands]
            results = [type_of(avals[r]) for r in equation.results]
            results.append(repr([number(r) for r in equation.results]))
            texts.append(repr((equation.name, _plain(equation.params), operands, results)))
            for body in equation.bodies:
                digest.update("".join(texts).encode())
                texts.clear()
                visit(body)
        digest.update("".join(texts).encode())
        outputs = [number(o) for o in part.outputs]
        digest.update(repr((tuple(map(number, part.inputs)), outputs)).encode())

    visit(program)
    digest.update(repr([type_of(program.avals[v]) for v in program.inputs]).encode())
    return digest.hexdigest()


_PLAIN = frozenset((type(None), bool, int, float, str))


def _plain(value: Any) -> Any:
    """A parameter as data that prints the same in every process; functions and the like by type."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        return [v if type(v) in _PLAIN else _plain(v) for v in value]
    if isinstance(value, dict):
        return [(name, v if type(v) in _PLAIN else _plain(v)) for name, v in sorted(value.items())]
    if isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, (np.dtype, Enum)) else type(value).__name__
