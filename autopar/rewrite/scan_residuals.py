"""What a scan stacks for its backward scan: a program → one that stacks as few bytes as possible.

JAX's derivative of a scan stacks every value that the backward trip reads, elementwise ones too.
In layers that are written out, XLA computes those again where they are read; in a scan each is
written into a stack and read from it. Here a backward trip recomputes what is cheap, from what has
to be kept: results of products, the carry, and the slices and constants that the forward scan
reads. What is stacked is the minimum vertex cut of `rewrite.residuals`. No barrier is needed:
forward and backward trips are bodies of different loops, which XLA never merges.

In a scan of scans, the stacks of inner scans pass through the outer ones (`rewrite.linked_bodies`).

Left alone: stacks that anything else reads; values that a policy of `jax.checkpoint` saves, or that
have a name for one; pairs of scans in which nothing would be saved.
"""

from __future__ import annotations

from dataclasses import replace

from autopar import _jax
from autopar.ir.program import Equation, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.linked_bodies import LinkedBodies
from autopar.rewrite.residuals import choose_residuals, repeat_cost
from autopar.rewrite.scan_broadcasts import broadcasts_inside
from autopar.rewrite.scan_remat import (
    ScanPair,
    ScanRewriter,
    backward_scan,
    residuals_of,
    scan_parts,
)
from autopar.tracer.copy_equations import Copier, with_avals
from autopar.tracer.costs import aval_bytes

# Bytes moved for a byte that is stacked: the stack is filled with zeros, then a slice is copied
# into it. (The slice is read in place, as any value would be.)
_STACK_COST = 3


def thin_scans(step: TracedStep) -> TracedStep:
    """The step with scans that stack less; the step itself if there are none."""
    program = thinned(step.program)
    return step if program is step.program else step.with_program(program, is_thinned=True)


def thinned(program: Program) -> Program:
    """The program with scans that stack less, at any depth. Values keep their numbers, new ones
    come after them."""
    copier = Copier(list(program.avals))
    new = _thinned(program, copier)
    if new is program:
        return program
    equations = tuple(with_avals(e, copier.avals) for e in new.equations)
    return replace(new, equations=equations, avals=copier.avals)


def _thinned(program: Program, copier: Copier) -> Program:
    program, given = broadcasts_inside(program, copier, _paired(program)), program
    equations = [_inside(e, copier) for e in program.equations]
    changed = program is not given or any(
        new is not old for new, old in zip(equations, program.equations, strict=True)
    )
    thin = _thinned_pairs(replace(program, equations=tuple(equations)), copier)
    changed = changed or thin is not None
    return replace(program, equations=thin or tuple(equations)) if changed else given


def _thinned_pairs(program: Program, copier: Copier) -> tuple[Equation, ...] | None:
    """The equations, one for one, with pairs of scans that stack less; None if nothing changes.
    Inner pairs come first: what they no longer stack, the outer ones need not stack either."""
    now = program
    for index, equation in enumerate(program.equations):
        backward = backward_scan(now, index) if equation.name == "scan" else None
        if backward is None:
            continue
        pair = _with_thinner_bodies(now, index, backward, copier)
        if pair is not None:
            now = _exchanged(now, {index: pair[0], backward: pair[1]})
        thinner = _thinner_pair(now, index, copier)
        if thinner is not None:
            rewriter = ScanRewriter(now, thinner, copier, shielded=False)
            operands = now.equations[thinner.backward].operands
            made = {thinner.forward: rewriter.rewritten_forward()}
            now = _exchanged(now, made | {thinner.backward: rewriter.rewritten_backward(operands)})
    return None if now is program else now.equations


def _exchanged(program: Program, new: dict[int, Equation]) -> Program:
    return replace(program, equations=tuple(new.get(i, e) for i, e in enumerate(program.equations)))


def _with_thinner_bodies(
    program: Program, index: int, backward: int, copier: Copier
) -> tuple[Equation, Equation] | None:
    """The scans with inner pairs that stack less, the forward scan of each in one body and the
    backward scan in the other; None if there are none."""
    bodies = [body for i in (index, backward) for body in program.equations[i].bodies]
    if not all(any(e.name == "scan" for e in body.equations) for body in bodies):
        return None
    free, _ = _held(program, index, backward, copier)
    linked = LinkedBodies(program, index, backward, free, copier)
    thin = _thinned_pairs(linked.program, copier)
    return None if thin is None else linked.parted(thin)


def _paired(program: Program) -> set[int]:
    """Indices of the scans that are a pair, forward and backward."""
    pairs: set[int] = set()
    for index, equation in enumerate(program.equations):
        backward = backward_scan(program, index) if equation.name == "scan" else None
        if backward is not None and residuals_of(program, index, backward):
            pairs |= {index, backward}
    return pairs


def _inside(equation: Equation, copier: Copier) -> Equation:
    if not equation.bodies:
        return equation
    bodies = tuple(_thinned(body, copier) for body in equation.bodies)
    if all(new is old for new, old in zip(bodies, equation.bodies, strict=True)):
        return equation
    return replace(equation, bodies=bodies)


def _thinner_pair(program: Program, index: int, copier: Copier) -> ScanPair | None:
    """The scan at this index with its backward scan, and what they stack; None if they stay."""
    backward = backward_scan(program, index)
    if backward is None:
        return None
    scan = program.equations[index]
    (body,) = scan.bodies
    outputs = body.outputs
    num_carry = _jax.scan_sizes(scan.params)[1]
    residuals = {
        p: o for p in residuals_of(program, index, backward) if isinstance(o := outputs[p], int)
    }
    stays = {outputs[p] for p in range(num_carry, len(outputs)) if p not in residuals}
    free, waiting = _held(program, index, backward, copier)
    chosen = choose_residuals(
        body.equations,
        set(residuals.values()),
        {*free, *values_in(stays)},
        copier.avals,
        store_cost=lambda v: waiting.get(v, _STACK_COST * aval_bytes(copier.avals[v])),
        repeat_cost=lambda e: repeat_cost(e, copier.avals),
    )
    stacked = [v for v in chosen.stored if v not in waiting]
    dropped: list[int] = []
    known: set[int] = set()
    for position, value in residuals.items():
        if value in stacked and value not in known:
            known.add(value)
        else:
            dropped.append(position)
    added = [v for v in stacked if v not in known]
    saved = sum(aval_bytes(copier.avals[residuals[p]]) for p in dropped)
    if saved <= sum(aval_bytes(copier.avals[v]) for v in added):
        return None
    equations = tuple(body.equations[i] for i in chosen.recomputed)
    return ScanPair(index, backward, tuple(dropped), equations, tuple(added), scan.params["length"])


def _held(
    program: Program, index: int, backward: int, copier: Copier
) -> tuple[set[int], dict[int, int]]:
    """Inputs of the forward body other than the carry: those whose operands are in memory until
    the backward scan in any case, and for the others the bytes per trip that would stay there."""
    scan = program.equations[index]
    (body,) = scan.bodies
    inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
    later = {*program.inputs, *(v for v, _ in program.captured), *program.output_values}
    for equation in program.equations[backward:]:
        later.update(equation.inputs)
    free = {value for value, _ in body.captured}
    waiting: dict[int, int] = {}
    for values, operands, trips in (
        (inside.xs, outside.xs, 1),
        (inside.consts, outside.consts, scan.params["length"]),
    ):
        for value, operand in zip(values, operands, strict=True):
            if not isinstance(operand, int) or operand in later:
                free.add(value)
            else:
                waiting[value] = aval_bytes(copier.avals[value]) // trips
    return free, waiting
