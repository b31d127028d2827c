"""A step's inputs and outputs, from those of its stages: arrays, and stacks split over stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.plan import ParallelPlan, Tensor
from autopar.rewrite.split_stacks import Parts, Rows, StackPart
from autopar.stages.solve_stages import SolvedStages


def step_tensors(stages: SolvedStages) -> tuple[list[Tensor], list[Tensor]]:
    """All inputs and outputs of the step, with the stages that hold them: owner first, copies."""
    inputs: dict[int, list[tuple[Rows | None, Tensor]]] = {}
    outputs: dict[int, list[tuple[Rows | None, Tensor]]] = {}
    cuts = stages.sliced.stages
    received = [{value for value, _ in cut.received} for cut in cuts]
    for number, (cut, stage) in enumerate(zip(cuts, stages.solved, strict=True)):
        values, tensors = cut.step.program.inputs, stage.plan.inputs
        own = zip(cut.inputs, values, cut.input_rows, tensors, strict=False)
        for position, value, rows, tensor in own:
            copies = [n for n, got in enumerate(received) if value in got]
            tensor = replace(tensor, stages=(number, *copies))
            inputs.setdefault(position, []).append((rows, tensor))
        own = zip(cut.outputs, cut.output_rows, stage.plan.outputs, strict=False)
        for position, rows, tensor in own:
            outputs.setdefault(position, []).append((rows, replace(tensor, stages=(number,))))
    return (
        [_whole_tensor(inputs[i]) for i in range(len(inputs))],
        [_whole_tensor(outputs[o]) for o in range(len(outputs))],
    )


def _whole_tensor(held: Sequence[tuple[Rows | None, Tensor]]) -> Tensor:
    (rows, tensor), *others = held
    if rows is None:
        assert not others, f"{tensor.path} is on several stages"
        return tensor
    in_order = sorted(held, key=lambda one: one[0] or (0, 0))
    return joined([tensor for _, tensor in in_order])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """A stack, of the tensors of its stages in the order of their rows."""
    split = tuple(part.shape[0] for part in parts)
    shape = (sum(split), *parts[0].shape[1:])
    return replace(
        parts[0], shape=shape, stages=tuple(part.stages[0] for part in parts), split=split
    )


def parts_of(tensor: Tensor) -> Parts:
    """The parts of a tensor that is split over stages."""
    return tuple(
        StackPart(rows, stage)
        for stage, rows in zip(tensor.stages, tensor.rows(), strict=True)
        if rows is not None
    )


def stacks_of(plan: ParallelPlan) -> dict[int, Parts]:
    """The parts of a plan's inputs that are split over stages."""
    return {i: parts_of(t) for i, t in enumerate(plan.inputs) if t.split is not None}
