"""A step as far as some of its results need it: from a `TracedStep` to a smaller one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import values_in
from autopar.ir.traced_step import TracedStep


def only_results(traced: TracedStep, positions: Sequence[int]) -> TracedStep:
    """The step without what these results do not need. Effects go with the first of all results."""
    program, flat_fn = traced.program, traced.flat_fn
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
        flat_fn=lambda *leaves: [flat_fn(*leaves)[o] for o in positions],
    )
