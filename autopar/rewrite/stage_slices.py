"""From a looped `TracedStep` and the stages of its layers to one step per stage: a `SlicedStep`.

A stage's step is a program like any other, with a smaller loop over micro-batches. Its inputs are
its own arguments and the values that other stages send (a stack over micro-batches, if sent for
each); its outputs are its own results and the values it sends. So the passes that shard whole steps
shard it too. All stages number values in the same way. This module also cuts a stage's step into
the stage programs that run one after another, as sets of equations; `lower.stage_programs` turns
these into programs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.rows import Rows
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import ANYWHERE, LoopLayers
from autopar.rewrite.residuals import choose_residuals
from autopar.rewrite.slices_inside import with_slices_inside
from autopar.rewrite.split_stacks import SplitStep, Stacks, split_stacks
from autopar.rewrite.split_sums import split_sums
from autopar.rewrite.stage_placement import StagePlacement, place_stages

WHOLE_STACKS: Stacks = MappingProxyType({})  # no stack is split


@dataclass(frozen=True)
class StageSlice:
    """One stage's step and how it is cut.

    step:       its program, with one loop (`step.loop`), its arguments and its results.
    inputs:     the whole step's inputs that are its arguments, by position; its first inputs.
    outputs:    the whole step's outputs that are its results, by position; its first outputs.
    received:   (value outside the loop, stage it comes from), in the order of its inputs.
    arrivals:   (value inside the loop, stage it comes from); stacks of them are its last inputs.
    sent:       values outside the loop that others receive, in the order of its outputs.
    departures: values inside the loop that others receive; stacks of them are its last outputs.
    stacks:     the stacks of arrivals and departures, which exist only for the solver.
    forward, backward: equations of the loop's body, by position; shared ones are in both.
    parts:      per equation outside the loop, the part of prologue or epilogue that it runs in.
    input_rows, output_rows: per argument and result of its own, the rows of it that the stage
                has, if it is a stack that is split over stages; else None.
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
    input_rows: tuple[Rows | None, ...]
    output_rows: tuple[Rows | None, ...]

    @property
    def loop(self) -> Equation:
        assert self.step.loop is not None
        return self.step.program.equations[self.step.loop]

    @property
    def body(self) -> Program:
        return self.loop.bodies[0]

    def batch_slices(self) -> frozenset[int]:
        """Values of a micro-batch that are slices of the stage's own arguments."""
        received = {value for value, _ in self.arrivals}
        return frozenset(self.body.inputs[sum(_jax.scan_sizes(self.loop.params)) :]) - received

    def residual_values(self) -> frozenset[int]:
        """Values of a micro-batch that the backward stage program reads from the forward one."""
        num_consts, num_carry = _jax.scan_sizes(self.loop.params)
        given = {*self.body.inputs[: num_consts + num_carry], *(v for v, _ in self.body.captured)}
        equations = [self.body.equations[i] for i in self.backward]
        made = {r for e in equations for r in e.results}
        read = {v for e in equations for v in e.inputs}
        return frozenset(read - made - given)


@dataclass(frozen=True)
class SlicedStep:
    """The steps of all stages, and the whole program that they were cut from."""

    stages: tuple[StageSlice, ...]
    program: Program
    num_parts: tuple[int, int]  # of prologue and epilogue


def slice_step(
    step: TracedStep,
    layers: LoopLayers,
    stage_of_layer: Sequence[int],
    owners: Mapping[int, int] | None = None,
    stacks: Stacks | None = WHOLE_STACKS,
) -> SlicedStep:
    """`stage_of_layer`: ascending, from 0. `owners`: position of an input that is already placed ->
    its stage. `stacks`: which inputs are split over stages, as `split_stacks` takes it; none by
    default."""
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
    program, loop, stage_of = split_sums(step.program, step.loop, stage_of)
    program = _with_constant_outputs(program)
    split = split_stacks(replace(step, program=program, loop=loop), stage_of, num_stages, stacks)
    step, stage_of = with_slices_inside(split.step, stage_of, split.pieces)
    program = step.program
    assert step.loop is not None
    placed = {n: owners[i] for n, (i, _) in enumerate(split.inputs) if owners and i in owners}
    placement = place_stages(
        program, step.loop, stage_of, num_stages, step.state, {**placed, **split.owners}
    )
    cutter = _StageSlicer(step, placement, stage_of, backward_results)
    stages = tuple(_of_whole_step(cutter.stage(s), split) for s in range(num_stages))
    return SlicedStep(stages, program, placement.num_parts)


def _of_whole_step(stage: StageSlice, split: SplitStep) -> StageSlice:
    """The stage with positions of the step as it was before stacks were split."""
    inputs = [split.inputs[n] for n in stage.inputs]
    outputs = [split.outputs[n] for n in stage.outputs]
    return replace(
        stage,
        inputs=tuple(i for i, _ in inputs),
        outputs=tuple(o for o, _ in outputs),
        input_rows=tuple(rows for _, rows in inputs),
        output_rows=tuple(rows for _, rows in outputs),
    )


