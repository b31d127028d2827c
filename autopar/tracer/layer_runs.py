"""Equal layers in a program: from equations and their shardings to `LayerRun`s.

Names propose, structure decides. A scan over layers that was unrolled numbers its trips
(`layers_0`, `layers_1` …), as modules of a model are numbered by most libraries; equations with
one number are taken for a layer. They are a run if they are the same equations with the same
layouts, and each value that they read is

    made by the layer itself,
    made by the layer before, at one place of it (a *carry*; the first layer reads another value),
    one value that all layers read,
    a value per layer from outside, or
    rows of one array, from layer to layer the same number of rows further.

At the ends of a run layouts may differ where values enter or leave: the loop has one layout for
them, and they are brought to it before the first trip, and from it after the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from jax.core import ShapedArray

from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.ir.program_sharding import Chain, EquationSharding
from autopar.ir.spec import PARTIAL

MIN_LAYERS = 4  # fewer are compiled soon, and run a little faster written out

Place = tuple[int, int]  # of a value in a layer: (equation of the layer, result)
Key = tuple[str, str]  # of layers that may be equal: (scope around them, name without number)


@dataclass(frozen=True)
class RunCarry:
    """A value that a layer makes at `place` and the next reads as `value` (in the layer that stands
    for all); the first reads `start`."""

    value: int
    start: Operand
    place: Place


@dataclass
class LayerRun:
    """Layers of a program that are equal, in the order in which they run.

    trips:   per layer, its equations by index.
    model:   the layer whose equations stand for all, a position in `trips`.
    place_of: value made in a layer -> (layer, place).
    carries: place -> the carry.
    reads:   value of the model layer -> the same of every layer, from outside.
    slices:  equation of a layer -> (first row of the first layer, rows further per layer).
    """

    trips: list[list[int]]
    is_reversed: bool
    model: int
    place_of: dict[int, tuple[int, Place]] = field(default_factory=dict)
    carries: dict[Place, RunCarry] = field(default_factory=dict)
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slices: dict[int, tuple[int, int]] = field(default_factory=dict)

    def by_layer(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What is in the order of trips, in the order of the layers' numbers; or back."""
        return tuple(reversed(values)) if self.is_reversed else tuple(values)

    def row_of(self, trip: int) -> int:
        return len(self.trips) - 1 - trip if self.is_reversed else trip

    @property
    def last(self) -> int:
        return len(self.trips) - 1


_NUMBERED = re.compile(r"(.+)_(\d+)")
_WRAPPED = re.compile(r"(?:\w+\()*([^()]*)\)*")  # `transpose(jvp(GPT))`: what is inside
_OF_TRANSFORMS = ("", "checkpoint", "rematted_computation", "remat")


@lru_cache(maxsize=65536)
def _numbered(scope: str) -> tuple[tuple[Key, int], ...]:
    """The numbered modules around an equation, outermost first."""
    found, around = [], []
    for component in scope.split("/"):
        inside = _WRAPPED.fullmatch(component)
        name = inside.group(1) if inside else component
        if name in _OF_TRANSFORMS:
            continue
        if match := _NUMBERED.fullmatch(name):
            found.append((("/".join(around), match.group(1)), int(match.group(2))))
        around.append(name)
    return tuple(found)


def numbered_layers(equations: Sequence[Equation | object]) -> dict[Key, dict[int, list[int]]]:
    """The equations of each numbered module, by index; those with most equations come first."""
    layers: dict[Key, dict[int, list[int]]] = {}
    for index, equation in enumerate(equations):
        if isinstance(equation, Equation):
            for key, number in _numbered(equation.scope):
                layers.setdefault(key, {}).setdefault(number, []).append(index)
    sizes = {key: sum(map(len, own.values())) for key, own in layers.items()}
    return {key: layers[key] for key in sorted(layers, key=lambda key: -sizes[key])}


def ranges_to_try(first: int, last: int) -> list[range]:
    """Of layers with these numbers, those that may be a run: the first and the last may differ."""
    bounds = ((first, last), (first + 1, last), (first, last - 1), (first + 1, last - 1))
    return [range(a, b + 1) for a, b in bounds if b - a + 1 >= MIN_LAYERS]


def find_run(
    equations: Sequence[Any],
    shardings: Sequence[EquationSharding | None] | None,
    avals: Sequence[ShapedArray],
    layers: Sequence[Sequence[int]],
) -> LayerRun | None:
    """The run of these layers, each by the indices of its equations; None if they are not equal.
    `shardings`: None if layouts are not known yet. What is no `Equation` (another loop) only counts
    for what it reads and makes."""
    if len({len(own) for own in layers}) != 1 or not layers[0]:
        return None
    return _Matcher(equations, shardings, avals, layers).run()


