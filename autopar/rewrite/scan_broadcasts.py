"""Broadcasts that all trips of a scan share, moved back into it: `Equation`s → `Equation`s.

JAX moves what does not depend on the trip out of a scan, so that a causal mask, broadcast to all
rows and heads, becomes a large array that every trip reads from memory. Inside the body, XLA fuses
the broadcast into its readers. So a value that a cheap equation makes from smaller ones is made in
the body, if everything that reads it there can take it in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.rewrite.residuals import is_cheap
from autopar.rewrite.scan_remat import plain_params, scan_parts
from autopar.tracer.copy_equations import Copier, rename
from autopar.tracer.costs import aval_bytes


def broadcasts_inside(program: Program, copier: Copier, scans: Collection[int]) -> Program:
    """The program with the scans at these indices reading small values where they read broadcasts
    of these; other bodies as they are."""
    if not scans:
        return program
    makers = {e.results[0]: e for e in program.equations if is_cheap(e) and _enlarges(e, copier)}
    moved: set[int] = set()
    equations = list(program.equations)
    for index, equation in enumerate(equations):
        if index in scans and not makers.keys().isdisjoint(equation.inputs):
            equations[index] = _moved_inside(equation, makers, copier, moved)
    if not moved:
        return program
    return replace(program, equations=_without_unread(equations, moved, program.outputs))


def _enlarges(equation: Equation, copier: Copier) -> bool:
    read = sum(aval_bytes(copier.avals[v]) for v in set(equation.inputs))
    return aval_bytes(copier.avals[equation.results[0]]) > read


def _moved_inside(
    scan: Equation, makers: dict[int, Equation], copier: Copier, moved: set[int]
) -> Equation:
    (body,) = scan.bodies
    inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
    consts: list[tuple[int, Operand]] = []
    made: list[Equation] = []
    queue = list(zip(inside.consts, outside.consts, strict=True))
    entered: dict[int, int] = {}
    for value, operand in queue:  # grows: what a broadcast reads may be a broadcast
        maker = makers.get(operand) if isinstance(operand, int) else None
        is_ours = value not in inside.consts  # read by a broadcast alone
        if maker is None or not (is_ours or _fuses(body, value)):
            consts.append((value, operand))
            continue
        renamed: dict[int, int] = {}
        for read in dict.fromkeys(maker.inputs):
            if read not in entered:
                entered[read] = copier.new_value(copier.avals[read])
                queue.append((entered[read], read))
            renamed[read] = entered[read]
        made.append(
            replace(
                maker,
                operands=rename(maker.operands, renamed),
                results=(value,),
                scope=scan.scope,
                name_stack=_jax.empty_name_stack(),
            )
        )
        moved.add(maker.results[0])
    if not made:
        return scan
    new_body = replace(
        body,
        inputs=(*(i for i, _ in consts), *inside.carry, *inside.xs),
        equations=(*reversed(made), *body.equations),
    )
    return replace(
        scan,
        operands=(*(o for _, o in consts), *outside.carry, *outside.xs),
        bodies=(new_body,),
        params=plain_params(scan) | {"num_consts": len(consts)},
    )


def _fuses(body: Program, value: int) -> bool:
    """Whether all that reads the value takes it in: elementwise ops, sums, and loops of these."""
    if value in body.outputs:
        return False
    for equation in body.equations:
        if value not in equation.inputs:
            continue
        if equation.name == "scan":
            (inner,) = equation.bodies
            parts = scan_parts(equation, equation.operands)
            if value in (*parts.carry, *parts.xs):
                return False
            inputs = scan_parts(equation, inner.inputs).consts
            pairs = zip(inputs, parts.consts, strict=True)
            if not all(_fuses(inner, i) for i, o in pairs if o == value):
                return False
        elif not (is_cheap(equation) or equation.name.startswith("reduce_")):
            return False
    return True


def _without_unread(
    equations: Sequence[Equation], moved: set[int], outputs: Sequence[Operand]
) -> tuple[Equation, ...]:
    needed = set(values_in(outputs))
    kept = []
    for equation in reversed(equations):
        if not (moved.isdisjoint(equation.results) or not needed.isdisjoint(equation.results)):
            continue
        kept.append(equation)
        needed.update(equation.inputs)
    return tuple(reversed(kept))
