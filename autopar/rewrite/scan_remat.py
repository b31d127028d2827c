"""Rematerialisation of a scan over layers: forward and backward scan → two that store the carry.

JAX differentiates a scan into two: the forward scan stacks residuals for the backward scan. Here
the forward scan stacks the carry that enters each trip instead, and each backward trip first
recomputes the forward body, from that carry and the slices and constants that the forward scan
read. Stacks that anything else reads stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.tracer.copy_equations import Copier, needed_equations, rename
from autopar.tracer.costs import aval_bytes
from autopar.tracer.regions import BACKWARD

T = TypeVar("T")


@dataclass(frozen=True)
class ScanPair:
    """A forward scan and the backward scan that reads its stacks.

    forward, backward: indices of the equations.
    dropped:           positions of the forward scan's results that are no longer made.
    equations:         equations of the forward body that make the slices of dropped stacks.
    stacked:           values of the forward body that are stacked instead (entering carries and
                       results of effects), without those that are stacked anyway.
    """

    forward: int
    backward: int
    dropped: tuple[int, ...]
    equations: tuple[Equation, ...]
    stacked: tuple[int, ...]
    length: int

    def stacked_bytes(self, avals: Sequence[ShapedArray]) -> int:
        return self.length * sum(aval_bytes(avals[value]) for value in self.stacked)


@dataclass(frozen=True)
class ScanParts(Generic[T]):
    """The operands of a scan, or the inputs of its body, by kind."""

    consts: tuple[T, ...]
    carry: tuple[T, ...]
    xs: tuple[T, ...]


def scan_parts(scan: Equation, values: Sequence[T]) -> ScanParts[T]:
    num_consts, num_carry = _jax.scan_sizes(scan.params)
    first_x = num_consts + num_carry
    return ScanParts(
        tuple(values[:num_consts]), tuple(values[num_consts:first_x]), tuple(values[first_x:])
    )


def find_scan_pair(program: Program, index: int, regions: Sequence[str]) -> ScanPair | None:
    """The pair whose forward scan is at this index; None if nothing could be dropped."""
    backward = backward_scan(program, index)
    if backward is None or regions[backward] != BACKWARD:
        return None
    scan = program.equations[index]
    (body,) = scan.bodies
    carries = scan_parts(scan, body.inputs).carry
    residuals = residuals_of(program, index, backward)
    return _pair(scan, index, backward, [p for p in residuals if body.outputs[p] not in carries])


def backward_scan(program: Program, index: int) -> int | None:
    """The first scan in the other direction that reads a stack of the scan at this index."""
    scan = program.equations[index]
    stacks = set(scan.results[_jax.scan_sizes(scan.params)[1] :])
    for position, equation in enumerate(program.equations):
        if _reverses(equation, scan):
            parts = scan_parts(equation, equation.operands)
            if not stacks.isdisjoint(values_in(parts.xs)):
                return position
    return None


def residuals_of(program: Program, forward: int, backward: int) -> list[int]:
    """Positions of the forward scan's stacks that nothing but trips of the backward scan reads."""
    scan, reader = program.equations[forward], program.equations[backward]
    parts = scan_parts(reader, reader.operands)
    others = set(values_in((*parts.consts, *parts.carry, *program.outputs)))
    for position, equation in enumerate(program.equations):
        if position != backward:
            others.update(equation.inputs)
    slices = set(values_in(parts.xs))
    num_carry = _jax.scan_sizes(scan.params)[1]
    return [
        p
        for p in range(num_carry, len(scan.results))
        if scan.results[p] in slices and scan.results[p] not in others
    ]


def _reverses(equation: Equation, scan: Equation) -> bool:
    return (
        equation.name == "scan"
        and equation.params["length"] == scan.params["length"]
        and bool(equation.params["reverse"]) != bool(scan.params["reverse"])
    )


