"""The layer of every equation in a loop over micro-batches: from forward `Layer`s to `LoopLayers`.

Layers are groups of forward equations (`rewrite.layers`). The backward pass runs through them in
reverse, so a backward equation belongs to a layer no later than those whose cotangents it reads. Of
these, it belongs to the latest that makes or reads the forward values that the equation reads. (The
gradient of a weight reads its layer's input, which the layer before made, and a cotangent of the
layer.) That takes neither names nor markers.

Values computed from constants alone belong to no layer: every reader computes them itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopar import _jax
from autopar.ir.program import Equation, Program
from autopar.rewrite.layers import Layer
from autopar.tracer.costs import UNFUSED, aval_bytes
from autopar.tracer.regions import BACKWARD, equation_regions

ANYWHERE = -1


@dataclass(frozen=True)
class LoopLayers:
    """For each equation of the loop's body, its layer (or `ANYWHERE`) and whether it belongs to
    the backward pass."""

    layers: tuple[Layer, ...]
    layer_of: tuple[int, ...]
    is_backward: tuple[bool, ...]


def loop_batch(loop: Equation) -> range:
    """The positions of the body's inputs that hold data of the micro-batch."""
    num_consts, num_carry = _jax.scan_sizes(loop.params)
    return range(num_consts + num_carry, len(loop.operands))


def attach_layers(body: Program, layers: Sequence[Layer]) -> LoopLayers:
    return _Attacher(body, layers).attached()


def boundary_bytes(body: Program, attached: LoopLayers) -> list[int]:
    """The bytes of activations that cross each boundary between two layers."""
    crossing = [0] * (len(attached.layers) - 1)
    maker: dict[int, int] = {}
    last: dict[int, int] = {}
    rows = zip(body.equations, attached.layer_of, attached.is_backward, strict=True)
    for equation, layer, is_backward in rows:
        if is_backward or layer == ANYWHERE:
            continue
        maker.update((r, layer) for r in equation.results)
        for value in equation.inputs:
            if value in maker:
                last[value] = max(last.get(value, 0), layer)
    for value, layer in last.items():
        for boundary in range(maker[value], layer):
            crossing[boundary] += aval_bytes(body.avals[value])
    return crossing


def move_layers(body: Program, layers: Sequence[Layer], changed: Program) -> tuple[Layer, ...]:
    """The layers with the positions of their equations in a changed body that kept the numbers of
    values."""
    layer_of = {
        body.equations[i].results: number for number, x in enumerate(layers) for i in x.equations
    }
    positions: list[list[int]] = [[] for _ in layers]
    for index, equation in enumerate(changed.equations):
        if equation.results in layer_of:
            positions[layer_of[equation.results]].append(index)
    return tuple(replace(x, equations=tuple(p)) for x, p in zip(layers, positions, strict=True))


