"""From a looped step and the stages of its layers to one step per stage: `StageSlice`s.

A stage's step is a program like any other, with a smaller loop over micro-batches: it takes its own
arguments and what other stages send it (a stack over micro-batches, if it is sent for each), and
gives its own results and what it sends. So it is sharded by the passes that shard whole steps. All
stages number values alike. How a stage's step is cut into the stage programs that run one after
another is decided here too, as sets of equations; `lower.stage_programs` makes programs of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import ANYWHERE, LoopLayers
from autopar.rewrite.residuals import thin_residuals
from autopar.rewrite.split_sums import part_sums
from autopar.rewrite.stage_placement import StagePlacement, find_homes


@dataclass(frozen=True)
class StageSlice:
    """One stage's step and how it is cut.

    step:      its program, with one loop (`step.loop`), and its arguments and results.
    inputs:    positions among the whole step's inputs of its own arguments, which come first.
    outputs:   positions among the whole step's outputs of its own results, which come first.
    received:  (value outside the loop, the stage it comes from), in the order of its inputs.
    arrivals:  (value inside the loop, the stage it comes from): the last of its inputs are stacks
               of them.
    sent:      values outside the loop that others receive, in the order of its outputs.
    departures: values inside the loop that others receive: the last of its outputs are stacks.
    stacks:    the stacks of arrivals and departures, which exist for the solver alone.
    forward, backward: equations of the loop's body, by position; what both need is in both.
    parts:     per equation outside the loop, the part of prologue or epilogue that it runs in.
    """

    step: TracedStep
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    received: tuple[tuple[int, int], ...]
    arrivals: tuple[tuple[int, int], ...]
    sent: tuple[int, ...]
    departures: tuple[int, ...]
    stacks: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def loop(self) -> Equation:
        assert self.step.loop is not None
        return self.step.program.equations[self.step.loop]

    @property
    def body(self) -> Program:
        return self.loop.bodies[0]

    def kept_values(self) -> frozenset[int]:
        """Values of a micro-batch that the backward stage program reads and does not make."""
        num_consts, num_carry = _jax.scan_sizes(self.loop.params)
        given = {*self.body.inputs[: num_consts + num_carry], *(v for v, _ in self.body.captured)}
        equations = [self.body.equations[i] for i in self.backward]
        made = {r for e in equations for r in e.results}
        read = {v for e in equations for v in e.inputs}
        return frozenset(read - made - given)


@dataclass(frozen=True)
class SlicedStep:
    """The stages' steps. `program` is the whole one that they were cut from."""

    stages: tuple[StageSlice, ...]
    program: Program
    num_parts: tuple[int, int]  # of prologue and epilogue


def slice_step(
    step: TracedStep,
    layers: LoopLayers,
    stage_of_layer: Sequence[int],
    owners: Mapping[int, int] | None = None,
) -> SlicedStep:
    """`stage_of_layer`: ascending, from 0. `owners`: stages of inputs, by position, that lie
    somewhere already."""
    assert step.loop is not None
    body = step.program.equations[step.loop].bodies[0]
    backward_results = {
        r
        for equation, is_backward in zip(body.equations, layers.is_backward, strict=True)
        if is_backward
        for r in equation.results
    }
    stage_of = [ANYWHERE if x == ANYWHERE else stage_of_layer[x] for x in layers.layer_of]
    num_stages = stage_of_layer[-1] + 1
    program, loop, stage_of = part_sums(step.program, step.loop, stage_of)
    program = _with_constant_outputs(program)
    step = replace(step, program=program, loop=loop)
    homes = find_homes(program, loop, stage_of, num_stages, step.state, owners)
    cutter = _StageSlicer(step, homes, stage_of, backward_results)
    stages = tuple(cutter.stage(s) for s in range(num_stages))
    return SlicedStep(stages, program, homes.num_parts)


def equation_layers(step: TracedStep, layers: LoopLayers) -> list[int]:
    """The layer of every equation of a looped step, loops' bodies numbered right after them, or
    `ANYWHERE` for what several layers share."""
    assert step.loop is not None
    homes = find_homes(step.program, step.loop, layers.layer_of, len(layers.layers), step.state)
    found: list[int] = []

    def add(equation: Equation, layer: int) -> None:
        found.append(layer)
        for body in equation.bodies:
            for inner in body.equations:
                add(inner, layer)

    for index, equation in enumerate(step.program.equations):
        if index == step.loop:
            found.append(ANYWHERE)
            for inner, layer in zip(equation.bodies[0].equations, layers.layer_of, strict=True):
                add(inner, layer)
            continue
        stages = homes.stages[index]
        add(equation, min(stages) if len(stages) == 1 else ANYWHERE)
    return found


