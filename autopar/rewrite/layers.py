"""From a program to its layers: contiguous groups of forward equations, found from data flow.

Between two products of the forward pass, the best place to cut is where the fewest bytes cross:
a transformer's residual stream, the one activation between two blocks. Which of these gaps are
layer boundaries is told by repetition: module names that differ in their numbers alone, or, where
a model has no names, a period in the sequence of its products. Without either, and where a number
of layers is asked for, a small dynamic programme balances flops against bytes that cross
(`rewrite.layer_cuts`). A scan over layers is one layer of its own.

A layer holds *activations*: what depends on the batch, on random bits or on constants alone. What
is made of parameters alone and is no larger than they are (their cast to bfloat16) belongs to no
layer, since it is shared by all that use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import prod
from typing import Any

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
    inputs:         activations (or arrays of the batch) that it reads and does not make.
    flops:          of its equations, loops with all their trips.
    residual_bytes: what its backward pass reads of it and recomputation would not keep.
    kept_bytes:     activations that stay if it is recomputed: its inputs, of a scan the carry that
                    enters each trip.
    scan:           the equation, if the layer is a scan over layers; `trips` is their number.
    is_last:        its backward pass starts where its forward pass ends, so that recomputing it
                    frees nothing in between.
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


def find_layers(
    program: Program, num_layers: int | None = None, *, batch: Collection[int] | None = None
) -> tuple[Layer, ...]:
    """The layers of a program, exactly `num_layers` of them if given.

    batch: indices of the inputs that hold data (`TracedStep.batch`). Without it, data is what the
    optimizer's update does not read.
    """
    flow = Flow(program, batch)
    segments = flow.segments()
    groups = choose_cuts(segments, num_layers)
    return flow.layers(groups)


def worth_recomputing(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers whose recomputation frees memory: those with residuals, less the last, whose
    residuals are all in use when its backward pass begins."""
    return tuple(x for x in layers if x.residual_bytes > 0 and not x.is_last)


def layers_by_name(layers: Sequence[Layer], names: Collection[str]) -> tuple[Layer, ...]:
    return tuple(layer for layer in layers if layer.name in names)


