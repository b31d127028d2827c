"""Every equation of a step to a segment: from a `TracedStep` to the layer that each belongs to.

Layers are groups of forward equations (`rewrite.layers`); the backward pass follows them
(`rewrite.attach_layers`). Here the rest of a step follows too:

- what the first layer does before it equals the second (the embedding) is a layer of its own, and
so
  is what the last layer does after it equals the others;
- values computed from parameters or constants only belong to the segment that reads them, or to the
  first segment if several do;
- an equation of the update belongs where most of its input bytes are, or else with the readers of
its
  result. Scalars (norms, schedules) attract nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import ANYWHERE, attach_layers
from autopar.rewrite.layers import Layer, find_layers
from autopar.tracer.costs import aval_bytes
from autopar.tracer.regions import UPDATE, equation_regions
from autopar.tracer.rules import equation_key

_NONE = -1
_SCALAR_BYTES = 16


def place_equations(traced: TracedStep) -> tuple[list[str], list[int]]:
    """(names of segments, the segment of every equation that is not in a loop's body)."""
    program = traced.program
    layers = find_layers(program, batch=traced.batch)
    layers = _with_ends_apart(program, layers)
    placer = _SegmentPlacer(program, layers)
    return [layer.name for layer in layers] or ["step"], placer.placed()


def _with_ends_apart(program: Program, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Cut a layer in two that equals its neighbour except for a prefix or suffix."""
    keys = [[_key(program, i) for i in layer.equations] for layer in layers]
    cut_layers: list[Layer] = []
    for number, (layer, layer_keys) in enumerate(zip(layers, keys, strict=True)):
        parts = [layer]
        after = keys[number + 1] if number + 1 < len(keys) else []
        before = keys[number - 1] if number else []
        if after and len(layer_keys) > len(after) and layer_keys[-len(after) :] == after:
            parts = _cut(layer, len(layer_keys) - len(after), ("before ", ""))
        elif before and len(layer_keys) > len(before) and layer_keys[: len(before)] == before:
            parts = _cut(layer, len(before), ("", "after "))
        cut_layers += parts
    return tuple(cut_layers)


def _cut(layer: Layer, at: int, words: tuple[str, str]) -> list[Layer]:
    parts = layer.equations[:at], layer.equations[at:]
    return [
        replace(layer, name=word + layer.name, equations=part)
        for word, part in zip(words, parts, strict=True)
    ]


def _key(program: Program, index: int) -> object:
    equation = program.equations[index]
    return equation.name if equation.bodies else equation_key(equation, program.avals)


class _SegmentPlacer:
    def __init__(self, program: Program, layers: Sequence[Layer]) -> None:
        self.program = program
        self.equations = program.equations
        self.regions = equation_regions(program)
        self.layers = layers
        self.segment = [_NONE] * len(self.equations)
        self.maker = program.producers()
        self.readers = program.readers()
        self.owner: dict[int, int] = {}  # input -> segment

    def placed(self) -> list[int]:
        if not self.layers:
            return [0] * len(self.equations)
        self.follow_layers()
        self.follow_readers(updates=False)
        for value in self.program.inputs:
            segments = [self.segment[r] for r in self.readers.get(value, ())]
            if any(s != _NONE for s in segments):
                self.owner[value] = min(s for s in segments if s != _NONE)
        for _ in range(2):
            self.follow_bytes()
            self.follow_readers(updates=True)
        return [max(s, 0) for s in self.segment]

    def follow_layers(self) -> None:
        """Forward and backward equations by layers; gradients are results of these."""
        in_layer = {i for layer in self.layers for i in layer.equations}
        kept = [i for i, region in enumerate(self.regions) if region != UPDATE]
        place = {index: at for at, index in enumerate(kept)}
        made = {r for i in kept for r in self.equations[i].results}
        left = [e for i, e in enumerate(self.equations) if i not in place]
        read = dict.fromkeys(v for e in left for v in e.inputs if v in made)
        read.update(dict.fromkeys(self.program.output_values))
        passes = replace(
            self.program,
            equations=tuple(self.equations[i] for i in kept),
            outputs=tuple(v for v in read if v in made),
        )
        layers = [
            replace(layer, equations=tuple(place[i] for i in layer.equations))
            for layer in self.layers
        ]
        attached = attach_layers(passes, layers)
        rows = zip(kept, attached.layer_of, attached.is_backward, strict=True)
        for index, layer, is_backward in rows:
            makers = [self.maker[v] for v in self.equations[index].inputs if v in self.maker]
            follows = any(self.segment[m] != _NONE for m in makers)
            if layer != ANYWHERE and (index in in_layer or is_backward or follows):
                self.segment[index] = layer

    def follow_readers(self, *, updates: bool) -> None:
        for index in range(len(self.equations) - 1, -1, -1):
            if self.segment[index] != _NONE or (self.regions[index] == UPDATE) != updates:
                continue
            readers = {r for v in self.equations[index].results for r in self.readers.get(v, ())}
            segments = {self.segment[r] for r in readers if self.segment[r] != _NONE}
            if len(segments) > 1 and not updates:  # so that equal layers stay equal
                segments = {0}
            self.segment[index] = min(segments, default=_NONE)

    def follow_bytes(self) -> None:
        for index, equation in enumerate(self.equations):
            if self.segment[index] != _NONE:
                continue
            sizes: dict[int, int] = {}
            for value in equation.inputs:
                maker = self.maker.get(value)
                home = self.owner.get(value, _NONE) if maker is None else self.segment[maker]
                if home != _NONE:
                    size = aval_bytes(self.program.avals[value])
                    sizes[home] = sizes.get(home, 0) + size
            large = {s: size for s, size in sizes.items() if size > _SCALAR_BYTES}
            if large:
                self.segment[index] = max(large, key=lambda s: (large[s], -s))
            elif sizes and all(
                aval_bytes(self.program.avals[r]) <= _SCALAR_BYTES for r in equation.results
            ):
                self.segment[index] = min(sizes)
