"""From a step that scans over its layers to one in which they are written out, trip by trip.

A scan over layers has weights among the slices that it reads: parameters stacked along a first
dimension. Stages that run trips 4 to 7 should hold those of trips 4 to 7 alone, so each trip reads
a static slice of its own. What JAX's derivative stacks in the forward scan for the backward scan is
handed from trip to trip; only what other equations read is stacked. What JAX moved out of the loop
since all trips share it, a mask broadcast to the batch, is made in each trip again: a small value
is shared, the large one never crosses between layers. Modules get numbers, as if the layers had
been written one by one: `GPT/layers/attention` becomes `GPT/layers_3/attention`, in the backward
pass too.

A scan is over layers if in its body a product takes the carry, or what is made of it, by what is
made of slices of parameters alone. So a scan over time (weights are constants of the loop), over
chunks of a vocabulary (the carry meets no weights) or over micro-batches is left as it is; and so
is a loop that runs one layer with the same weights again and again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jax import lax

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.layers import Flow, products
from autopar.rewrite.program_writer import Env, ProgramWriter
from autopar.rewrite.residuals import is_cheap
from autopar.rewrite.scan_remat import live_equations, scan_parts
from autopar.tracer.copy_equations import Copier
from autopar.tracer.regions import BACKWARD, UPDATE


def unrolled(step: TracedStep) -> TracedStep:
    """The step with its scans over layers written out; the step itself if it has none. Traces of
    one step at two batch sizes are changed alike."""
    program = step.program
    while (written := _written_out(program, step.batch)) is not None:
        program = written  # a trip may hold a scan over layers in turn
    return step if program is step.program else replace(step, program=program)


@dataclass(frozen=True)
class _Names:
    """What the trips of a scan, forward and backward, are called: `layers_0`, `layers_1` …"""

    name: str
    first: int

    def of(self, trip: int) -> str:
        return f"{self.name}_{self.first + trip}"


def _written_out(program: Program, batch: Collection[int]) -> Program | None:
    chosen = _scans_over_layers(program, batch)
    return _Unroller(program, chosen).run() if chosen else None


# -- which scans


def _scans_over_layers(program: Program, batch: Collection[int]) -> dict[int, _Names]:
    """The scans to write out, by their place among the equations."""
    flow = Flow(program, batch)
    chosen: dict[int, _Names] = {}
    stacks: dict[int, _Names] = {}  # results of scans that are written out
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
        if not moving.isdisjoint(read):
            moving.update(equation.results)
        elif all(o in weights or o in shared for o in read):
            made = weights if not weights.isdisjoint(read) else shared
            made.update(equation.results)
    return False


def _stacks(scan: Equation) -> tuple[int, ...]:
    return scan.results[_jax.scan_sizes(scan.params)[1] :]


def _module_of(scan: Equation) -> str:
    """The module that all products of the body are in, or simply `layer`."""
    names = {_jax.first_name(product.name_stack) for product in products(scan)}
    name = names.pop() if len(names) == 1 else None
    return name if name is not None and name.isidentifier() else "layer"


# -- writing


class _Unroller:
    def __init__(self, program: Program, chosen: dict[int, _Names]) -> None:
        self.program = program
        self.chosen = chosen
        self.writer = ProgramWriter()
        self.env: Env = {}
        self.stage_programs: dict[int, list[Operand]] = {}  # stack -> what each trip made of it
        self.stacked: dict[int, list[Operand]] = {}  # stack -> what the user made it of
        self.slices: dict[tuple[int, int], Operand] = {}  # (stack, trip)
        self.spread: dict[tuple[int, str], int] = {}  # (value, name of the trip)
        self.broadcasts = {
            e.results[0]: e for e in program.equations if is_cheap(e) and self.enlarges(e)
        }
        self.stacks = {stack for index in chosen for stack in _stacks(program.equations[index])}
        self.read_whole = set(program.output_values)
        for index, equation in enumerate(program.equations):
            if self.taken_apart(equation) is not None:
                continue
            operands = equation.operands
            if index in chosen:
                parts = scan_parts(equation, operands)
                operands = (*parts.consts, *parts.carry)
            self.read_whole.update(values_in(operands))

    def taken_apart(self, equation: Equation) -> int | None:
        """What a scan that is written out stacked, if the equation gives back its slices."""
        if equation.name != "unstack" or equation.params["axis"] != 0:
            return None
        (stack,) = equation.operands
        return stack if isinstance(stack, int) and stack in self.stacks else None

    def enlarges(self, equation: Equation) -> bool:
        """Whether its result is larger than all that it reads, which is something."""

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
            elif (stack := self.taken_apart(equation)) is not None:
                self.env.update(zip(equation.results, self.stage_programs[stack], strict=True))
            else:
                writer.copy(equation, program.avals, self.env)
            if equation.name == "stack" and equation.params["axis"] == 0:
                self.stacked[equation.results[0]] = [self.outside(o) for o in equation.operands]
        outputs = [self.outside(o) for o in program.outputs]
        writer.equations = list(live_equations(writer.equations, outputs))
        return writer.program(inputs, outputs)

    def outside(self, operand: Operand) -> Operand:
        return self.env[operand] if isinstance(operand, int) else operand

    def scan(self, scan: Equation, names: _Names) -> None:
        (body,) = scan.bodies
        own, given = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
        env: Env = {}
        for value, array in body.captured:
            env[value] = self.writer.capture(array, self.program.avals[value])
        moving = [self.outside(o) for o in given.carry]
        num_carry = len(moving)
        made: list[list[Operand]] = [[] for _ in scan.results[num_carry:]]
        unshielded = _computes_again(body)
        trips = range(scan.params["length"])
        for trip in reversed(trips) if scan.params["reverse"] else trips:
            inside = dict(env)
            inside.update(zip(own.carry, moving, strict=True))
            stack = scan.name_stack.extend(names.of(trip))
            like = replace(scan, name_stack=stack, scope=str(stack))
            for value, const in zip(own.consts, given.consts, strict=True):
                inside[value] = self.const(const, names.of(trip), like)
            for value, x in zip(own.xs, given.xs, strict=True):
                inside[value] = self.slice(x, trip, like)
            if unshielded:
                kept = [
                    v
                    for v, x in zip(own.xs, given.xs, strict=True)
                    if isinstance(x, int) and x in self.stage_programs
                ]
                self.shield(inside, [*kept, *own.carry], like)
            self.trip(scan, body, inside, names.name, names.of(trip))
            outputs = [inside[o] if isinstance(o, int) else o for o in body.outputs]
            moving = outputs[:num_carry]
            for stage_programs, stage_program in zip(made, outputs[num_carry:], strict=True):
                stage_programs.append(stage_program)
        self.env.update(zip(scan.results, moving, strict=False))
        for stack, stage_programs in zip(scan.results[num_carry:], made, strict=True):
            self.stage_programs[stack] = (
                stage_programs[::-1] if scan.params["reverse"] else stage_programs
            )
            if stack in self.read_whole:
                self.env[stack] = self.writer.emit(_stacked, self.stage_programs[stack], scan)

    def const(self, value: Operand, name: str, like: Equation) -> Operand:
        """What all trips read, in the trip of this name; the backward trip reads the forward's."""
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
        """What a trip reads of a stack, as one equation for all trips that read it."""
        if not isinstance(stack, int):
            return self.writer.emit(_taken, [stack], like, index=trip)
        if stack in self.stage_programs:
            return self.stage_programs[stack][trip]
        if stack in self.stacked:
            return self.stacked[stack][trip]
        if (stack, trip) not in self.slices:
            taken = self.writer.emit(_taken, [self.env[stack]], like, index=trip)
            self.slices[stack, trip] = taken
        return self.slices[stack, trip]

    def shield(self, env: Env, values: list[int], like: Equation) -> None:
        """A barrier in front of what a backward trip computes again: in a loop it needs none, but
        written out XLA would merge it with the forward trip."""
        values = [v for v in values if isinstance(env[v], int)]
        copier = Copier(self.writer.avals)
        renamed: dict[int, int] = {}
        shielded = dict.fromkeys(o for v in values if isinstance(o := env[v], int))
        self.writer.equations.append(copier.barrier(shielded, like, renamed))
        env.update((v, renamed[o]) for v in values if isinstance(o := env[v], int))

    def trip(self, scan: Equation, body: Program, env: Env, name: str, new: str) -> None:
        """The body once, with `new` in place of the module's name."""
        writer = self.writer
        first = len(writer.equations)
        for equation in body.equations:
            writer.copy(equation, self.program.avals, env)
        stacks: dict[Any, tuple[Any, str]] = {}
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


def _named_below(body: Program, around: Any) -> Program:
    """Name stacks in a loop are relative to it, scopes are not."""
    equations = []
    for equation in body.equations:
        stack = around + equation.name_stack
        bodies = tuple(_named_below(inner, stack) for inner in equation.bodies)
        equations.append(replace(equation, scope=str(stack), bodies=bodies))
    return replace(body, equations=tuple(equations))


def _computes_again(body: Program) -> bool:
    """Whether the body has code of `jax.checkpoint` without the barrier that it has elsewhere."""
    if any(e.name == "optimization_barrier" for e in body.equations):
        return False
    return any("rematted_computation" in e.scope for e in body.equations)


def _taken(stack: Any, *, index: int) -> Any:
    return lax.index_in_dim(stack, index, keepdims=False)


def _stacked(*stage_programs: Any) -> Any:
    return lax.concatenate(
        [lax.expand_dims(stage_program, (0,)) for stage_program in stage_programs], 0
    )
