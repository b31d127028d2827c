"""From a `Program` to its `Layer`s: contiguous groups of forward equations, found from data flow.

Between two products of the forward pass, the best cut is where the fewest bytes cross: a
transformer's residual stream, the one activation between two blocks. Repetition tells which of
these gaps are layer boundaries: module names that differ only in their numbers, or, in a model
without names, a period in the sequence of products. Without either, or for a given number of
layers, a small dynamic programme balances flops against crossing bytes (`rewrite.layer_cuts`). A
scan over layers is one layer.

A layer holds *activations*: values that depend on the batch, on random bits or on constants alone.
Values made from parameters alone and no larger than they are (a cast to bfloat16) belong to no
layer, since all their users share them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import prod

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Equation, Program
from autopar.rewrite.layer_cuts import LayerSpan, choose_cuts
from autopar.rewrite.residuals import is_cheap
from autopar.rewrite.scan_remat import find_scan_pair
from autopar.tracer.costs import aval_bytes, equation_flops
from autopar.tracer.regions import BACKWARD, FORWARD, UPDATE, equation_regions, module_name
from autopar.tracer.rules import equation_key

_PRODUCTS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "ragged_dot_general",
    "dot_product_attention_fwd_wrapper",
)


@dataclass(frozen=True)
class Layer:
    """A contiguous part of the forward pass.

    name:           module path that its products share, or `layer 3`; unique in a program.
    equations:      indices into `program.equations`.
    inputs:         activations (or arrays of the batch) that it reads from outside.
    flops:          of its equations, loops with all their trips.
    residual_bytes: activations that its backward pass reads and recomputation would free.
    kept_bytes:     activations that stay if it is recomputed: its inputs; for a scan, the carry
                    that enters each trip.
    scan:           the equation, if the layer is a scan over layers; `trips` is their number.
    is_last:        its backward pass starts where its forward pass ends, so recomputing it frees
                    nothing in between.
    kept:           values that it makes and that stay if it is recomputed.
    part:           the same layer, with less of it recomputed (`rewrite.partial_remat`).
    """

    name: str
    equations: tuple[int, ...]
    inputs: tuple[int, ...]
    flops: float
    residual_bytes: int
    kept_bytes: int
    scan: int | None = None
    trips: int = 1
    is_last: bool = False
    kept: tuple[int, ...] = ()
    part: Layer | None = None

    @property
    def freed_bytes(self) -> int:
        """Of the whole batch, by recomputing it."""
        return self.residual_bytes - self.kept_bytes


# id of a program -> the program and its layers, while the program lives: every way to plan a step
# asks for them.
_Layers = dict[tuple[int | None, frozenset[int] | None], tuple[Layer, ...]]
_known: dict[int, tuple[weakref.ref[Program], _Layers]] = {}


def find_layers(
    program: Program, num_layers: int | None = None, *, batch: Collection[int] | None = None
) -> tuple[Layer, ...]:
    """The layers of a program, exactly `num_layers` of them if given.

    batch: indices of the inputs that hold data (`TracedStep.batch`). Without it, data is what the
    optimizer's update does not read.
    """
    key = (num_layers, None if batch is None else frozenset(batch))
    known = _known.get(id(program))
    if known is None or known[0]() is not program:
        number = id(program)
        known = weakref.ref(program, lambda _: _known.pop(number, None)), {}
        _known[number] = known
    if key not in known[1]:
        flow = Flow(program, batch)
        known[1][key] = flow.layers(choose_cuts(flow.segments(), num_layers))
    return known[1][key]


def worth_recomputing(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers whose recomputation frees memory: those with residuals, except the last, whose
    residuals are all in use when its backward pass begins."""
    return tuple(x for x in layers if x.residual_bytes > 0 and not x.is_last)


def layers_by_name(layers: Sequence[Layer], names: Collection[str]) -> tuple[Layer, ...]:
    """Those that have the names, or whose parts have."""
    forms = [(layer, layer.part) for layer in layers]
    return tuple(form for both in forms for form in both if form is not None and form.name in names)


