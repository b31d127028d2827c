"""From a `TracedStep` that scans over its layers to one with these scans unrolled.

A scan over layers reads slices of weights: parameters stacked along a first dimension. A stage that
runs trips 4 to 7 should hold only their weights, so each trip reads a static slice. Residuals that
JAX's derivative stacks in the forward scan are handed from trip to trip; a stack is made only if
other equations read it. JAX moves values that all trips share out of the loop, such as a mask
broadcast to the batch; each trip recomputes these, so that the small value is shared and the large
one never crosses between layers. Modules get numbers, as if the layers had been written one by one:
`GPT/layers/attention` becomes `GPT/layers_3/attention`, in the backward pass too.

A scan is over layers if a product in its body multiplies the carry, or a value made from it, by
values made only from slices of parameters. So scans over time (weights are constants of the loop),
over chunks of a vocabulary (the carry meets no weights) and over micro-batches stay; and so does a
loop that runs one layer with the same weights again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

from jax import Array, lax

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.layers import Flow, products
from autopar.rewrite.program_writer import Env, ProgramWriter, read_all
from autopar.rewrite.residuals import is_cheap
from autopar.rewrite.row_sources import row_source, rows_grouped
from autopar.rewrite.scan_remat import live_equations, scan_parts
from autopar.tracer.copy_equations import Copier
from autopar.tracer.regions import BACKWARD, UPDATE


def unroll_scans(step: TracedStep) -> TracedStep:
    """The step with its scans over layers unrolled; the step itself if it has none. Traces of one
    step at two batch sizes change in the same way."""
    program = step.program
    while any(equation.name == "scan" for equation in program.equations):
        flow = Flow(program, step.batch)
        chosen = _scans_over_layers(program, flow)
        if not chosen:
            break
        # A trip may contain a scan over layers again.
        program = _Unroller(program, chosen, flow.persistent).run()
    return step if program is step.program else replace(step, program=program)


@dataclass(frozen=True)
class _Names:
    """The names of a scan's trips, forward and backward: `layers_0`, `layers_1` …"""

    name: str
    first: int

    def of(self, trip: int) -> str:
        return f"{self.name}_{self.first + trip}"


# -- which scans


def _scans_over_layers(program: Program, flow: Flow) -> dict[int, _Names]:
    """{index of a scan to unroll: the names of its trips}."""
    chosen: dict[int, _Names] = {}
    stacks: dict[int, _Names] = {}  # results of scans to unroll
    weights: dict[tuple[int, int], _Names] = {}  # (stacked parameters, trips)
    trips_so_far: dict[tuple[str, str], int] = {}
    for index, equation in enumerate(program.equations):
        if equation.name != "scan" or equation.params["length"] < 2:
            continue
        length, region = equation.params["length"], flow.regions[index]
        if region == UPDATE or not products(equation):
            continue
        values = values_in(scan_parts(equation, equation.operands).xs)
        names = next((stacks[x] for x in values if x in stacks), None)
        if names is None or region != BACKWARD:
            if not _is_over_layers(equation, flow.persistent):
                continue
            known = (weights[x, length] for x in values if (x, length) in weights)
            names = next(known, None) if region == BACKWARD else None
        if names is None:
            name = _module_of(equation)
            key = (equation.scope, name)
            names = _Names(name, trips_so_far.get(key, 0))
            trips_so_far[key] = names.first + length
        chosen[index] = names
        stacks.update((stack, names) for stack in _stacks(equation))
        weights.update(((x, length), names) for x in values if x in flow.persistent)
    return chosen


def _is_over_layers(scan: Equation, persistent: Collection[int]) -> bool:
    (body,) = scan.bodies
    inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
    weights = {
        v
        for v, x in zip(inside.xs, outside.xs, strict=True)
        if isinstance(x, int) and x in persistent
    }
    shared = {
        v
        for v, c in zip(inside.consts, outside.consts, strict=True)
        if not isinstance(c, int) or c in persistent
    }
    shared.update(value for value, _ in body.captured)
    moving = set(inside.carry)
    for equation in body.equations:
        read = equation.inputs
        if products(equation) and not moving.isdisjoint(read) and not weights.isdisjoint(read):
            return True
        if equation.name == "optimization_barrier":
            for operand, result in zip(equation.operands, equation.results, strict=True):
                for made in (moving, weights, shared):
                    if operand in made:
                        made.add(result)
        elif not moving.isdisjoint(read):
            moving.update(equation.results)
        elif all(o in weights or o in shared for o in read):
            made = weights if not weights.isdisjoint(read) else shared
            made.update(equation.results)
    return False


