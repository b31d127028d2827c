"""Scans without what nobody reads: a `Program` → the same, with fewer operands and results.

Once rows are slices (`rewrite.rows_by_index`), a loop's counter and the indices that it stacks for
its derivative are read by nothing. A row that a scan stacks as it was sliced is the array itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar import _jax
from autopar.ir.program import Equation, Program, values_in
from autopar.rewrite.scan_remat import plain_params, scan_parts
from autopar.tracer.copy_equations import rename


def pruned(program: Program) -> Program:
    """The program, and the bodies of its loops, without equations that nothing needs."""
    program = _without_copies(program)
    needed = set(values_in(program.outputs))
    equations: list[Equation] = []
    for equation in reversed(program.equations):
        stays = equation.has_effect or equation.marks or equation.inner_marks
        if not stays and needed.isdisjoint(equation.results):
            continue
        if equation.name == "scan" and not equation.has_effect:
            equation = _pruned_scan(equation, needed)
        equations.append(equation)
        needed.update(equation.inputs)
    return replace(program, equations=tuple(reversed(equations)))


def _without_copies(program: Program) -> Program:
    """Readers of a stack of slices read the array that was sliced."""
    renamed: dict[int, int] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        equation = replace(equation, operands=rename(equation.operands, renamed))
        equations.append(equation)
        if equation.name != "scan":
            continue
        (body,) = equation.bodies
        inside, outside = scan_parts(equation, body.inputs), scan_parts(equation, equation.operands)
        array_of = dict(zip(inside.xs, outside.xs, strict=True))
        num_carry = _jax.scan_sizes(equation.params)[1]
        pairs = zip(body.outputs[num_carry:], equation.results[num_carry:], strict=True)
        for output, result in pairs:
            array = array_of.get(output) if isinstance(output, int) else None
            if isinstance(array, int):
                renamed[result] = array
    outputs = rename(program.outputs, renamed)
    return replace(program, equations=tuple(equations), outputs=outputs)


def _pruned_scan(scan: Equation, needed: Collection[int]) -> Equation:
    (body,) = scan.bodies
    inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
    num_carry = len(inside.carry)
    kept = {n for n, result in enumerate(scan.results) if result in needed}
    while True:
        outputs = tuple(body.outputs[n] for n in sorted(kept))
        inner = pruned(replace(body, outputs=outputs))
        read = {*values_in(inner.outputs), *(v for e in inner.equations for v in e.inputs)}
        more = {n for n in range(num_carry) if inside.carry[n] in read} - kept
        if not more:
            break
        kept |= more
    carries = [n for n in range(num_carry) if n in kept]
    consts = [n for n, value in enumerate(inside.consts) if value in read]
    xs = [n for n, value in enumerate(inside.xs) if value in read]
    return replace(
        scan,
        operands=(
            *(outside.consts[n] for n in consts),
            *(outside.carry[n] for n in carries),
            *(outside.xs[n] for n in xs),
        ),
        results=tuple(scan.results[n] for n in sorted(kept)),
        params=plain_params(scan) | {"num_consts": len(consts), "num_carry": len(carries)},
        bodies=(
            replace(
                inner,
                inputs=(
                    *(inside.consts[n] for n in consts),
                    *(inside.carry[n] for n in carries),
                    *(inside.xs[n] for n in xs),
                ),
            ),
        ),
    )