class Flow:
    """The data flow of a program: regions, readers, and which values are activations."""

    def __init__(self, program: Program, batch: Collection[int] | None) -> None:
        self.program = program
        self.regions = equation_regions(program)
        self.readers = program.readers()
        self.outputs = set(program.output_values)
        if batch is None:
            batch = [
                position
                for position, value in enumerate(program.inputs)
                if not any(self.regions[r] == UPDATE for r in self.readers.get(value, ()))
            ]
        self.data = {program.inputs[position] for position in batch}
        # Values in neither set that are not parameters are activations.
        self.persistent, self.free = self.classify()

    def classify(self) -> tuple[set[int], set[int]]:
        """(values made from parameters alone, values made from constants alone). The latter include
        cheap enlargements of parameters or constants (a bias or a mask, broadcast to the batch):
        every reader computes them itself."""
        program = self.program
        persistent = {v for v in program.inputs if v not in self.data}
        persistent.update(value for value, _ in program.captured)
        free: set[int] = set()
        for equation in program.equations:
            operands = equation.inputs
            if equation.name == "optimization_barrier":  # each result is an operand
                for operand, result in zip(equation.operands, equation.results, strict=True):
                    for known in (persistent, free):
                        if operand in known:
                            known.add(result)
            elif not operands or all(o in free for o in operands):
                free.update(equation.results)
            elif all(o in persistent or o in free for o in operands):
                read = sum(self.size(o) for o in operands if o in persistent)
                if sum(self.size(r) for r in equation.results) <= read:
                    persistent.update(equation.results)
                elif is_cheap(equation):
                    free.update(equation.results)
        return persistent, free

    def size(self, value: int) -> int:
        return prod(getattr(self.program.avals[value], "shape", ()))

    def bytes_of(self, values: Collection[int]) -> int:
        return sum(aval_bytes(self.program.avals[v]) for v in values)

    # -- segments to cut

    def segments(self) -> list[LayerSpan]:
        """The stretches of forward equations that have products, or else the first stretch."""
        segments = [self.segment(stretch) for stretch in self.stretches()]
        return [segment for segment in segments if segment.heavy] or segments[:1]

    def stretches(self) -> list[list[int]]:
        """Stretches of forward equations with no backward equation between them, without the
        equations after the last backward one (metrics)."""
        stretches: list[list[int]] = [[]]
        for index, region in enumerate(self.regions):
            if region == BACKWARD:
                stretches.append([])
            elif region == FORWARD and not self.is_persistent(index):
                stretches[-1].append(index)
        used = stretches[:-1] if len(stretches) > 1 else stretches
        return [stretch for stretch in used if stretch]

    def forward_equations(self) -> list[int]:
        return [index for stretch in self.stretches() for index in stretch]

    def is_persistent(self, index: int) -> bool:
        results = self.program.equations[index].results
        return bool(results) and all(r in self.persistent for r in results)

    def segment(self, indices: list[int]) -> LayerSpan:
        program = self.program
        equations = [program.equations[i] for i in indices]
        heavy = tuple(p for p, e in enumerate(equations) if products(e))
        numbers: dict[Hashable, int] = {}
        signatures = tuple(
            numbers.setdefault(_signature(equations[p], program.avals), len(numbers)) for p in heavy
        )
        return LayerSpan(
            indices=tuple(indices),
            crossing_bytes=self.crossing_bytes(indices),
            flops=tuple(_flops(e, program.avals) for e in equations),
            modules=tuple(module_name(e.scope) for e in equations),
            heavy=heavy,
            signatures=signatures,
            scans=frozenset(p for p in heavy if equations[p].name == "scan"),
            only_readers=self.next_only_readers(indices),
        )

    def crossing_bytes(self, indices: list[int]) -> tuple[int, ...]:
        """For every position, the bytes of activations that later positions read, and of data that
        is read both before and after it."""
        position = {index: p for p, index in enumerate(indices)}
        change = [0] * (len(indices) + 1)

        def crosses(value: int, first: int, last: int) -> None:
            count = aval_bytes(self.program.avals[value])
            change[first] += count
            change[last] -= count

        for value in sorted(self.data):
            read = [position[r] for r in self.readers.get(value, ()) if r in position]
            if read:
                crosses(value, min(read), max(read))
        for p, index in enumerate(indices):
            for result in self.program.equations[index].results:
                later = [position[r] for r in self.readers.get(result, ()) if r in position]
                if later and result not in self.free:
                    crosses(result, p, max(later))
        return tuple(accumulate(change[:-1]))

    def next_only_readers(self, indices: list[int]) -> tuple[int, ...]:
        """For every position, the first later one that is the only reader of a value made up to it
        (the number of positions if there is none)."""
        position = {index: p for p, index in enumerate(indices)}
        next_readers, ahead = [], []
        for p, index in enumerate(indices):
            for result in self.program.equations[index].results:
                later = [position[r] for r in self.readers.get(result, ()) if r in position]
                if len(later) == 1 and result not in self.free:
                    heappush(ahead, later[0])
            while ahead and ahead[0] <= p:
                heappop(ahead)
            next_readers.append(ahead[0] if ahead else len(indices))
        return tuple(next_readers)

    # -- layers

    def layers(self, groups: Sequence[Sequence[int]]) -> tuple[Layer, ...]:
        """One layer per group of equations."""
        return _with_unique_names([self.layer(group, n) for n, group in enumerate(groups)])

    def layer(self, group: Sequence[int], number: int) -> Layer:
        equations = [self.program.equations[i] for i in group]
        made = {r for e in equations for r in e.results}
        inputs = dict.fromkeys(
            o
            for e in equations
            for o in e.inputs
            if o not in made and o not in self.persistent and o not in self.free
        )
        heavy = [p for e in equations for p in products(e)]
        modules = [module_name(e.scope) for e in heavy or equations]
        layer = Layer(
            name=_common_module(modules) or f"layer {number}",
            equations=tuple(group),
            inputs=tuple(inputs),
            flops=sum(_flops(e, self.program.avals) for e in equations),
            residual_bytes=self.bytes_of(self.residuals(group)),
            kept_bytes=self.bytes_of([i for i in inputs if i not in self.data]),
            is_last=self.is_last(group[-1]),
        )
        scans = [i for i in group if self.program.equations[i].name == "scan"]
        return self.scan_layer(layer) if len(group) == 1 and scans else layer

    def residuals(self, group: Sequence[int]) -> list[int]:
        """Activations that these equations make and only their backward pass reads."""
        members = set(group)
        found = []
        for value in sorted({r for i in group for r in self.program.equations[i].results}):
            if value in self.free or not self.is_read_backward(value):
                continue
            readers = self.readers.get(value, ())
            elsewhere = any(self.regions[r] != BACKWARD and r not in members for r in readers)
            if not elsewhere and value not in self.outputs:
                found.append(value)
        return found

    def scan_layer(self, layer: Layer) -> Layer:
        (index,) = layer.equations
        scan = self.program.equations[index]
        pair = find_scan_pair(self.program, index, self.regions)
        dropped = [] if pair is None else [scan.results[p] for p in pair.dropped]
        if pair is None:  # nothing that it stacks for the backward pass can be recomputed
            stacked = self.bytes_of([v for v in scan.results if self.is_read_backward(v)])
        else:
            stacked = pair.stacked_bytes(self.program.avals)
        num_consts, num_carry = _jax.scan_sizes(scan.params)
        starts = scan.operands[num_consts : num_consts + num_carry]
        others = [v for v in layer.inputs if v not in starts and v not in self.data]
        return replace(
            layer,
            residual_bytes=self.bytes_of(dropped),
            kept_bytes=stacked + self.bytes_of(others),
            scan=index,
            trips=scan.params["length"],
            is_last=False,  # the backward scan frees its trips one by one
        )

    def is_read_backward(self, value: int) -> bool:
        return any(self.regions[r] == BACKWARD for r in self.readers.get(value, ()))

    def is_last(self, index: int) -> bool:
        """Whether the backward pass follows the end of the layer, with no other layer between."""
        for later in range(index + 1, len(self.regions)):
            if self.regions[later] == BACKWARD:
                return True
            if self.regions[later] == FORWARD and not self.is_persistent(later):
                return False
        return False