def _pair(scan: Equation, forward: int, backward: int, residuals: list[int]) -> ScanPair | None:
    (body,) = scan.bodies
    num_carry = _jax.scan_sizes(scan.params)[1]
    from_effects = {r for e in body.equations if e.has_effect for r in e.results}
    dropped = [
        p
        for p in residuals
        if isinstance(body.outputs[p], int) and body.outputs[p] not in from_effects
    ]
    if not dropped:
        return None
    wanted = {o for p in dropped if isinstance(o := body.outputs[p], int)}
    equations, read = needed_equations(body.equations, wanted, set())
    read |= wanted - {r for e in equations for r in e.results}
    stays = {body.outputs[p] for p in range(num_carry, len(body.outputs)) if p not in dropped}
    carries = set(scan_parts(scan, body.inputs).carry)
    stacked = sorted(v for v in read if v in carries | from_effects and v not in stays)
    length = scan.params["length"]
    return ScanPair(forward, backward, tuple(dropped), tuple(equations), tuple(stacked), length)


class ScanRewriter:
    """Rewrites the two scans of a pair. `shielded`: the copies wait for the incoming cotangent."""

    def __init__(
        self, program: Program, pair: ScanPair, copier: Copier, *, shielded: bool = True
    ) -> None:
        self.pair = pair
        self.copier = copier
        self.is_shielded = shielded
        self.forward = program.equations[pair.forward]
        self.backward = program.equations[pair.backward]
        self.stacks: dict[int, int] = {}  # value of the forward body -> its stack outside

    def rewritten_forward(self) -> Equation:
        """The forward scan, stacking the carry instead of the dropped residuals."""
        scan, dropped = self.forward, set(self.pair.dropped)
        (body,) = scan.bodies
        kept = [p for p in range(len(scan.results)) if p not in dropped]
        num_carry = _jax.scan_sizes(scan.params)[1]
        for p in kept[num_carry:]:
            if isinstance(out := body.outputs[p], int):
                self.stacks.setdefault(out, scan.results[p])
        length = scan.params["length"]
        for value in self.pair.stacked:
            stack = _jax.stacked_aval(self.copier.avals[value], length)
            self.stacks[value] = self.copier.new_value(stack)
        outputs = (*(body.outputs[p] for p in kept), *self.pair.stacked)
        results = (*(scan.results[p] for p in kept), *(self.stacks[v] for v in self.pair.stacked))
        inside = replace(body, outputs=outputs, equations=live_equations(body.equations, outputs))
        return replace(scan, results=results, bodies=(inside,), params=plain_params(scan))

    def rewritten_backward(self, operands: Sequence[Operand]) -> Equation:
        """The backward scan with these operands; it recomputes the dropped slices."""
        scan, copier = self.backward, self.copier
        (body,) = scan.bodies
        inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, operands)
        dropped = {self.forward.results[p]: p for p in self.pair.dropped}
        slices = list(zip(inside.xs, outside.xs, strict=True))
        gone = [(i, dropped[o]) for i, o in slices if isinstance(o, int) and o in dropped]
        stays = [(i, o) for i, o in slices if not (isinstance(o, int) and o in dropped)]
        consts = list(zip(inside.consts, outside.consts, strict=True))
        renamed = self.bring_in(consts, stays)
        captured = self.captured(renamed)
        equations = self.recomputed(renamed, inside.carry, body)
        (made_in,) = self.forward.bodies
        for value, position in gone:
            source = made_in.outputs[position]
            assert isinstance(source, int)
            renamed[value] = renamed[source]
        rest = [replace(e, operands=rename(e.operands, renamed)) for e in body.equations]
        new_body = Program(
            inputs=(*(i for i, _ in consts), *inside.carry, *(i for i, _ in stays)),
            outputs=rename(body.outputs, renamed),
            equations=(*equations, *rest),
            avals=copier.avals,
            captured=(*body.captured, *captured),
        )
        params = plain_params(scan) | {"num_consts": len(consts)}
        new_operands = (*(o for _, o in consts), *outside.carry, *(o for _, o in stays))
        return replace(scan, operands=new_operands, params=params, bodies=(new_body,))

    def needed(self) -> set[int]:
        """Values of the forward body that the copied equations read but do not make."""
        (body,) = self.forward.bodies
        made = {r for e in self.pair.equations for r in e.results}
        read = {o for e in self.pair.equations for o in e.inputs}
        wanted = {o for p in self.pair.dropped if isinstance(o := body.outputs[p], int)}
        return (read | wanted) - made

    def bring_in(
        self, consts: list[tuple[int, Operand]], xs: list[tuple[int, Operand]]
    ) -> dict[int, int]:
        """Brings the values that the forward body reads into the backward body, as constants and
        slices that exist already or are added: {forward value: backward value}."""
        (body,) = self.forward.bodies
        inside = scan_parts(self.forward, body.inputs)
        outside = scan_parts(self.forward, self.forward.operands)
        needed = self.needed()
        renamed: dict[int, int] = {}
        for where, pairs in (
            (consts, zip(inside.consts, outside.consts, strict=True)),
            (xs, (*zip(inside.xs, outside.xs, strict=True), *self.stacks.items())),
        ):
            for value, operand in pairs:
                if value not in needed or value in renamed:
                    continue
                same = (i for i, o in where if isinstance(o, int) and o == operand)
                inner = next(same, None)
                if inner is None:
                    inner = self.copier.new_value(self.copier.avals[value])
                    where.append((inner, operand))
                renamed[value] = inner
        return renamed

    def captured(self, renamed: dict[int, int]) -> list[tuple[int, Any]]:
        """The captured constants that the copied equations read, under new numbers."""
        (body,) = self.forward.bodies
        needed, captured = self.needed(), []
        for value, const in body.captured:
            if value in needed:
                renamed[value] = self.copier.new_value(self.copier.avals[value])
                captured.append((renamed[value], const))
        return captured

    def recomputed(
        self, renamed: dict[int, int], carry: Sequence[int], body: Program
    ) -> list[Equation]:
        """Copies of the forward body's equations, if shielded behind a barrier with the incoming
        cotangent."""
        if not self.is_shielded or not self.pair.equations:
            return [self.copier.equation(e, renamed) for e in self.pair.equations]
        token = _token(carry, body)
        stored = [renamed[v] for v in self.stacks if v in renamed]
        behind: dict[int, int] = {}
        shielded = [*dict.fromkeys(stored), *token]
        equations = []
        if shielded:
            equations.append(self.copier.barrier(shielded, self.pair.equations[0], behind))
        for value in list(renamed):
            renamed[value] = behind.get(renamed[value], renamed[value])
        equations += [self.copier.equation(e, renamed) for e in self.pair.equations]
        renamed.update((t, behind[t]) for t in token)
        return equations


def _token(carry: Sequence[int], body: Program) -> list[int]:
    """The cotangent that the next layer hands on: the carry that is read first. (Other carries sum
    up gradients of the loop's constants and are read last.)"""
    for equation in body.equations:
        read = [c for c in carry if c in equation.operands]
        if read:
            return read[:1]
    return []


def plain_params(scan: Equation) -> dict[str, Any]:
    """The parameters of a rewritten scan, without those that describe its old body."""
    num_consts, num_carry = _jax.scan_sizes(scan.params)
    sizes = {"num_consts": num_consts, "num_carry": num_carry}
    return {name: scan.params[name] for name in ("length", "reverse", "unroll")} | sizes


def live_equations(
    equations: Sequence[Equation], outputs: Sequence[Operand]
) -> tuple[Equation, ...]:
    """The equations that the outputs need, or that have an effect."""
    needed = set(values_in(outputs))
    live = []
    for equation in reversed(equations):
        if equation.has_effect or not needed.isdisjoint(equation.results):
            live.append(equation)
            needed.update(equation.inputs)
    return tuple(reversed(live))
