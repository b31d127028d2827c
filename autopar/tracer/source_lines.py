"""Source lines and recomputed equations of a program: from `Program` to `EquationLines`.

Equations are numbered as in the nodes of the graph: bodies right after their loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar import _jax
from autopar.ir.program import Program
from autopar.tracer.copy_equations import MARK


@dataclass(frozen=True)
class EquationLines:
    """sources:    the line of the user's code for every equation.
    recomputed: equations that repeat forward work in the backward pass, by autopar or by
                `jax.checkpoint`."""

    sources: tuple[str, ...]
    recomputed: frozenset[int]


def equation_lines(program: Program) -> EquationLines:
    sources: list[str] = []
    recomputed: set[int] = set()
    lines: dict[tuple[Any, ...], str] = {}
    for index, equation in enumerate(program.all_equations()):
        if MARK in equation.scope:
            recomputed.add(index)
        source_infos = (equation.source_info, *equation.callers)
        tracebacks = tuple(source.traceback for source in source_infos)
        if tracebacks not in lines:
            lines[tracebacks] = _jax.line_of_user(tracebacks)
        sources.append(lines[tracebacks])
    return EquationLines(tuple(sources), frozenset(recomputed))