def equation_layers(step: TracedStep, layers: LoopLayers) -> list[int]:
    """The layer of every equation of a looped step, bodies right after their loops; `ANYWHERE` for
    equations that several layers share."""
    assert step.loop is not None
    placement = place_stages(
        step.program, step.loop, layers.layer_of, len(layers.layers), step.state
    )
    layer_of: list[int] = []
    for index, equation in enumerate(step.program.equations):
        if index == step.loop:
            layer_of.append(ANYWHERE)
            for inner, layer in zip(equation.bodies[0].equations, layers.layer_of, strict=True):
                layer_of += (layer for _ in inner.with_bodies())
            continue
        stages = placement.stages[index]
        layer = min(stages) if len(stages) == 1 else ANYWHERE
        layer_of += (layer for _ in equation.with_bodies())
    return layer_of


def _with_constant_outputs(program: Program) -> Program:
    """Turns results that are constants into captured arrays, so that each has a value."""
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
        placement: StagePlacement,
        stage_of: Sequence[int],
        backward_results: Collection[int],
    ) -> None:
        self.step, self.placement = step, placement
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
        # Values that each stage gets from others inside the loop.
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
        for values in placement.received:
            for value in values:
                self.sent[placement.owner[value]][value] = None

    @property
    def num_stages(self) -> int:
        return len(self.placement.received)

    def find_backward(self, known: Collection[int]) -> list[bool]:
        """Per equation, whether it was backward before sums were split, or reads from one."""
        made = set(known)
        backward = []
        for equation in self.body.equations:
            is_backward = any(v in made for v in (*equation.results, *equation.inputs))
            if is_backward:
                made.update(equation.results)
            backward.append(is_backward)
        return backward

    def made_at(self, value: int) -> int | None:
        """The stage that makes a value of the body; None if every stage has or makes it."""
        maker = self.maker.get(value)
        stage = ANYWHERE if maker is None else self.stage_of[maker]
        return None if stage == ANYWHERE else stage

    # -- the loop of a stage

    def stage(self, stage: int) -> StageSlice:
        placement = self.placement
        own_inputs = [i for i, v in enumerate(self.program.inputs) if placement.owner[v] == stage]
        own_outputs = [o for o, s in enumerate(placement.outputs) if s == stage]
        received = [(v, placement.owner[v]) for v in placement.received[stage]]
        loop, positions, stacks = self.stage_loop(stage)
        arriving, departing = stacks
        before, after = [], []
        parts: list[int] = []
        for index, equation in enumerate(self.program.equations):
            if index == self.position:
                parts.append(0)
            elif stage in placement.stages[index]:
                (before if index < self.position else after).append(equation)
                parts.append(placement.parts[index, stage])
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
        traced = replace(traced, backward=backward)
        return StageSlice(
            step=traced,
            inputs=tuple(own_inputs),
            outputs=tuple(own_outputs),
            received=tuple(received),
            arrivals=tuple(self.arrivals[stage].items()),
            sent=tuple(self.sent[stage]),
            departures=tuple(self.departures[stage]),
            stacks=(*arriving, *departing),
            forward=forward,
            backward=backward,
            parts=tuple(parts),
            input_rows=(None,) * len(own_inputs),
            output_rows=(None,) * len(own_outputs),
        )

    def stage_loop(self, stage: int) -> tuple[Equation, list[int], tuple[list[int], list[int]]]:
        """(the loop, positions of its equations in the whole body, stacks in and out)."""
        body, loop = self.body, self.loop
        needed = {i for i, s in enumerate(self.stage_of) if s == stage}
        carries = [
            p for p in range(self.num_carry) if self.placement.owner[loop.results[p]] == stage
        ]
        rows = [
            p
            for p in range(self.num_carry, len(loop.results))
            if self.placement.owner[loop.results[p]] == stage
        ]
        outs = [body.outputs[p] for p in (*carries, *rows)]
        # Equations that belong to no stage run on every stage that reads them.
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
            is_stage=True,
        )

    def name(self, value: int) -> str:
        """The name of a value that is sent; arguments keep their names."""
        if value in self.program.inputs:
            return self.step.call.paths[self.program.inputs.index(value)]
        return f"value {value}"


def _passes(loop: Equation, is_backward: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The equations of the forward and of the backward stage program. The backward one recomputes
    cheap values, so that less is stored for each micro-batch in flight."""
    (body,) = loop.bodies
    equations = body.equations
    backward = [i for i, b in enumerate(is_backward) if b]
    forward = [i for i, b in enumerate(is_backward) if not b]
    made = {r for i in backward for r in equations[i].results}
    read = {v for i in backward for v in equations[i].inputs} - made
    num_consts, num_carry = _jax.scan_sizes(loop.params)
    given = (*body.inputs[: num_consts + num_carry], *(v for v, _ in body.captured))
    choice = choose_residuals([equations[i] for i in forward], read, frozenset(given), body.avals)
    recomputed = [forward[position] for position in choice.recomputed]
    return tuple(forward), tuple(sorted((*backward, *recomputed)))
