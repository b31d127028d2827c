"""A step as far as some of its results need it: from a `TracedStep` to a smaller one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.program import values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import ProgramWriter
from autopar.rewrite.split_stacks import taken_rows


def only_results(
    traced: TracedStep,
    positions: Sequence[int],
    rows: Sequence[tuple[int, int] | None] | None = None,
) -> TracedStep:
    """The step without what these results do not need. Effects go with the first of all results.
    `rows`: of each result, which rows (first, end); None for all."""
    rows = rows or (None,) * len(positions)
    traced, flat_fn = _with_rows(traced, dict(zip(positions, rows, strict=True))), traced.flat_fn
    program = traced.program
    outputs = tuple(program.outputs[o] for o in positions)
    needed = set(values_in(outputs))
    kept = []
    for equation in reversed(program.equations):
        if (equation.has_effect and 0 in positions) or not needed.isdisjoint(equation.results):
            kept.append(equation)
            needed.update(equation.inputs)
    captured = tuple((v, array) for v, array in program.captured if v in needed)
    return replace(
        traced,
        program=replace(program, outputs=outputs, equations=tuple(kept[::-1]), captured=captured),
        out_paths=tuple(traced.out_paths[o] for o in positions),
        out_avals=tuple(traced.out_avals[o] for o in positions),
        state=(),
        donated=(),
        flat_fn=lambda *leaves: [
            made[o] if own is None else made[o][slice(*own)]
            for made in [flat_fn(*leaves)]
            for o, own in zip(positions, rows, strict=True)
        ],
    )


def _with_rows(traced: TracedStep, rows: Mapping[int, tuple[int, int] | None]) -> TracedStep:
    """The step with rows in place of some results, by position."""
    if not any(rows.values()):
        return traced
    program = traced.program
    writer = ProgramWriter(program.avals)
    writer.equations += program.equations
    outputs, avals = list(program.outputs), list(traced.out_avals)
    for position, own in rows.items():
        if own is not None:
            taken = writer.emit(taken_rows, [outputs[position]], start=own[0], stop=own[1])
            outputs[position], avals[position] = taken, writer.aval(taken)
    program = replace(
        program,
        outputs=tuple(outputs),
        equations=tuple(writer.equations),
        captured=(*program.captured, *writer.captured),
    )
    return replace(traced, program=program, out_avals=tuple(avals))
