"""Rematerialisation: from a `Program` to one that recomputes layers in its backward pass.

For each layer, the forward equations that its backward equations depend on are copied in front of
the first of these, and the backward pass reads the copies. Only the layer's inputs then have to
stay in memory. As with `jax.checkpoint`, one optimization barrier takes the layer's inputs together
with a cotangent that exists only then, so that XLA can neither merge the copies with the originals
nor compute them early.

On one mesh, `rewrite.gradient_waits` lets the barrier also wait for the gradients that the backward
pass has made by then.

The barrier takes the activations that the layer reads, and the operands of a copied equation that
reads nothing else behind the barrier (the key of random bits). It takes no parameters that are read
along with an activation: their product cannot be merged with the original, and a second name for a
parameter would only hinder its sharding. Equations on parameters alone are not copied, nor are
those with effects. Equations on constants alone are copied without a barrier: if XLA merges them,
no activation survives.

XLA for CPUs (JAX 0.10.2) removes barriers before it merges equal code, so unrolled layers keep
their memory there, with `jax.checkpoint` too; loops do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.layers import Layer
from autopar.rewrite.scan_remat import ScanRewriter, find_scan_pair
from autopar.tracer.copy_equations import Copier, needed_equations, rename, with_avals
from autopar.tracer.regions import BACKWARD, FORWARD, equation_regions


def with_remat(traced: TracedStep, layers: Sequence[Layer]) -> TracedStep:
    """The step with these layers recomputed in its backward pass."""
    if not layers:
        return traced
    program = rematerialise(traced.program, layers)
    return replace(traced, program=program, remat=tuple(layer.name for layer in layers))


def rematerialise(program: Program, layers: Sequence[Layer]) -> Program:
    """The program with these layers recomputed in the backward pass. Values keep their numbers, new
    ones come after them. The result depends only on the equations of program and layers, so that
    equal programs with other shapes change in the same way."""
    return _Rematerialiser(program).run(layers)


class _Rematerialiser:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.copier = Copier(list(program.avals))
        self.regions = equation_regions(program)
        self.outputs = set(program.output_values)
        self.readers = program.readers()
        self.maker = program.producers()
        self.constant = program.made_of_constants()

    def run(self, layers: Sequence[Layer]) -> Program:
        recomputed: dict[int, list[tuple[Layer, set[int], set[int]]]] = {}
        scans: dict[int, ScanRewriter] = {}
        maybe_dead: set[int] = set()  # equations that may no longer be needed
        for layer in layers:
            if layer.scan is not None:
                pair = find_scan_pair(self.program, layer.scan, self.regions)
                if pair is not None:
                    rewriter = ScanRewriter(self.program, pair, self.copier)
                    scans[pair.forward] = scans[pair.backward] = rewriter
                continue
            residuals, stored = self.residuals(layer)
            if residuals:
                first = min(r for v in residuals for r in self.backward_readers(v))
                recomputed.setdefault(first, []).append((layer, residuals, stored))
                maybe_dead.update(layer.equations)
        equations: list[tuple[Equation, bool]] = []
        renamed: dict[int, int] = {}  # what backward equations read instead
        for index, equation in enumerate(self.program.equations):
            for layer, residuals, stored in recomputed.get(index, ()):
                copies = self.recomputed(layer, residuals, stored, index, renamed)
                equations += [(copy, False) for copy in copies]
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
            equations.append((equation, index in maybe_dead))
        avals = self.copier.avals
        live = self.without_dead(equations)
        return replace(
            self.program,
            equations=tuple(with_avals(equation, avals) for equation in live),
            avals=avals,
        )

    def backward_readers(self, value: int) -> list[int]:
        return [r for r in self.readers.get(value, ()) if self.regions[r] == BACKWARD]

    def residuals(self, layer: Layer) -> tuple[set[int], set[int]]:
        """(values of a layer that only its backward pass reads, values that stay in memory: other
        forward equations, the update or the result need them too, or the layer keeps them)."""
        members = set(layer.equations)
        residuals: set[int] = set()
        stored: set[int] = set(layer.kept)
        for index in layer.equations:
            equation = self.program.equations[index]
            for value in equation.results:
                readers = self.readers.get(value, ())
                if not self.backward_readers(value) or equation.has_effect:
                    continue
                elsewhere = any(self.regions[r] != BACKWARD and r not in members for r in readers)
                (stored if elsewhere or value in self.outputs else residuals).add(value)
        return residuals - stored, stored

    def recomputed(
        self,
        layer: Layer,
        residuals: set[int],
        stored: set[int],
        first: int,
        renamed: dict[int, int],
    ) -> list[Equation]:
        """The barrier and the copies in front of equation `first`; adds their names to
        `renamed`."""
        originals = [self.program.equations[i] for i in layer.equations]
        chosen, read = needed_equations(originals, residuals, stored)
        inside = {r for e in originals for r in e.results}
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
        """The first cotangent made before equation `first` and read from there on: the cotangent
        with which the layer's backward pass begins. Not zeros that a slope selects: they are always
        there, and behind a barrier an array in memory."""
        for index in range(first, len(self.program.equations)):
            if self.regions[index] != BACKWARD:
                continue
            for value in self.program.equations[index].inputs:
                maker = self.maker.get(value, first)
                is_made = maker < first and self.regions[maker] == BACKWARD
                if is_made and value not in self.constant:
                    return value
        return None

    def without_dead(self, equations: Sequence[tuple[Equation, bool]]) -> list[Equation]:
        """The equations without originals that only the backward pass needed."""
        needed = set(self.outputs)
        live = []
        for equation, may_go in reversed(equations):
            if may_go and not equation.has_effect and needed.isdisjoint(equation.results):
                continue
            live.append(equation)
            needed.update(equation.inputs)
        return live[::-1]