def _stacks(scan: Equation) -> tuple[int, ...]:
    return scan.results[_jax.scan_sizes(scan.params)[1] :]


def _module_of(scan: Equation) -> str:
    """The module of all products in the body, or simply `layer`."""
    names = {_jax.first_name(product.name_stack) for product in products(scan)}
    name = names.pop() if len(names) == 1 else None
    return name if name is not None and name.isidentifier() else "layer"


# -- writing


class _Unroller:
    def __init__(
        self, program: Program, chosen: dict[int, _Names], persistent: Collection[int]
    ) -> None:
        self.program = program
        self.chosen = chosen
        self.persistent = persistent
        self.writer = ProgramWriter()
        self.env: Env = {}
        self.maker = {r: e for e in program.equations for r in e.results}
        self.trip_slices: dict[int, list[Operand]] = {}  # stack -> the slice each trip made
        self.rows: dict[int, Operand] = {}  # array with one row -> that row
        self.stacked: dict[int, list[Operand]] = {}  # stack -> the rows the user stacked
        self.slices: dict[tuple[int, ...], Operand] = {}  # (stack, trips), the outer ones first
        self.spread: dict[tuple[int, str], int] = {}  # (value, name of the trip)
        self.broadcasts = {
            e.results[0]: e for e in program.equations if is_cheap(e) and self.enlarges(e)
        }
        self.stacks = {stack for index in chosen for stack in _stacks(program.equations[index])}
        self.read_whole = set(program.output_values)
        for index, equation in enumerate(program.equations):
            if self.trip_of(equation) is not None:
                continue
            operands = equation.operands
            if index in chosen:
                parts = scan_parts(equation, operands)
                operands = (*parts.consts, *parts.carry)
            self.read_whole.update(values_in(operands))

    def trip_of(self, equation: Equation) -> tuple[int, int] | None:
        """The stack of an unrolled scan and the trip, if the equation takes that trip's slice."""
        if equation.name != "slice" or not self.stacks.intersection(equation.inputs):
            return None
        (stack,) = equation.inputs
        (_, *rest), aval = self.program.avals[stack].shape, self.program.avals[equation.results[0]]
        return (stack, equation.params["start_indices"][0]) if aval.shape == (1, *rest) else None

    def enlarges(self, equation: Equation) -> bool:
        """Whether it has operands, and a result larger than all of them."""

        def size(values: Collection[int]) -> int:
            return sum(prod(self.program.avals[v].shape) for v in values)

        read = equation.inputs
        return bool(read) and size(equation.results) > size(read)

    def run(self) -> Program:
        program, writer = self.program, self.writer
        inputs = [writer.new_value(program.avals[v]) for v in program.inputs]
        self.env.update(zip(program.inputs, inputs, strict=True))
        for value, array in program.captured:
            self.env[value] = writer.capture(array, program.avals[value])
        for index, equation in enumerate(program.equations):
            if index in self.chosen:
                self.scan(equation, self.chosen[index])
            elif (taken := self.trip_of(equation)) is not None:
                row = self.trip_slices[taken[0]][taken[1]]
                self.env[equation.results[0]] = writer.emit(_one_row, [row], equation)
                self.rows[equation.results[0]] = row
            elif not self.unwrap(equation):
                writer.copy(equation, program.avals, self.env)
                self.note_rows(equation)
        outputs = [self.outside(o) for o in program.outputs]
        equations = list(live_equations(writer.equations, outputs))
        writer.equations = _thin_barriers(equations, outputs)
        return writer.program(inputs, outputs)

    def unwrap(self, equation: Equation) -> bool:
        """Whether the equation's result is the only row of an array that had been a row before."""
        if equation.name != "squeeze" or equation.params["dimensions"] != (0,):
            return False
        (array,) = equation.operands
        if not isinstance(array, int) or array not in self.rows:
            return False
        self.env[equation.results[0]] = self.rows[array]
        return True

    def note_rows(self, equation: Equation) -> None:
        """Note an array of one row, and one that the user joined from such."""
        operands, results = equation.operands, equation.results
        if equation.name == "broadcast_in_dim" and equation.inputs:
            shape = self.program.avals[equation.inputs[0]].shape
            if equation.params["shape"] == (1, *shape):
                self.rows[results[0]] = self.outside(operands[0])
        elif equation.name == "concatenate" and equation.params["dimension"] == 0:
            rows = [self.rows[o] for o in operands if isinstance(o, int) and o in self.rows]
            if len(rows) == len(operands):
                self.stacked[results[0]] = rows

    def outside(self, operand: Operand) -> Operand:
        return self.env[operand] if isinstance(operand, int) else operand

    def scan(self, scan: Equation, names: _Names) -> None:
        (body,) = scan.bodies
        inputs, operands = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
        env: Env = {}
        for value, array in body.captured:
            env[value] = self.writer.capture(array, self.program.avals[value])
        carry = [self.outside(o) for o in operands.carry]
        num_carry = len(carry)
        made: list[list[Operand]] = [[] for _ in scan.results[num_carry:]]
        unshielded = _is_unshielded(body)
        trips = range(scan.params["length"])
        for trip in reversed(trips) if scan.params["reverse"] else trips:
            inside = dict(env)
            inside.update(zip(inputs.carry, carry, strict=True))
            stack = scan.name_stack.extend(names.of(trip))
            like = replace(scan, name_stack=stack, scope=str(stack))
            for value, const in zip(inputs.consts, operands.consts, strict=True):
                inside[value] = self.const(const, names.of(trip), like)
            for value, x in zip(inputs.xs, operands.xs, strict=True):
                inside[value] = self.slice(x, trip, like)
            if unshielded:
                residuals = [
                    v
                    for v, x in zip(inputs.xs, operands.xs, strict=True)
                    if isinstance(x, int) and x in self.trip_slices
                ]
                self.shield(inside, [*residuals, *inputs.carry], like)
            self.trip(scan, body, inside, names.name, names.of(trip))
            outputs = read_all(body.outputs, inside)
            carry = outputs[:num_carry]
            for slices, output in zip(made, outputs[num_carry:], strict=True):
                slices.append(output)
        self.env.update(zip(scan.results, carry, strict=False))
        for stack, slices in zip(scan.results[num_carry:], made, strict=True):
            self.trip_slices[stack] = slices[::-1] if scan.params["reverse"] else slices
            if stack in self.read_whole:
                self.env[stack] = self.writer.emit(_stacked, self.trip_slices[stack], scan)

    def const(self, value: Operand, name: str, like: Equation) -> Operand:
        """A value that all trips read, for the trip of this name, forward and backward."""
        if not isinstance(value, int) or value not in self.broadcasts:
            return self.outside(value)
        if (value, name) not in self.spread:
            source = self.broadcasts[value]
            env: Env = {o: self.const(o, name, like) for o in source.inputs}
            self.writer.copy(source, self.program.avals, env)
            made = self.writer.equations[-1]
            names = {"scope": like.scope, "name_stack": like.name_stack}
            self.writer.equations[-1] = replace(made, **names)
            self.spread[value, name] = made.results[0]
        return self.spread[value, name]

    def slice(self, stack: Operand, trip: int, like: Equation) -> Operand:
        """A trip's slice of a stack, one equation for all trips that read it."""
        if not isinstance(stack, int):
            return self.writer.emit(_indices, [stack], like, indices=(trip,))
        if stack in self.trip_slices:
            return self.trip_slices[stack][trip]
        if stack in self.stacked:
            return self.stacked[stack][trip]
        array, row = row_source(self.unshielded(stack), trip, self.maker, self.program.avals)
        if (grouped := rows_grouped(array, self.maker, self.program.avals)) is not None:
            array, size = grouped
            key = array, row * size, size, -1
            if key not in self.slices:
                rows = {"first": row * size, "last": (row + 1) * size}
                self.slices[key] = self.writer.emit(_rows, [self.env[array]], like, **rows)
            return self.slices[key]
        array, trips = self.trips_taken(array)
        key = array, *trips, row
        if key not in self.slices:
            indices = (*trips, row)
            self.slices[key] = self.writer.emit(_indices, [self.env[array]], like, indices=indices)
        return self.slices[key]

    def unshielded(self, value: int) -> int:
        """Parameters in front of the barrier of an outer trip that is computed again: its layers
        read those of the forward pass, and what they are multiplied by is behind the barrier."""
        maker = self.maker.get(value)
        while maker is not None and maker.name == "optimization_barrier":
            operand = maker.operands[maker.results.index(value)]
            if not isinstance(operand, int) or operand not in self.persistent:
                break
            value = operand
            maker = self.maker.get(value)
        return value

    def trips_taken(self, value: int) -> tuple[int, tuple[int, ...]]:
        """(an array, the trips of outer scans that take the value from it): a slice of a slice is
        one of both dimensions."""
        squeeze = self.maker.get(value)
        if squeeze is None or squeeze.name != "squeeze":
            return value, ()
        taken = self.maker.get(squeeze.inputs[0]) if squeeze.inputs else None
        if taken is None or taken.name != "slice" or not taken.inputs:
            return value, ()
        shape = self.program.avals[taken.inputs[0]].shape
        depth = len(squeeze.params["dimensions"])
        starts, limits = taken.params["start_indices"], taken.params["limit_indices"]
        is_trip = (
            tuple(squeeze.params["dimensions"]) == tuple(range(depth))
            and not any(starts[depth:])
            and tuple(limits) == (*(start + 1 for start in starts[:depth]), *shape[depth:])
            and taken.params["strides"] is None
        )
        return (taken.inputs[0], tuple(starts[:depth])) if is_trip else (value, ())

    def shield(self, env: Env, values: list[int], like: Equation) -> None:
        """Puts a barrier in front of a backward trip's recomputation: a loop needs none, but
        unrolled XLA would merge it with the forward trip."""
        values = [v for v in values if isinstance(env[v], int)]
        copier = Copier(self.writer.avals)
        renamed: dict[int, int] = {}
        shielded = dict.fromkeys(o for v in values if isinstance(o := env[v], int))
        self.writer.equations.append(copier.barrier(shielded, like, renamed))
        env.update((v, renamed[o]) for v in values if isinstance(o := env[v], int))

    def trip(self, scan: Equation, body: Program, env: Env, name: str, new: str) -> None:
        """Copies the body, with `new` instead of the module's name."""
        writer = self.writer
        first = len(writer.equations)
        for equation in body.equations:
            writer.copy(equation, self.program.avals, env)
        stacks: dict[_jax.NameStack, tuple[_jax.NameStack, str]] = {}
        for index in range(first, len(writer.equations)):
            equation = writer.equations[index]
            if equation.name_stack not in stacks:
                stack = scan.name_stack + _jax.renamed_first(equation.name_stack, name, new)
                stacks[equation.name_stack] = stack, str(stack)
            stack, scope = stacks[equation.name_stack]
            writer.equations[index] = replace(
                equation,
                name_stack=stack,
                scope=scope,
                bodies=tuple(_named_below(body, stack) for body in equation.bodies),
                inner_marks=(*equation.inner_marks, *scan.inner_marks),
            )


