"""Which state can lie in host memory, and the step in the order that this needs.

State that reaches no result of the step but state is read by the update alone: moments, averages,
master copies of parameters. The equations that depend on it are *late*. Late equations that share a
late value, or state in host memory, belong together; each such *component* (mostly a parameter with
its moments) can run by itself once the gradients are known, and a group is some of them.

What a late equation reads must be kept until it runs. So elementwise equations that only one
component reads run with it, if that lets fewer bytes wait: it is the gradient that waits, in the
type in which the backward pass made it, and not its square and its multiples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar import _jax
from autopar.ir.graph import HEAVY
from autopar.ir.host_memory import HostCut, HostGroup
from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.tracer.costs import REDUCTIONS, UNFUSED, aval_bytes

# A step's update is cut into this many groups at most; three of them are on the device at a time.
NUM_GROUPS = 64
# State of less than this share of all that could be in host memory stays on the device.
_SMALLEST_SHARE = 1e-4
_NOT_ELEMENTWISE = frozenset({*UNFUSED, *REDUCTIONS, *HEAVY, "optimization_barrier"})


def hostable_inputs(step: TracedStep) -> tuple[int, ...]:
    """The state, by input index, that can lie in host memory."""
    program = step.program
    seen = _seen_outside_state(step)
    made = {value for equation in program.equations for value in equation.results}
    found = []
    for index, output in step.state:
        value, new = program.inputs[index], program.outputs[output]
        aval = step.avals[index]
        if value in seen or not isinstance(new, int) or new not in made:
            continue
        if aval.shape and not _jax.is_extended_dtype(aval.dtype):
            found.append(index)
    total = sum(aval_bytes(step.avals[i]) for i in found)
    return tuple(i for i in found if aval_bytes(step.avals[i]) >= _SMALLEST_SHARE * total)


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
    """The step with these inputs, of `hostable_inputs`, in host memory."""
    assert inputs and set(inputs) <= {i for i, _ in step.state}, inputs
    program = step.program
    components = _Components(program, {program.inputs[i] for i in inputs})
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
    early = [i for i in range(len(program.equations)) if i not in components.late]
    numbers, groups = list(early), []
    for group in packed:
        own = sorted(i for component in group for i in equations[component])
        held = tuple(sorted(i for component in group for i in members[component]))
        groups.append(HostGroup(held, (len(numbers), len(numbers) + len(own))))
        numbers += own
    largest = max(sum(sizes[c] for c in group) for group in packed)
    return replace(
        step,
        program=replace(program, equations=tuple(program.equations[i] for i in numbers)),
        loop=None if step.loop is None else numbers.index(step.loop),
        host=HostCut(tuple(groups), float(total), float(largest)),
    )


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
    """Late equations, and which of them belong together.

    late: indices of equations that run after all others.
    """

    def __init__(self, program: Program, hosted: set[int]) -> None:
        self.program, self.hosted = program, hosted
        self.late: set[int] = set()
        self.maker: dict[int, int] = {}  # late value -> its equation
        self.parent: dict[int, int] = {}  # of equations, and of ~value for state in host memory
        for value in hosted:
            self.parent[~value] = ~value
        for index, equation in enumerate(program.equations):
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