def products(equation: Equation) -> list[Equation]:
    """The equation itself if it is a product; the products in its bodies if it is a loop."""
    return [e for e in equation.with_bodies() if e.name in _PRODUCTS]


def _flops(equation: Equation, avals: Sequence[ShapedArray]) -> float:
    if equation.bodies:
        inside = sum(_flops(inner, avals) for b in equation.bodies for inner in b.equations)
        return inside * equation.params.get("length", 1)
    return equation_flops(equation, avals) if equation.results else 0.0


def _signature(equation: Equation, avals: Sequence[ShapedArray]) -> Hashable:
    """Equal for equal products; loops are compared by their inner ops and operand types."""
    if not equation.bodies:
        return equation_key(equation, avals)
    inner = tuple(e.name for b in equation.bodies for e in b.equations)
    types = tuple(str(avals[o]) for o in equation.inputs)
    return equation.name, equation.params.get("length"), inner, types


def _common_module(modules: Sequence[str]) -> str:
    common: list[str] = []
    for parts in zip(*(module.split("/") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "/".join(common)


def _with_unique_names(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Numbers the layers that share a module: `GPT/Block (1)`."""
    counts = Counter(layer.name for layer in layers)
    seen: Counter[str] = Counter()
    named = []
    for layer in layers:
        if counts[layer.name] > 1:
            seen[layer.name] += 1
            layer = replace(layer, name=f"{layer.name} ({seen[layer.name]})")
        named.append(layer)
    return tuple(named)
