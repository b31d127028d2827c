"""Layers by input placement: from a looped `TracedStep` and the stages of its inputs to layers.

For a step that follows another one, whose parameters are on stages already. A forward equation
belongs to the first stage that has its parameters and comes no earlier than its other operands.
Each stage's equations are then one layer.
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
    """(layers, the stage of each), one per stage that has forward equations. `holders`: position of
    an input -> the stages that have it."""
    assert step.loop is not None
    program, loop = step.program, step.program.equations[step.loop]
    (body,) = loop.bodies
    stages_of: dict[int, Stages] = {program.inputs[i]: frozenset(s) for i, s in holders.items()}
    for equation in program.equations[: step.loop]:
        stages = _common([stages_of[v] for v in equation.inputs if v in stages_of])
        if stages:
            stages_of.update(dict.fromkeys(equation.results, stages))
    inside = {
        value: stages_of[operand]
        for operand, value in zip(loop.operands, body.inputs, strict=True)
        if isinstance(operand, int) and operand in stages_of
    }
    forward = _forward_equations(body.equations, equation_regions(body))
    stage_of = _place(body.equations, forward, inside)
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
    """The stages that have everything; else the first that all arrays can reach moving forward."""
    if not sets:
        return frozenset()
    return frozenset.intersection(*sets) or frozenset({max(map(min, sets))})


def _forward_equations(equations: Sequence[Equation], regions: Sequence[str]) -> list[int]:
    backward: set[int] = set()
    forward = []
    for index, (equation, region) in enumerate(zip(equations, regions, strict=True)):
        if region == BACKWARD or not backward.isdisjoint(equation.inputs):
            backward.update(equation.results)
        else:
            forward.append(index)
    return forward


def _place(
    equations: Sequence[Equation], forward: Sequence[int], stages_of: Mapping[int, Stages]
) -> dict[int, int]:
    """The stage of every forward equation that depends on an argument with a stage, or feeds one
    that does."""
    made_at: dict[int, int] = {}
    stage_of: dict[int, int] = {}
    for index in forward:
        values = equations[index].inputs
        stages = [made_at[v] for v in values if v in made_at]
        sets = [stages_of[v] for v in values if v in stages_of]
        if not stages and not sets:
            continue
        stage = max(stages, default=0)
        for holders in sets:
            stage = max(stage, min((s for s in holders if s >= stage), default=stage))
        stage_of[index] = stage
        made_at.update(dict.fromkeys(equations[index].results, stage))
    wanted: dict[int, int] = {}  # value without a stage -> the first stage that reads it
    for index in reversed(forward):
        equation = equations[index]
        if index not in stage_of:
            readers = [wanted[r] for r in equation.results if r in wanted]
            if not readers:
                continue
            stage_of[index] = min(readers)
        for value in equation.inputs:
            wanted[value] = min(wanted.get(value, stage_of[index]), stage_of[index])
    return stage_of
