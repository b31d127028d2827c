"""Layers by where arguments lie: from a looped step and the stages that hold its inputs to layers.

For a step that follows another one, whose parameters are on stages already. A forward equation
belongs to the first stage that has the parameters it reads and comes no earlier than what else it
reads. So no layer has to be found: each stage's equations are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.program import Equation
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.layers import Layer
from autopar.tracer.costs import equation_flops
from autopar.tracer.regions import BACKWARD, equation_regions

Stages = frozenset[int]


def layers_by_arguments(
    step: TracedStep, holders: Mapping[int, Sequence[int]]
) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """(layers, the stage of each): one per stage that has forward equations. `holders`: input, by
    position -> the stages that have it."""
    assert step.loop is not None
    program, loop = step.program, step.program.equations[step.loop]
    (body,) = loop.bodies
    held: dict[int, Stages] = {program.inputs[i]: frozenset(s) for i, s in holders.items()}
    for equation in program.equations[: step.loop]:
        stages = _common([held[v] for v in equation.inputs if v in held])
        if stages:
            held.update(dict.fromkeys(equation.results, stages))
    inside = {
        value: held[operand]
        for operand, value in zip(loop.operands, body.inputs, strict=True)
        if isinstance(operand, int) and operand in held
    }
    forward = _forward_equations(body.equations, equation_regions(body))
    stage_of = _placed(body.equations, forward, inside)
    groups: dict[int, list[int]] = {}
    for index, stage in sorted(stage_of.items()):
        groups.setdefault(stage, []).append(index)
    stages = tuple(sorted(groups))
    layers = tuple(
        Layer(
            name=f"layers of stage {stage}",
            equations=tuple(groups[stage]),
            inputs=(),
            flops=sum(equation_flops(body.equations[i], body.avals) for i in groups[stage]),
            residual_bytes=0,
            kept_bytes=0,
        )
        for stage in stages
    )
    return layers, stages


def _common(sets: Sequence[Stages]) -> Stages:
    """The stages that have all of it; else the first that can, if arrays only move on."""
    if not sets:
        return frozenset()
    return frozenset.intersection(*sets) or frozenset({max(map(min, sets))})


def _forward_equations(equations: Sequence[Equation], regions: Sequence[str]) -> list[int]:
    backward: set[int] = set()
    found = []
    for index, (equation, region) in enumerate(zip(equations, regions, strict=True)):
        if region == BACKWARD or not backward.isdisjoint(equation.inputs):
            backward.update(equation.results)
        else:
            found.append(index)
    return found


def _placed(
    equations: Sequence[Equation], forward: Sequence[int], held: Mapping[int, Stages]
) -> dict[int, int]:
    """The stage of every forward equation that depends on an argument with a stage, and of what
    those read."""
    made_at: dict[int, int] = {}
    found: dict[int, int] = {}
    for index in forward:
        values = equations[index].inputs
        stages = [made_at[v] for v in values if v in made_at]
        sets = [held[v] for v in values if v in held]
        if not stages and not sets:
            continue
        stage = max(stages, default=0)
        for own in sets:
            stage = max(stage, min((s for s in own if s >= stage), default=stage))
        found[index] = stage
        made_at.update(dict.fromkeys(equations[index].results, stage))
    wanted: dict[int, int] = {}  # value that has no stage yet -> the first that reads it
    for index in reversed(forward):
        equation = equations[index]
        if index not in found:
            readers = [wanted[r] for r in equation.results if r in wanted]
            if not readers:
                continue
            found[index] = min(readers)
        for value in equation.inputs:
            wanted[value] = min(wanted.get(value, found[index]), found[index])
    return found