class _Matcher:
    def __init__(
        self,
        equations: Sequence[Any],
        shardings: Sequence[EquationSharding | None] | None,
        avals: Sequence[ShapedArray],
        layers: Sequence[Sequence[int]],
    ) -> None:
        self.equations, self.shardings, self.avals = equations, shardings, avals
        self.layers = layers

    def run(self) -> LayerRun | None:
        direction = self.direction()
        if direction is None:
            return None
        trips = [list(own) for own in self.layers]
        is_reversed = direction < 0
        self.found = LayerRun(trips[::-1] if is_reversed else trips, is_reversed, len(trips) // 2)
        for trip, own in enumerate(self.found.trips):
            for at, index in enumerate(own):
                for number, value in enumerate(self.equations[index].results):
                    self.found.place_of[value] = trip, (at, number)
        later = self.after_the_run()
        for at in range(len(trips[0])):
            if not self.same_equation(at, later):
                return None
        shardings = self.shardings
        if shardings and not all(self.same_layouts(at, shardings) for at in range(len(trips[0]))):
            return None
        return self.found

    def direction(self) -> int | None:
        """1 if layers read from the layer before them, -1 if from the one after; None if neither
        is true of all."""
        layer_of = {
            value: number
            for number, own in enumerate(self.layers)
            for index in own
            for value in self.equations[index].results
        }
        steps = {
            number - layer_of[value]
            for number, own in enumerate(self.layers)
            for index in own
            for value in self.equations[index].inputs
            if value in layer_of
        } - {0}
        return min(steps, default=1) if steps in (set(), {1}, {-1}) else None

    def after_the_run(self) -> set[int]:
        """Values outside of the run that depend on it."""
        inside = {index for own in self.found.trips for index in own}
        later: set[int] = set()
        for index, equation in enumerate(self.equations):
            reads = equation.inputs
            if index not in inside and any(v in later or v in self.found.place_of for v in reads):
                later.update(equation.results)
        return later

    def same_equation(self, at: int, later: set[int]) -> bool:
        own = [self.equations[trip[at]] for trip in self.found.trips]
        model = own[self.found.model]
        if model.has_effect or not all(self.is_like(model, one) for one in own):
            return False
        if not self.same_params_but_rows(at, own):
            return False
        return all(
            self.same_operand([one.operands[n] for one in own], later)
            for n in range(len(model.operands))
        )

    def is_like(self, model: Equation, other: Equation) -> bool:
        return (
            model.name == other.name
            and len(model.operands) == len(other.operands)
            and [_type(self.avals[v]) for v in model.results]
            == [_type(self.avals[v]) for v in other.results]
            and len(model.bodies) == len(other.bodies)
            and all(map(same_program, model.bodies, other.bodies))
        )

    def same_params_but_rows(self, at: int, own: Sequence[Equation]) -> bool:
        model = own[self.found.model]
        if all(same_params(model, one) for one in own):
            return True
        if model.name != "slice" or len({one.inputs[0] for one in own if one.inputs}) != 1:
            return False
        if not all(same_params(_from_row_0(model), _from_row_0(one)) for one in own):
            return False
        starts = [one.params["start_indices"][0] for one in own]
        steps = {b - a for a, b in pairwise(starts)}
        if len(steps) != 1 or (model.params["strides"] or (1,))[0] != 1:
            return False
        self.found.slices[at] = starts[0], steps.pop()
        return True

    def same_operand(self, operands: Sequence[Operand], later: set[int]) -> bool:
        """Whether it is one of the kinds above; notes carries and values of each layer."""
        found, model = self.found, operands[self.found.model]
        if not isinstance(model, int):
            return all(isinstance(o, Constant) and same_constant(model, o) for o in operands)
        made = [found.place_of.get(o) if isinstance(o, int) else None for o in operands]
        where = found.place_of.get(model)
        if where is not None:
            trip, place = where
            if trip == found.model:
                return all(m == (n, place) for n, m in enumerate(made))
            follows = all(m == (n, place) for n, m in enumerate(made[1:]))
            start = operands[0]
            if not follows or made[0] is not None or (isinstance(start, int) and start in later):
                return False
            return self.add_carry(RunCarry(model, start, place))
        values = tuple(o for o in operands if isinstance(o, int))
        if len(values) < len(operands) or any(m is not None for m in made):
            return False
        if not later.isdisjoint(values):
            return False
        if len(set(values)) == 1:
            return True
        if len({_type(self.avals[v]) for v in values}) != 1:
            return False
        return found.reads.setdefault(model, found.by_layer(values)) == found.by_layer(values)

    def add_carry(self, carry: RunCarry) -> bool:
        start = carry.start
        aval = self.avals[start] if isinstance(start, int) else start.aval
        if _type(aval) != _type(self.avals[carry.value]):
            return False
        return self.found.carries.setdefault(carry.place, carry) == carry

    # -- layouts

    def same_layouts(self, at: int, shardings: Sequence[EquationSharding | None]) -> bool:
        found = self.found
        model = shardings[found.trips[found.model][at]]
        assert model is not None
        entering = {carry.value for carry in found.carries.values()} | set(found.reads)
        operands = self.equations[found.trips[found.model][at]].operands
        may_enter = [isinstance(o, int) and o in entering for o in operands]
        may_leave = [(at, n) in found.carries for n in range(len(model.results))]
        if any(leaves and _is_partial(model.results[n]) for n, leaves in enumerate(may_leave)):
            return False
        for trip, own in enumerate(found.trips):
            other = shardings[own[at]]
            assert other is not None
            if other is model:
                continue
            ends = trip in (0, found.last)
            same = (model.bodies, model.local, model.lanes) == (
                other.bodies, other.local, other.lanes
            )  # fmt: skip
            same &= _same_chains(model.operands, other.operands, may_enter if ends else ())
            leaving = may_leave if trip == found.last else ()
            if not same or not _same_chains(model.results, other.results, leaving):
                return False
        return True


def _same_chains(
    some: Sequence[Chain], others: Sequence[Chain], may_differ: Sequence[bool]
) -> bool:
    for number, (one, other) in enumerate(zip(some, others, strict=True)):
        if one == other:
            continue
        if not may_differ or not may_differ[number] or _is_partial(one) or _is_partial(other):
            return False
    return True


def _is_partial(chain: Chain) -> bool:
    return any(PARTIAL in layout for layout in chain)


# -- equality


def _type(aval: ShapedArray) -> tuple[Any, Any]:
    return tuple(aval.shape), aval.dtype


def same_params(one: Equation, other: Equation) -> bool:
    a, b = one.params, other.params
    return a is b or (a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # things that cannot be compared, or only element by element
        return False


def same_constant(one: Constant, other: Constant) -> bool:
    a, b = one.value, other.value
    if a is b:
        return True
    numbers = (bool, int, float, complex, np.generic, np.ndarray)
    if _type(one.aval) != _type(other.aval) or not isinstance(a, numbers):
        return False
    return isinstance(b, numbers) and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _from_row_0(equation: Equation) -> Equation:
    """The slice, as if it began with the first row."""
    params = dict(equation.params)
    start, limit = params["start_indices"], params["limit_indices"]
    params["start_indices"] = (0, *start[1:])
    params["limit_indices"] = (limit[0] - start[0], *limit[1:])
    return Equation(
        equation.primitive, params, equation.operands, equation.results, equation.scope,
        equation.name_stack, equation.source_info, equation.context,
    )  # fmt: skip


def same_program(one: Program, other: Program) -> bool:
    """Whether two bodies of loops are the same but for the numbers of their values."""
    if one is other:
        return True
    counts = [
        (len(p.inputs), len(p.outputs), len(p.equations), len(p.captured)) for p in (one, other)
    ]
    if counts[0] != counts[1]:
        return False
    renamed = dict(zip(one.inputs, other.inputs, strict=True))
    for (value, array), (own, own_array) in zip(one.captured, other.captured, strict=True):
        if array is not own_array:
            return False
        renamed[value] = own

    def same_operands(a: Iterable[Operand], b: Iterable[Operand]) -> bool:
        return all(
            renamed.get(x) == y
            if isinstance(x, int)
            else isinstance(y, Constant) and same_constant(x, y)
            for x, y in zip(a, b, strict=True)
        )

    if any(_type(one.avals[v]) != _type(other.avals[renamed[v]]) for v in one.inputs):
        return False
    for a, b in zip(one.equations, other.equations, strict=True):
        if a.name != b.name or len(a.operands) != len(b.operands) or a.has_effect:
            return False
        if len(a.results) != len(b.results) or len(a.bodies) != len(b.bodies):
            return False
        if not same_params(a, b) or not same_operands(a.operands, b.operands):
            return False
        if not all(map(same_program, a.bodies, b.bodies)):
            return False
        renamed.update(zip(a.results, b.results, strict=True))
    return same_operands(one.outputs, other.outputs)
