"""Every equation of a loop over micro-batches to a layer: from forward layers to `LoopLayers`.

Layers are groups of forward equations (`rewrite.layers`). The backward pass runs through them in
reverse, so a backward equation belongs to a layer no later than those whose cotangents it reads.
Among these it belongs where the forward values that it reads are at home: in the layer that makes
them, or in one that reads them. (The gradient of a weight reads its layer's input, which the layer
before made, and a cotangent of its own.) No name and no marker is needed for that.

What is made of constants alone belongs nowhere: whoever reads it makes it for itself.
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
    """Per equation of the loop's body its layer, or `ANYWHERE`, and whether it is part of the
    backward pass."""

    layers: tuple[Layer, ...]
    layer_of: tuple[int, ...]
    is_backward: tuple[bool, ...]


def loop_batch(loop: Equation) -> range:
    """The positions of the body's inputs that hold data of the micro-batch."""
    num_consts, num_carry = _jax.scan_sizes(loop.params)
    return range(num_consts + num_carry, len(loop.operands))


def attach(body: Program, layers: Sequence[Layer]) -> LoopLayers:
    return _Attacher(body, layers).attached()


def boundary_bytes(body: Program, attached: LoopLayers) -> list[int]:
    """Bytes of activations that cross each boundary between two layers."""
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


def moved_to(body: Program, layers: Sequence[Layer], changed: Program) -> tuple[Layer, ...]:
    """The layers with the positions that their equations have in a changed body, where values kept
    their numbers."""
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
        homes = self.homes(floating)
        self.attach_backward(homes, {})
        self.attach_backward(homes, {**self.with_siblings(homes), **self.with_readers(homes)})
        self.move_to_readers(homes)
        return LoopLayers(self.layers, tuple(self.layer_of), tuple(self.is_backward))

    def homes(self, floating: Collection[int]) -> dict[int, set[int]]:
        """The layers that make a forward value, or read one in the forward pass."""
        homes: dict[int, set[int]] = {}
        for index, equation in enumerate(self.body.equations):
            if self.is_backward[index] or self.layer_of[index] == ANYWHERE:
                continue
            for value in (*equation.inputs, *equation.results):
                if value not in floating:
                    homes.setdefault(value, set()).add(self.layer_of[index])
        return homes

    def attach_backward(self, homes: dict[int, set[int]], known: dict[int, int]) -> None:
        for index, equation in enumerate(self.body.equations):
            if self.is_backward[index]:
                layer = self.backward_layer(equation, homes)
                self.layer_of[index] = min(layer, known.get(index, layer))

    def with_readers(self, homes: dict[int, set[int]]) -> dict[int, int]:
        """Equations of the backward pass that read neither cotangents nor forward values (a mask
        that is made again) belong where they are first read."""
        alone: set[int] = set()
        for index, equation in enumerate(self.body.equations):
            reads = equation.inputs
            makers = {self.maker[v] for v in reads if v in self.maker}
            is_alone = alone.issuperset(m for m in makers if self.is_backward[m])
            if self.is_backward[index] and is_alone and not any(v in homes for v in reads):
                alone.add(index)
        latest: dict[int, int] = {}
        for index in range(len(self.body.equations) - 1, -1, -1):
            if not self.is_backward[index]:
                continue
            own = latest.get(index, 0) if index in alone else self.layer_of[index]
            for value in self.body.equations[index].inputs:
                maker = self.maker.get(value)
                if maker in alone:
                    latest[maker] = max(latest.get(maker, 0), own)
        return latest

    def with_siblings(self, homes: dict[int, set[int]]) -> dict[int, int]:
        """Equations whose results are only summed up belong with the others that read the same
        cotangent: the gradient of a bias, which reads nothing else, and that of a weight if what
        it reads besides is at home in several layers."""
        readers = self.readers()
        outputs = set(self.body.output_values)
        ends: dict[int, None] = {}  # equations with which a cotangent only goes into sums
        weights: dict[int, None] = {}  # those that lead there and read forward values too
        for index in range(len(self.body.equations) - 1, -1, -1):
            equation = self.body.equations[index]
            after = [r for v in equation.results for r in readers.get(v, ())]
            is_summed = (
                all(r in ends for r in after) if after else (outputs.issuperset(equation.results))
            )
            if self.is_backward[index] and is_summed:
                reads_forward = any(v in homes for v in equation.inputs)
                (weights if reads_forward else ends)[index] = None
        found: dict[int, int] = {}
        for index in (*weights, *ends):
            others = ends if index in ends else {**ends, **weights}
            values = self.body.equations[index].inputs
            cotangents = [v for v in values if v in self.maker and v not in homes]
            siblings = {
                found.get(r, self.layer_of[r])
                for v in cotangents
                for r in readers[v]
                if r not in others
            }
            at_home = [homes[v] for v in values if v in homes]
            if at_home:
                siblings &= set.intersection(*at_home)
            if siblings:
                found[index] = max(siblings)
        return found

    def move_to_readers(self, homes: dict[int, set[int]]) -> None:
        """Cheap equations of one cotangent that only layers before theirs read are made there, if
        fewer bytes are handed on so: the cotangent of a mean before it is broadcast, or what is
        handed on anyway before it is reshaped."""
        readers = self.readers()
        for index in range(len(self.body.equations) - 1, -1, -1):
            equation = self.body.equations[index]
            own, reads = self.layer_of[index], set(equation.inputs)
            is_cheap = not equation.bodies and equation.name not in UNFUSED
            if not self.is_backward[index] or equation.has_effect or not is_cheap:
                continue
            if len(reads) != 1 or not reads.isdisjoint(homes):
                continue
            (cotangent,) = reads
            after = [self.layer_of[r] for v in equation.results for r in readers.get(v, ())]
            if cotangent not in self.maker or not after or max(after) >= own:
                continue
            crosses = any(self.layer_of[r] < own for r in readers[cotangent])
            before = sum(aval_bytes(self.body.avals[r]) for r in equation.results)
            if crosses or aval_bytes(self.body.avals[cotangent]) < before:
                self.layer_of[index] = max(after)

    def readers(self) -> dict[int, list[int]]:
        """Value -> the equations that read it."""
        found: dict[int, list[int]] = {}
        for index, equation in enumerate(self.body.equations):
            for value in equation.inputs:
                found.setdefault(value, []).append(index)
        return found

    def backward_layer(self, equation: Equation, homes: dict[int, set[int]]) -> int:
        latest = len(self.layers) - 1
        at_home: list[set[int]] = []
        for value in equation.inputs:
            maker = self.maker.get(value)
            if maker is not None and self.is_backward[maker]:
                latest = min(latest, self.layer_of[maker])
            elif value in homes:
                at_home.append(homes[value])
        if not at_home:
            return latest
        common = {x for x in set.intersection(*at_home) if x <= latest}
        if common:
            return max(common)
        near = [x for x in set.union(*at_home) if x <= latest]
        return max(near, default=latest)


__all__ = ["ANYWHERE", "LoopLayers", "attach", "boundary_bytes", "loop_batch", "moved_to"]
