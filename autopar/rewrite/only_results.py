"""A step as far as some of its results need it: from a `TracedStep` to a smaller one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import values_in
from autopar.ir.rows import Rows, take_rows
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import ProgramWriter
from autopar.rewrite.split_stacks import taken_rows


def only_results(
    traced: TracedStep,
    positions: Sequence[int],
    rows: Sequence[Rows | None] | None = None,
) -> TracedStep:
    """The step without what these results do not need. Effects go with the first of all results.
    `rows`: of each result, which rows; None for all."""
    rows = rows or (None,) * len(positions)
    flat_fn = traced.flat_fn
    writer = ProgramWriter(traced.program.avals)
    writer.equations += traced.program.equations
    outputs = tuple(
        traced.program.outputs[o]
        if own is None
        else writer.emit(taken_rows, [traced.program.outputs[o]], rows=own)
        for o, own in zip(positions, rows, strict=True)
    )
    program = replace(
        traced.program,
        equations=tuple(writer.equations),
        captured=(*traced.program.captured, *writer.captured),
    )
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
        out_avals=tuple(
            traced.out_avals[o] if own is None else writer.aval(out)
            for o, own, out in zip(positions, rows, outputs, strict=True)
        ),
        state=(),
        donated=(),
        flat_fn=lambda *leaves: [
            made[o] if own is None else take_rows(made[o], own)
            for made in [flat_fn(*leaves)]
            for o, own in zip(positions, rows, strict=True)
        ],
    )
