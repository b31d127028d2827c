"""Which layers of a stage will run as one loop: from a stage's `TracedStep` to the trips of these.

A stage program of equal layers that read rows of stacks becomes a loop (`lower.roll_layers`) after
the stage was planned. Memory is predicted before, so the loop is found here without layouts: if
these come out different from layer to layer, the layers stay written out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar import _jax
from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.tracer.layer_runs import Key, LayerRun, find_run, numbered_layers, ranges_to_try


def rolled_layers(step: TracedStep, backward: Collection[int]) -> list[list[list[int]]]:
    """The loops over layers in the backward program of a stage: of each, the equations of every
    trip, in the order in which they run. Equations are numbered as by `Program.all_equations`;
    `backward`: those of the backward pass."""
    if step.loop is None:
        return []
    program = step.program
    loop = program.equations[step.loop]
    (body,) = loop.bodies
    number = 1 + sum(e.num_equations() for e in program.equations[: step.loop])
    numbers: list[range] = []  # of each equation of the body, with those inside it
    for equation in body.equations:
        numbers.append(range(number, number + equation.num_equations()))
        number = numbers[-1].stop
    is_backward = [own[0] in backward for own in numbers]
    own = step.backward or tuple(i for i, later in enumerate(is_backward) if later)
    backward_program = _StageProgram(body, own)
    forward_program = _StageProgram(body, [i for i, later in enumerate(is_backward) if not later])
    given = _arguments(program, loop)
    found: list[list[list[int]]] = []
    taken: set[int] = set()
    for key, layers in numbered_layers(backward_program.equations).items():
        if taken.isdisjoint(i for indices in layers.values() for i in indices):
            run = _run(backward_program, forward_program, key, given)
            if run is not None:
                taken.update(i for trip in run.trips for i in trip)
                trips = ([own[i] for i in trip if is_backward[own[i]]] for trip in run.trips)
                found.append([[n for i in trip for n in numbers[i]] for trip in trips])
    return found


class _StageProgram:
    """What a stage program runs of a loop's body."""

    def __init__(self, body: Program, own: Sequence[int]) -> None:
        self.equations = [body.equations[i] for i in own]
        self.avals = body.avals
        self.layers = numbered_layers(self.equations)

    def run_of(self, key: Key, chosen: range) -> LayerRun | None:
        layers = self.layers.get(key, {})
        if any(number not in layers for number in chosen):
            return None
        return find_run(self.equations, None, self.avals, [layers[n] for n in chosen])


def _run(
    backward: _StageProgram, forward: _StageProgram, key: Key, given: frozenset[int]
) -> LayerRun | None:
    """The run of layers in the backward program, of as many as the forward program runs too."""
    layers = backward.layers[key]
    for chosen in ranges_to_try(min(layers), max(layers)):
        run = backward.run_of(key, chosen)
        if run is None or not given.isdisjoint(v for of in run.reads.values() for v in of):
            continue
        if forward.run_of(key, chosen) is not None:
            return run
    return None


def _arguments(program: Program, loop: Equation) -> frozenset[int]:
    """What a loop's body reads of the program's own arguments: each has a buffer of its own, so
    layers that read one each are no loop."""
    (body,) = loop.bodies
    num_consts, _ = _jax.scan_sizes(loop.params)
    consts = zip(loop.operands[:num_consts], body.inputs, strict=False)
    arguments = set(program.inputs)
    return frozenset(value for operand, value in consts if operand in arguments)