class _Attacher:
    def __init__(self, body: Program, layers: Sequence[Layer]) -> None:
        self.body = body
        self.layers = tuple(layers)
        self.in_layer = {i: number for number, x in enumerate(layers) for i in x.equations}
        self.regions = equation_regions(body)
        self.layer_of: list[int] = [ANYWHERE] * len(body.equations)
        self.is_backward = [False] * len(body.equations)
        self.maker = body.producers()

    def attached(self) -> LoopLayers:
        floating: set[int] = set()
        for index, equation in enumerate(self.body.equations):
            reads = equation.inputs
            if not equation.has_effect and equation.results and floating.issuperset(reads):
                floating.update(equation.results)
                continue
            makers = [self.maker[v] for v in reads if v in self.maker and v not in floating]
            self.is_backward[index] = self.regions[index] == BACKWARD or any(
                self.is_backward[m] for m in makers
            )
            if not self.is_backward[index]:
                earlier = max((self.layer_of[m] for m in makers), default=0)
                self.layer_of[index] = max(self.in_layer.get(index, 0), earlier)
        layers_of = self.layers_of(floating)
        self.attach_backward(layers_of, {})
        self.attach_backward(
            layers_of, {**self.with_siblings(layers_of), **self.with_readers(layers_of)}
        )
        self.move_to_readers(layers_of)
        return LoopLayers(self.layers, tuple(self.layer_of), tuple(self.is_backward))

    def layers_of(self, floating: Collection[int]) -> dict[int, set[int]]:
        """{forward value: the layers that make it, or read it in the forward pass}."""
        layers_of: dict[int, set[int]] = {}
        for index, equation in enumerate(self.body.equations):
            if self.is_backward[index] or self.layer_of[index] == ANYWHERE:
                continue
            for value in (*equation.inputs, *equation.results):
                if value not in floating:
                    layers_of.setdefault(value, set()).add(self.layer_of[index])
        return layers_of

    def attach_backward(self, layers_of: dict[int, set[int]], known: dict[int, int]) -> None:
        for index, equation in enumerate(self.body.equations):
            if self.is_backward[index]:
                layer = self.backward_layer(equation, layers_of)
                self.layer_of[index] = min(layer, known.get(index, layer))

    def with_readers(self, layers_of: dict[int, set[int]]) -> dict[int, int]:
        """Layers of backward equations that depend on neither cotangents nor forward values (a
        recomputed mask): those of their first readers."""
        alone: set[int] = set()
        for index, equation in enumerate(self.body.equations):
            reads = equation.inputs
            makers = {self.maker[v] for v in reads if v in self.maker}
            is_alone = alone.issuperset(m for m in makers if self.is_backward[m])
            if self.is_backward[index] and is_alone and not any(v in layers_of for v in reads):
                alone.add(index)
        latest: dict[int, int] = {}
        for index in range(len(self.body.equations) - 1, -1, -1):
            if not self.is_backward[index]:
                continue
            layer = latest.get(index, 0) if index in alone else self.layer_of[index]
            for value in self.body.equations[index].inputs:
                maker = self.maker.get(value)
                if maker in alone:
                    latest[maker] = max(latest.get(maker, 0), layer)
        return latest

    def with_siblings(self, layers_of: dict[int, set[int]]) -> dict[int, int]:
        """Layers of equations whose results are only summed up: those of other readers of the same
        cotangent. Such are the gradient of a bias, which reads nothing else, and that of a weight
        if its other operand belongs to several layers."""
        readers = self.body.readers()
        outputs = set(self.body.output_values)
        ends: dict[int, None] = {}  # equations after which a cotangent only goes into sums
        weights: dict[int, None] = {}  # the same for equations that read forward values too
        for index in range(len(self.body.equations) - 1, -1, -1):
            equation = self.body.equations[index]
            after = [r for v in equation.results for r in readers.get(v, ())]
            is_summed = (
                all(r in ends for r in after) if after else (outputs.issuperset(equation.results))
            )
            if self.is_backward[index] and is_summed:
                reads_forward = any(v in layers_of for v in equation.inputs)
                (weights if reads_forward else ends)[index] = None
        sibling_layer: dict[int, int] = {}
        for index in (*weights, *ends):
            others = ends if index in ends else {**ends, **weights}
            values = self.body.equations[index].inputs
            cotangents = [v for v in values if v in self.maker and v not in layers_of]
            siblings = {
                sibling_layer.get(r, self.layer_of[r])
                for v in cotangents
                for r in readers[v]
                if r not in others
            }
            candidates = [layers_of[v] for v in values if v in layers_of]
            if candidates:
                siblings &= set.intersection(*candidates)
            if siblings:
                sibling_layer[index] = max(siblings)
        return sibling_layer

    def move_to_readers(self, layers_of: dict[int, set[int]]) -> None:
        """Moves cheap equations of one cotangent to the earlier layers that alone read them, if
        fewer bytes cross that way: the cotangent of a mean crosses before it is broadcast, a
        cotangent that crosses anyway before it is reshaped."""
        readers = self.body.readers()
        for index in range(len(self.body.equations) - 1, -1, -1):
            equation = self.body.equations[index]
            layer = self.layer_of[index]
            is_cheap = not equation.bodies and equation.name not in UNFUSED
            if not self.is_backward[index] or equation.has_effect or not is_cheap:
                continue
            reads = set(equation.inputs)
            if len(reads) != 1:
                continue
            (cotangent,) = reads
            if cotangent in layers_of:
                continue
            after = [self.layer_of[r] for v in equation.results for r in readers.get(v, ())]
            if cotangent not in self.maker or not after or max(after) >= layer:
                continue
            crosses = any(self.layer_of[r] < layer for r in readers[cotangent])
            before = sum(aval_bytes(self.body.avals[r]) for r in equation.results)
            if crosses or aval_bytes(self.body.avals[cotangent]) < before:
                self.layer_of[index] = max(after)

    def backward_layer(self, equation: Equation, layers_of: dict[int, set[int]]) -> int:
        latest = len(self.layers) - 1
        candidates: list[set[int]] = []
        for value in equation.inputs:
            maker = self.maker.get(value)
            if maker is not None and self.is_backward[maker]:
                latest = min(latest, self.layer_of[maker])
            elif value in layers_of:
                candidates.append(layers_of[value])
        if not candidates:
            return latest
        common = {x for x in set.intersection(*candidates) if x <= latest}
        if common:
            return max(common)
        near = [x for x in set.union(*candidates) if x <= latest]
        return max(near, default=latest)
