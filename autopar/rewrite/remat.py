"""Rematerialisation: from a program to one that computes layers again in its backward pass.

For each layer, the forward equations behind what its backward equations read are copied, in front
of the first of these, and the backward pass reads the copies. Nothing else of the layer then has
to stay in memory but its inputs. As with `jax.checkpoint`, one optimization barrier takes the
layer's inputs together with a cotangent that exists only then, so that XLA can neither merge the
copies with the originals nor compute them early.

What passes the barrier: the activations that the layer reads, and whatever a copied equation reads
that reads nothing else behind the barrier (the key of random bits). Parameters do not, where an
activation is read along with them: their product cannot be merged with the original, and a second
name for a parameter would only get in the way of its sharding. What is made of parameters alone is
not copied at all, and neither is what has an effect. What is made of constants alone is copied
without a barrier: should XLA merge it, it is no activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.layers import Layer
from autopar.rewrite.scan_remat import ScanRewriter, find_scan_pair
from autopar.tracer.copy_equations import Copier, needed_equations, rename
from autopar.tracer.regions import BACKWARD, FORWARD, equation_regions


def with_remat(traced: TracedStep, layers: Sequence[Layer]) -> TracedStep:
    """The step whose program computes these layers again in its backward pass."""
    if not layers:
        return traced
    program = rematerialise(traced.program, layers)
    return replace(traced, program=program, remat=tuple(layer.name for layer in layers))


def rematerialise(program: Program, layers: Sequence[Layer]) -> Program:
    """The program with these layers computed again in the backward pass. Values keep their
    numbers; what is added is numbered after them. It depends on nothing but the program's
    equations and the layers', so that equal programs with other shapes are changed alike."""
    return _Rematerialiser(program).run(layers)


class _Rematerialiser:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.copier = Copier(list(program.avals))
        self.regions = equation_regions(program)
        self.outputs = set(program.output_values)
        self.readers = program.readers()
        self.maker = program.producers()

    def run(self, layers: Sequence[Layer]) -> Program:
        again: dict[int, list[tuple[Layer, set[int], set[int]]]] = {}
        scans: dict[int, ScanRewriter] = {}
        changed: set[int] = set()  # equations that may no longer be needed
        for layer in layers:
            if layer.scan is not None:
                pair = find_scan_pair(self.program, layer.scan, self.regions)
                if pair is not None:
                    rewriter = ScanRewriter(self.program, pair, self.copier)
                    scans[pair.forward] = scans[pair.backward] = rewriter
                continue
            residuals, kept = self.residuals(layer)
            if residuals:
                first = min(r for v in residuals for r in self.backward_readers(v))
                again.setdefault(first, []).append((layer, residuals, kept))
                changed.update(layer.equations)
        equations: list[tuple[Equation, bool]] = []
        renamed: dict[int, int] = {}  # what backward equations read instead
        for index, equation in enumerate(self.program.equations):
            for layer, residuals, kept in again.get(index, ()):
                made = self.recomputed(layer, residuals, kept, index, renamed)
                equations += [(copy, False) for copy in made]
            if self.regions[index] != FORWARD:
                operands = rename(equation.operands, renamed)
                equation = replace(equation, operands=operands)
            if index in scans:
                rewriter = scans[index]
                is_forward = index == rewriter.pair.forward
                equation = (
                    rewriter.rewritten_forward()
                    if is_forward
                    else rewriter.rewritten_backward(equation.operands)
                )
            equations.append((equation, index in changed))
        avals = self.copier.avals
        live = self.without_dead(equations)
        return replace(
            self.program,
            equations=tuple(_with_avals(equation, avals) for equation in live),
            avals=avals,
        )

    def backward_readers(self, value: int) -> list[int]:
        return [r for r in self.readers.get(value, ()) if self.regions[r] == BACKWARD]

    def residuals(self, layer: Layer) -> tuple[set[int], set[int]]:
        """(what the backward pass alone reads of a layer, what it will find kept anyway: values
        that other forward equations, the update or the result need too)."""
        own = set(layer.equations)
        residuals: set[int] = set()
        kept: set[int] = set()
        for index in layer.equations:
            equation = self.program.equations[index]
            for value in equation.results:
                readers = self.readers.get(value, ())
                if not self.backward_readers(value) or equation.has_effect:
                    continue
                elsewhere = any(self.regions[r] != BACKWARD and r not in own for r in readers)
                (kept if elsewhere or value in self.outputs else residuals).add(value)
        return residuals, kept

    def recomputed(
        self,
        layer: Layer,
        residuals: set[int],
        kept: set[int],
        first: int,
        renamed: dict[int, int],
    ) -> list[Equation]:
        """The barrier and the copies in front of equation `first`; `renamed` learns of them."""
        own = [self.program.equations[i] for i in layer.equations]
        chosen, read = needed_equations(own, residuals, kept)
        inside = {r for e in own for r in e.results}
        shielded = {v for v in read if v in inside or v in layer.inputs}
        behind = set(shielded)
        for equation in chosen:
            operands = set(equation.inputs)
            if behind.isdisjoint(operands):
                shielded.update(operands & read)
                behind.update(operands & read)
            if not behind.isdisjoint(operands):
                behind.update(equation.results)
        local: dict[int, int] = {}
        equations: list[Equation] = []
        token = self.token(first)
        if shielded:
            now = [] if token is None else [renamed.get(token, token)]
            equations.append(self.copier.barrier([*sorted(shielded), *now], chosen[0], local))
            if token is not None:
                renamed[token] = local.pop(now[0])
        equations += [self.copier.equation(e, local) for e in chosen]
        renamed.update((v, local[v]) for v in residuals)
        return equations

    def token(self, first: int) -> int | None:
        """The first cotangent that is read from equation `first` on and was there before: where
        the layer's backward pass begins, it is what reaches the layer."""
        for index in range(first, len(self.program.equations)):
            if self.regions[index] != BACKWARD:
                continue
            for operand in self.program.equations[index].operands:
                if not isinstance(operand, int):
                    continue
                maker = self.maker.get(operand, first)
                if maker < first and self.regions[maker] == BACKWARD:
                    return operand
        return None

    def without_dead(self, equations: Sequence[tuple[Equation, bool]]) -> list[Equation]:
        """Originals that only the backward pass needed are gone."""
        needed = set(self.outputs)
        live = []
        for equation, may_go in reversed(equations):
            if may_go and not equation.has_effect and needed.isdisjoint(equation.results):
                continue
            live.append(equation)
            needed.update(equation.inputs)
        return live[::-1]


def _with_avals(equation: Equation, avals: list[object]) -> Equation:
    """The equation with bodies that know the values of the new program."""
    if not equation.bodies:
        return equation
    bodies = tuple(
        replace(body, equations=tuple(_with_avals(e, avals) for e in body.equations), avals=avals)
        for body in equation.bodies
    )
    return replace(equation, bodies=bodies)