class Flow:
    """Who makes and who reads what, and which values are activations."""

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
        # What is in neither of these, and no parameter, is an activation.
        self.persistent, self.free = self.classify()

    def classify(self) -> tuple[set[int], set[int]]:
        """(values made of parameters alone, values made of constants alone). A parameter, or a
        constant that enters, on its way to where it is used (a bias or a mask, broadcast to the
        batch) counts among the latter: whoever needs it makes it."""
        program = self.program
        persistent = {v for v in program.inputs if v not in self.data}
        persistent.update(value for value, _ in program.captured)
        free: set[int] = set()
        for equation in program.equations:
            operands = equation.inputs
            if not operands or all(o in free for o in operands):
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

    # -- what is cut

    def segments(self) -> list[LayerSpan]:
        """Stretches of forward equations, as segments; of those without products only the first,
        if none has any."""
        segments = [self.segment(stretch) for stretch in self.stretches()]
        return [segment for segment in segments if segment.heavy] or segments[:1]

    def stretches(self) -> list[list[int]]:
        """Stretches of forward equations with no backward equation between them. What follows the
        last backward equation (metrics) is in none, unless there is no backward pass at all."""
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
        numbers: dict[Any, int] = {}
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
        """For every position, the bytes of activations that later positions read; and of data that
        is read both up to it and after it."""
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
        """For every position, the first later one that alone reads something made up to it (the
        number of positions if there is none)."""
        position = {index: p for p, index in enumerate(indices)}
        found, ahead = [], []
        for p, index in enumerate(indices):
            for result in self.program.equations[index].results:
                later = [position[r] for r in self.readers.get(result, ()) if r in position]
                if len(later) == 1 and result not in self.free:
                    heappush(ahead, later[0])
            while ahead and ahead[0] <= p:
                heappop(ahead)
            found.append(ahead[0] if ahead else len(indices))
        return tuple(found)

    # -- what a layer is

    def layers(self, groups: Sequence[Sequence[int]]) -> tuple[Layer, ...]:
        """The layers that these groups of equations are."""
        return _with_unique_names([self.layer(group, n) for n, group in enumerate(groups)])

    def layer(self, group: Sequence[int], number: int) -> Layer:
        equations = [self.program.equations[i] for i in group]
        own = set(group)
        made = {r for e in equations for r in e.results}
        inputs = dict.fromkeys(
            o
            for e in equations
            for o in e.inputs
            if o not in made and o not in self.persistent and o not in self.free
        )
        residuals = set()
        for value in sorted(made - self.free):
            readers = self.readers.get(value, ())
            if all(self.regions[r] != BACKWARD for r in readers):
                continue
            elsewhere = any(self.regions[r] != BACKWARD and r not in own for r in readers)
            if not elsewhere and value not in self.outputs:
                residuals.add(value)
        heavy = [p for e in equations for p in products(e)]
        modules = [module_name(e.scope) for e in heavy or equations]
        layer = Layer(
            name=_common_module(modules) or f"layer {number}",
            equations=tuple(group),
            inputs=tuple(inputs),
            flops=sum(_flops(e, self.program.avals) for e in equations),
            residual_bytes=self.bytes_of(residuals),
            kept_bytes=self.bytes_of([i for i in inputs if i not in self.data]),
            is_last=self.is_last(group[-1]),
        )
        scans = [i for i in group if self.program.equations[i].name == "scan"]
        return self.scan_layer(layer) if len(group) == 1 and scans else layer

    def scan_layer(self, layer: Layer) -> Layer:
        (index,) = layer.equations
        scan = self.program.equations[index]
        pair = find_scan_pair(self.program, index, self.regions)
        dropped = [] if pair is None else [scan.results[p] for p in pair.dropped]
        stacked = 0 if pair is None else pair.stacked_bytes(self.program.avals)
        num_consts, num_carry = _jax.scan_sizes(scan.params)
        starts = scan.operands[num_consts : num_consts + num_carry]
        others = [v for v in layer.inputs if v not in starts and v not in self.data]
        return replace(
            layer,
            residual_bytes=self.bytes_of(dropped),
            kept_bytes=stacked + self.bytes_of(others),
            scan=index,
            trips=scan.params["length"],
            is_last=False,  # its trips are undone one by one, the last of them first
        )

    def is_last(self, index: int) -> bool:
        """Whether no other layer lies between the end of the layer and the backward pass."""
        for later in range(index + 1, len(self.regions)):
            if self.regions[later] == BACKWARD:
                return True
            if self.regions[later] == FORWARD and not self.is_persistent(later):
                return False
        return False


def products(equation: Equation) -> list[Equation]:
    """The equation itself if it is a product; those in it if it is a loop."""
    if equation.name in _PRODUCTS:
        return [equation]
    return [p for body in equation.bodies for inner in body.equations for p in products(inner)]


def _flops(equation: Equation, avals: Sequence[Any]) -> float:
    if equation.bodies:
        inside = sum(_flops(inner, avals) for b in equation.bodies for inner in b.equations)
        return inside * equation.params.get("length", 1)
    return equation_flops(equation, avals) if equation.results else 0.0


def _signature(equation: Equation, avals: Sequence[Any]) -> Any:
    """Equal for equal products; a loop is compared by what it reads."""
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
    """Layers that share a module are told apart by their number in it."""
    counts = Counter(layer.name for layer in layers)
    seen: Counter[str] = Counter()
    named = []
    for layer in layers:
        if counts[layer.name] > 1:
            seen[layer.name] += 1
            layer = replace(layer, name=f"{layer.name} ({seen[layer.name]})")
        named.append(layer)
    return tuple(named)