def _thin_barriers(equations: list[Equation], outputs: Sequence[Operand]) -> list[Equation]:
    """Without results of barriers that nothing reads."""
    read = {*values_in(outputs), *(v for e in equations for v in e.inputs)}
    thinned = []
    for equation in equations:
        if equation.name == "optimization_barrier" and not read.issuperset(equation.results):
            pairs = zip(equation.operands, equation.results, strict=True)
            kept = [(operand, result) for operand, result in pairs if result in read]
            operands, results = (tuple(each) for each in zip(*kept, strict=True))
            equation = equation.of_values(operands, results)
        thinned.append(equation)
    return thinned


def _named_below(body: Program, around: _jax.NameStack) -> Program:
    """The body with full scopes; name stacks in a loop stay relative to it."""
    equations = []
    for equation in body.equations:
        stack = around + equation.name_stack
        bodies = tuple(_named_below(inner, stack) for inner in equation.bodies)
        equations.append(replace(equation, scope=str(stack), bodies=bodies))
    return replace(body, equations=tuple(equations))


def recomputes(program: Program) -> bool:
    """Whether the program has code of `jax.checkpoint`, in a loop or outside."""
    return any("rematted_computation" in e.scope for e in program.all_equations())


def _is_unshielded(body: Program) -> bool:
    """Whether the body has code of `jax.checkpoint` without the barrier that it has elsewhere."""
    barrier = any(e.name == "optimization_barrier" for e in body.equations)
    return not barrier and any("rematted_computation" in e.scope for e in body.equations)


def _indices(stack: Array, *, indices: tuple[int, ...]) -> Array:
    rest = stack.shape[len(indices) :]
    starts, limits = (*indices, *[0] * len(rest)), (*(i + 1 for i in indices), *rest)
    return lax.squeeze(lax.slice(stack, starts, limits), range(len(indices)))


def _rows(stack: Array, *, first: int, last: int) -> Array:
    return lax.slice_in_dim(stack, first, last)


def _stacked(*slices: Array) -> Array:
    return lax.concatenate([_one_row(array) for array in slices], 0)


def _one_row(row: Array) -> Array:
    return lax.expand_dims(row, (0,))