def _with_constant_outputs(program: Program) -> Program:
    """Results that are known while tracing as captured arrays, so that each has a value."""
    captured, outputs = list(program.captured), list(program.outputs)
    for position, output in enumerate(outputs):
        if not isinstance(output, int):
            program.avals.append(output.aval)
            value = len(program.avals) - 1
            captured.append((value, output.value))
            outputs[position] = value
    return replace(program, captured=tuple(captured), outputs=tuple(outputs))


class _StageSlicer:
    def __init__(
        self,
        step: TracedStep,
        homes: StagePlacement,
        stage_of: Sequence[int],
        backward_results: Collection[int],
    ) -> None:
        self.step, self.homes = step, homes
        assert step.loop is not None
        self.position = step.loop
        self.program = step.program
        self.loop = self.program.equations[self.position]
        (self.body,) = self.loop.bodies
        self.stage_of = stage_of
        self.num_consts, self.num_carry = _jax.scan_sizes(self.loop.params)
        self.is_backward = self.find_backward(backward_results)
        self.maker = self.body.producers()
        self.body_inputs = frozenset(self.body.inputs)
        self.body_captured = dict(self.body.captured)
        # What each stage gets from others inside the loop.
        self.arrivals: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        self.departures: list[dict[int, None]] = [{} for _ in range(self.num_stages)]
        for equation, stage in zip(self.body.equations, stage_of, strict=True):
            if stage < 0:
                continue
            for value in equation.inputs:
                source = self.made_at(value)
                if source is not None and source != stage:
                    self.arrivals[stage][value] = source
                    self.departures[source][value] = None
        self.sent: list[dict[int, None]] = [{} for _ in range(self.num_stages)]
        for values in homes.received:
            for value in values:
                self.sent[homes.owner[value]][value] = None

    @property
    def num_stages(self) -> int:
        return len(self.homes.received)

    def find_backward(self, known: Collection[int]) -> list[bool]:
        """Equations that were backward before sums were parted, and those that read from them."""
        made = set(known)
        found = []
        for equation in self.body.equations:
            is_backward = any(v in made for v in (*equation.results, *equation.inputs))
            if is_backward:
                made.update(equation.results)
            found.append(is_backward)
        return found

    def made_at(self, value: int) -> int | None:
        """The stage that makes a value of the body; None for what every stage has or makes."""
        maker = self.maker.get(value)
        stage = ANYWHERE if maker is None else self.stage_of[maker]
        return None if stage == ANYWHERE else stage

    # -- the loop of a stage

    def stage(self, stage: int) -> StageSlice:
        homes = self.homes
        own_inputs = [i for i, v in enumerate(self.program.inputs) if homes.owner[v] == stage]
        own_outputs = [o for o, s in enumerate(homes.outputs) if s == stage]
        received = [(v, homes.owner[v]) for v in homes.received[stage]]
        loop, positions, stacks = self.stage_loop(stage)
        arriving, departing = stacks
        before, after = [], []
        parts: list[int] = []
        for index, equation in enumerate(self.program.equations):
            if index == self.position:
                parts.append(0)
            elif stage in homes.stages[index]:
                (before if index < self.position else after).append(equation)
                parts.append(homes.parts[index, stage])
        inputs = [
            *(self.program.inputs[i] for i in own_inputs),
            *(v for v, _ in received),
            *arriving,
        ]
        outputs: list[Operand] = [
            *(self.program.outputs[o] for o in own_outputs),
            *self.sent[stage],
            *departing,
        ]
        equations = (*before, loop, *after)
        read = {v for e in equations for v in e.inputs} | set(values_in(outputs))
        program = Program(
            tuple(inputs),
            tuple(outputs),
            equations,
            self.program.avals,
            tuple((v, array) for v, array in self.program.captured if v in read),
        )
        traced = self.traced(stage, program, own_inputs, own_outputs, received, len(before))
        forward, backward = _passes(loop, [self.is_backward[p] for p in positions])
        return StageSlice(
            traced,
            tuple(own_inputs),
            tuple(own_outputs),
            tuple(received),
            tuple(self.arrivals[stage].items()),
            tuple(self.sent[stage]),
            tuple(self.departures[stage]),
            (*arriving, *departing),
            forward,
            backward,
            tuple(parts),
        )

    def stage_loop(self, stage: int) -> tuple[Equation, list[int], tuple[list[int], list[int]]]:
        """(the loop, positions of its equations in the whole body, stacks in and out)."""
        body, loop = self.body, self.loop
        needed = {i for i, s in enumerate(self.stage_of) if s == stage}
        carries = [p for p in range(self.num_carry) if self.homes.owner[loop.results[p]] == stage]
        rows = [
            p
            for p in range(self.num_carry, len(loop.results))
            if self.homes.owner[loop.results[p]] == stage
        ]
        outs = [body.outputs[p] for p in (*carries, *rows)]
        # What belongs to no stage is made by those that read it.
        left = [*needed, *(self.maker[o] for o in values_in(outs) if o in self.maker)]
        while left:
            index = left.pop()
            needed.add(index)
            for value in body.equations[index].inputs:
                maker = self.maker.get(value)
                if maker is not None and self.stage_of[maker] == ANYWHERE and maker not in needed:
                    left.append(maker)
        positions = sorted(needed)
        equations = [body.equations[i] for i in positions]
        read = {v for e in equations for v in e.inputs} | set(values_in(outs))
        consts = [p for p in range(self.num_consts) if body.inputs[p] in read]
        first_x = self.num_consts + self.num_carry
        xs = [p for p in range(first_x, len(body.inputs)) if body.inputs[p] in read]
        num = loop.params["length"]
        arrivals, departures = list(self.arrivals[stage]), list(self.departures[stage])
        arriving = [self.stack(v, num) for v in arrivals]
        departing = [self.stack(v, num) for v in departures]
        inside = Program(
            (
                *(body.inputs[p] for p in consts),
                *(body.inputs[self.num_consts + p] for p in carries),
                *(body.inputs[p] for p in xs),
                *arrivals,
            ),
            (*outs, *departures),
            tuple(equations),
            body.avals,
            tuple((v, array) for v, array in body.captured if v in read),
        )
        return (
            replace(
                loop,
                operands=(
                    *(loop.operands[p] for p in consts),
                    *(loop.operands[self.num_consts + p] for p in carries),
                    *(loop.operands[p] for p in xs),
                    *arriving,
                ),
                results=(*(loop.results[p] for p in (*carries, *rows)), *departing),
                params={**loop.params, "num_consts": len(consts), "num_carry": len(carries)},
                bodies=(inside,),
            ),
            positions,
            (arriving, departing),
        )

    def stack(self, value: int, num: int) -> int:
        avals = self.program.avals
        avals.append(_jax.stacked_aval(avals[value], num))
        return len(avals) - 1

    # -- the step of a stage

    def traced(
        self,
        stage: int,
        program: Program,
        own_inputs: Sequence[int],
        own_outputs: Sequence[int],
        received: Sequence[tuple[int, int]],
        loop: int,
    ) -> TracedStep:
        step, avals = self.step, self.program.avals
        paths = [step.call.paths[i] for i in own_inputs]
        paths += [self.name(v) for v in program.inputs[len(own_inputs) :]]
        out_paths = [step.out_paths[o] for o in own_outputs]
        out_paths += [self.name(v) for v in values_in(program.outputs[len(own_outputs) :])]
        input_at = {i: n for n, i in enumerate(own_inputs)}
        output_at = {o: n for n, o in enumerate(own_outputs)}
        num_own = len(own_inputs) + len(received)
        given = tuple(avals[v] for v in program.inputs)
        return TracedStep(
            program=program,
            call=replace(step.call, leaves=given, paths=tuple(paths)),
            avals=given,
            out_paths=tuple(out_paths),
            out_avals=tuple(avals[v] for v in program.output_values),
            out_tree=None,
            out_static=(),
            state=tuple((input_at[i], output_at[o]) for i, o in step.state if i in input_at),
            batch=(
                *(input_at[i] for i in step.batch if i in input_at),
                *range(num_own, len(program.inputs)),
            ),
            donated=tuple(input_at[i] for i in step.donated if i in input_at),
            name=f"{step.name} stage {stage}",
            flat_fn=step.flat_fn,
            num_micro_batches=step.num_micro_batches,
            loop=loop,
        )

    def name(self, value: int) -> str:
        """What a value that is sent is called; arguments keep their names."""
        if value in self.program.inputs:
            return self.step.call.paths[self.program.inputs.index(value)]
        return f"value {value}"


def _passes(loop: Equation, is_backward: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The equations of the forward and of the backward stage program. What is cheap to make is made
    again in the backward stage program, so that less is kept of each micro-batch in flight."""
    (body,) = loop.bodies
    equations = body.equations
    backward = [i for i, b in enumerate(is_backward) if b]
    forward = [i for i, b in enumerate(is_backward) if not b]
    made = {r for i in backward for r in equations[i].results}
    read = {v for i in backward for v in equations[i].inputs} - made
    num_consts, num_carry = _jax.scan_sizes(loop.params)
    given = (*body.inputs[: num_consts + num_carry], *(v for v, _ in body.captured))
    thinned = thin_residuals([equations[i] for i in forward], read, frozenset(given), body.avals)
    repeated = [forward[position] for position in thinned.repeated]
    return tuple(forward), tuple(sorted((*backward, *repeated)))
