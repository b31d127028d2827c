"""A step's inputs and outputs, from those of its stages: arrays, and stacks split over stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec

from autopar.ir.plan import ParallelPlan, Tensor, is_one_array
from autopar.ir.rows import Rows, num_rows
from autopar.rewrite.split_stacks import Parts, StackPart
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
        [_whole_tensor(stages, inputs[i]) for i in range(len(inputs))],
        [_whole_tensor(stages, outputs[o]) for o in range(len(outputs))],
    )


def _whole_tensor(stages: SolvedStages, held: Sequence[tuple[Rows | None, Tensor]]) -> Tensor:
    (rows, tensor), *others = held
    if rows is None:
        assert not others, f"{tensor.path} is on several stages"
        return tensor
    in_order = [tensor for _, tensor in sorted(held, key=lambda one: one[0] or ())]
    plans = [stages.solved[t.stages[0]].plan for t in in_order]
    meshes = [stages.stage_mesh[t.stages[0]] for t in in_order]
    in_rows = sorted(rows for rows, _ in held if rows is not None)
    return joined(in_order, in_rows, meshes, [plan.mesh_shape for plan in plans])


def joined(
    parts: Sequence[Tensor],
    rows: Sequence[Rows],
    meshes: Sequence[int],
    mesh_shapes: Sequence[tuple[int, ...]],
) -> Tensor:
    """A stack, of the tensors of its stages in the order of their rows, and each one's mesh."""
    layouts = tuple(part.layout for part in parts)
    is_one = is_one_array(rows, meshes, mesh_shapes) and len(set(layouts)) == 1
    last = rows[-1]
    return replace(
        parts[0],
        shape=(*(end for _, end in last), *parts[0].shape[len(last) :]),
        stages=tuple(part.stages[0] for part in parts),
        split=tuple(map(num_rows, rows)),
        layouts=None if is_one else layouts,
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


def held_specs(
    plan: ParallelPlan, tensors: Mapping[int, Tensor]
) -> dict[tuple[int, Rows | None], PartitionSpec]:
    """The specs of a plan's tensors, by number and rows, where stages have them."""
    return {
        (i, rows): spec
        for i, tensor in tensors.items()
        for rows, spec in zip(tensor.rows(), plan.held_specs(tensor), strict=True)
    }
