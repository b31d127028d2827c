"""Source lines and repeats of equations: from `Program` to `EquationLines`.

Equations have the numbers by which nodes of the graph know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar import _jax
from autopar.ir.program import Program
from autopar.tracer.copy_equations import MARK


@dataclass(frozen=True)
class EquationLines:
    """sources: the user's line of every equation, bodies right after the loop they belong to.
    recomputed: equations that compute a second time, in the backward pass, what the forward pass
    had; those of `jax.checkpoint` too."""

    sources: tuple[str, ...]
    recomputed: frozenset[int]


def equation_lines(program: Program) -> EquationLines:
    sources: list[str] = []
    recomputed: set[int] = set()
    known: dict[tuple[Any, ...], str] = {}

    def visit(part: Program) -> None:
        for equation in part.equations:
            if MARK in equation.scope:
                recomputed.add(len(sources))
            around = (equation.source_info, *equation.callers)
            tracebacks = tuple(source.traceback for source in around)
            if tracebacks not in known:
                known[tracebacks] = _jax.line_of_user(tracebacks)
            sources.append(known[tracebacks])
            for body in equation.bodies:
                visit(body)

    visit(program)
    return EquationLines(tuple(sources), frozenset(recomputed))
