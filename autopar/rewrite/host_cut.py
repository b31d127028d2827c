"""Which state can lie in host memory, and the step in the order that this needs.

State that reaches no result of the step but state is read by the update alone: moments, averages,
master copies of parameters. The equations that depend on it are *late*. Late equations that share a
late value, or state in host memory, belong together; each such *component* (mostly a parameter with
its moments) can run by itself once the gradients are known, and a group is some of them.

Parameters are read before the update too. Where only casts read them, they can lie in host memory
like the rest: their casts come first (`host_casts`).

What a late equation reads must be kept until it runs. So elementwise equations that only one
component reads run with it, if that lets fewer bytes wait: it is the gradient that waits, in the
type in which the backward pass made it, and not its square and its multiples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar import _jax
from autopar.ir.graph import HEAVY
from autopar.ir.host_memory import HostCut, HostGroup
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.host_casts import CastParameter, cast_parameters, with_casts_once
from autopar.tracer.costs import REDUCTIONS, UNFUSED, aval_bytes

# A step's update is cut into this many groups at most; three of them are on the device at a time.
NUM_GROUPS = 64
# State of less than this share of all that could be in host memory stays on the device.
_SMALLEST_SHARE = 1e-4
_NOT_ELEMENTWISE = frozenset({*UNFUSED, *REDUCTIONS, *HEAVY, "optimization_barrier"})


def hostable_inputs(step: TracedStep) -> tuple[int, ...]:
    """The state, by input index, that can lie in host memory: only the update reads it."""
    seen = _seen_outside_state(step)
    return _replaced_late(step, [i for i, _ in step.state if step.program.inputs[i] not in seen])


def hostable_parameters(step: TracedStep) -> tuple[int, ...]:
    """The parameters, by input index, that can lie in host memory beside all of `hostable_inputs`:
    only the update and casts to a narrower type read them."""
    state = hostable_inputs(step)
    inputs = [i for i, _ in step.state]
    index_of = {step.program.inputs[i]: i for i in inputs}
    parameters = [index_of[value] for value in _cast_parameters(step, inputs)]
    return tuple(i for i in _replaced_late(step, [*state, *parameters]) if i not in state)


def _cast_parameters(step: TracedStep, inputs: Collection[int]) -> dict[int, CastParameter]:
    """Those of these inputs that are read before the update, by casts alone."""
    seen = _seen_outside_state(step)
    values = [step.program.inputs[i] for i in inputs]
    return cast_parameters(step.program, [v for v in values if v in seen], seen)


def _replaced_late(step: TracedStep, inputs: Sequence[int]) -> tuple[int, ...]:
    """Those of these inputs that can be fetched for their update and stored after it: what
    replaces them is made of them. Small ones are not among them."""
    program, new = step.program, dict(step.state)
    casts = _equations(_cast_parameters(step, inputs))
    arrays = [
        i for i in inputs if step.avals[i].shape and not _jax.is_extended_dtype(step.avals[i].dtype)
    ]
    while True:
        components = _Components(program, {program.inputs[i] for i in arrays}, casts)
        kept = [
            i for i in arrays if components.replaces(program.inputs[i], program.outputs[new[i]])
        ]
        if len(kept) == len(arrays):
            break
        arrays = kept
    total = sum(aval_bytes(step.avals[i]) for i in arrays)
    return tuple(i for i in arrays if aval_bytes(step.avals[i]) >= _SMALLEST_SHARE * total)


def _seen_outside_state(step: TracedStep) -> set[int]:
    """Values on which a result that is no state depends, or something that is done beside
    computing (a print, a callback)."""
    program = step.program
    state = {output for _, output in step.state}
    seen = {o for i, o in enumerate(program.outputs) if isinstance(o, int) and i not in state}
    for equation in reversed(program.equations):
        if equation.has_effect or not seen.isdisjoint(equation.results):
            seen.update(equation.inputs)
    return seen


def with_host_state(step: TracedStep, inputs: Collection[int]) -> TracedStep:
    """The step with these inputs, of `hostable_inputs` and `hostable_parameters`, in host
    memory."""
    assert inputs and set(inputs) <= {i for i, _ in step.state}, inputs
    step = with_casts_once(step, _cast_parameters(step, inputs))
    program, casts = step.program, _cast_parameters(step, inputs)
    first = _equations(casts)
    components = _Components(program, {program.inputs[i] for i in inputs}, first)
    components.sink()
    position = {program.inputs[i]: i for i in inputs}
    members: dict[int, list[int]] = {}  # component -> inputs
    for value, index in position.items():
        members.setdefault(components.of_value(value), []).append(index)
    equations: dict[int, list[int]] = {}  # component -> equations
    for index in sorted(components.late):
        equations.setdefault(components.of(index), []).append(index)
    order = sorted(members, key=lambda component: equations[component][0])
    sizes = {c: sum(aval_bytes(step.avals[i]) for i in members[c]) for c in order}
    total = sum(sizes.values())
    packed = _packed(order, sizes, max(total / NUM_GROUPS, *sizes.values()))
    numbers: list[int] = []

    def group(own: Collection[int], held: Collection[int]) -> HostGroup:
        numbers.extend(sorted(own))
        return HostGroup(tuple(sorted(held)), (len(numbers) - len(own), len(numbers)))

    cast_groups = [
        group([i for v in values for i in casts[v].equations], [position[v] for v in values])
        for values in _packed_casts(step, casts)
    ]
    numbers += (i for i in range(len(program.equations)) if i not in components.late | first)
    groups = [
        group([i for c in one for i in equations[c]], [i for c in one for i in members[c]])
        for one in packed
    ]
    largest = max(sum(sizes[c] for c in one) for one in packed)
    return replace(
        step,
        program=replace(program, equations=tuple(program.equations[i] for i in numbers)),
        loop=None if step.loop is None else numbers.index(step.loop),
        host=HostCut(tuple(groups), float(total), float(largest), tuple(cast_groups)),
    )


def _equations(casts: Mapping[int, CastParameter]) -> set[int]:
    return {index for one in casts.values() for index in one.equations}


def _packed_casts(step: TracedStep, casts: Mapping[int, CastParameter]) -> list[list[int]]:
    """Parameters in groups that are cast one after the other, in the order of their first casts."""
    if not casts:
        return []
    sizes = {value: aval_bytes(step.program.avals[value]) for value in casts}
    order = sorted(casts, key=lambda value: casts[value].equations[0])
    return _packed(order, sizes, max(sum(sizes.values()) / NUM_GROUPS, *sizes.values()))


def _packed(order: Sequence[int], sizes: dict[int, int], limit: float) -> list[list[int]]:
    """Neighbours in groups of at most `limit` bytes."""
    groups: list[list[int]] = []
    held = 0
    for component in order:
        if not groups or held + sizes[component] > limit:
            groups.append([])
            held = 0
        groups[-1].append(component)
        held += sizes[component]
    return groups


class _Components:
    """Late equations, and which of them belong together. `casts`: equations that read state in host
    memory before.

    late: indices of equations that run after all others.
    """

    def __init__(self, program: Program, hosted: set[int], casts: Collection[int]) -> None:
        self.program, self.hosted = program, hosted
        self.late: set[int] = set()
        self.maker: dict[int, int] = {}  # late value -> its equation
        self.parent: dict[int, int] = {}  # of equations, and of ~value for state in host memory
        for value in hosted:
            self.parent[~value] = ~value
        for index, equation in enumerate(program.equations):
            if index in casts:
                continue
            sources = [self._source(v) for v in equation.inputs]
            sources = [source for source in sources if source is not None]
            if sources:
                self._add(index, equation)
                for source in sources:
                    self._join(index, source)

    def _source(self, value: int) -> int | None:
        return ~value if value in self.hosted else self.maker.get(value)

    def _add(self, index: int, equation: Equation) -> None:
        self.late.add(index)
        self.parent[index] = index
        self.maker.update(dict.fromkeys(equation.results, index))

    def _join(self, one: int, other: int) -> None:
        self.parent[self.of(one)] = self.of(other)

    def of(self, index: int) -> int:
        """The component of a late equation."""
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def of_value(self, value: int) -> int:
        """The component of state in host memory."""
        return self.of(~value)

    def replaces(self, value: int, new: Operand) -> bool:
        """Whether state in host memory is updated to `new` with its own component."""
        made = self.maker.get(new) if isinstance(new, int) else None
        return made is not None and self.of(made) == self.of_value(value)

    def sink(self) -> None:
        """Make elementwise equations late that only one component reads, where fewer bytes wait
        so: the square of a gradient and its multiples are all made late, of the gradient."""
        readers = self.program.readers()
        component = self._sinkable(readers)
        wait_for = self._least_to_keep(component)
        needed = {v for i in self.late for v in self.program.equations[i].inputs}
        for index in sorted(component, reverse=True):
            equation = self.program.equations[index]
            kept = any(wait_for.get(value) == {value} for value in equation.results)
            if kept or needed.isdisjoint(equation.results):
                continue
            read_by = {i for value in equation.results for i in readers.get(value, ())}
            if read_by <= self.late:
                self._add(index, equation)
                self._join(index, next(iter(read_by)))
                needed.update(equation.inputs)

    def _sinkable(self, readers: dict[int, list[int]]) -> dict[int, int]:
        """Elementwise equations that one component alone needs -> that component."""
        outputs = set(self.program.output_values)
        found = {index: self.of(index) for index in self.late}
        for index in reversed(range(len(self.program.equations))):
            equation = self.program.equations[index]
            if index in self.late or not _is_elementwise(equation):
                continue
            read_by = {i for value in equation.results for i in readers.get(value, ())}
            components = {found.get(i) for i in read_by}
            if len(components) == 1 and outputs.isdisjoint(equation.results):
                only = components.pop()
                if only is not None:
                    found[index] = only
        return {index: one for index, one in found.items() if index not in self.late}

    def _least_to_keep(self, component: dict[int, int]) -> dict[int, set[int]]:
        """Per value of these equations, the values that must wait for it to be made late: itself,
        or those that it is made of, if they have no more bytes. What waits in any case has none."""
        program = self.program
        free = {*program.inputs, *(value for value, _ in program.captured)}
        made = {v for index in component for v in program.equations[index].results}
        free.update(v for i in self.late for v in program.equations[i].inputs if v not in made)
        least: dict[int, set[int]] = {}
        for index in sorted(component):
            equation = program.equations[index]
            sources: set[int] = set()
            for value in equation.inputs:
                sources |= set() if value in free else least.get(value, {value})
            fewer = self._bytes(sources) <= self._bytes(equation.results)
            for value in equation.results:
                least[value] = sources if fewer else {value}
        return least

    def _bytes(self, values: Collection[int]) -> int:
        return sum(aval_bytes(self.program.avals[value]) for value in values)


def _is_elementwise(equation: Equation) -> bool:
    is_plain = bool(equation.results) and not equation.bodies and not equation.has_effect
    return is_plain and equation.name not in _NOT_ELEMENTWISE
