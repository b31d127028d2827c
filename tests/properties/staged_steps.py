"""Steps cut into stages and interpreted on one device, without a plan, to test slicing.

`cut_step` makes stage programs and instruction lists of a step as the compiler does, but without
sharding; `run_lists` executes the lists in Python, with buffers that are really freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from autopar import _jax
from autopar.ir.pipeline import Pipeline, PipelinePrograms, Run, Send
from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.lower.stage_bodies import StagePrograms, stage_program_function
from autopar.lower.stage_programs import cut_into_stage_programs
from autopar.rewrite.attach_layers import LoopLayers, attach_layers
from autopar.rewrite.layers import Layer
from autopar.rewrite.stage_slices import SlicedStep, slice_step
from autopar.rewrite.step_source import StepSource
from autopar.runtime.order import interleave
from autopar.sharding.assemble import unsharded
from autopar.tracer.regions import BACKWARD, equation_regions
from autopar.tracer.trace import StepOptions


@dataclass(frozen=True)
class StagedStep:
    looped: TracedStep
    layers: LoopLayers
    sliced: SlicedStep
    stage_programs: StagePrograms
    programs: PipelinePrograms

    @property
    def pipeline(self) -> Pipeline:
        return self.stage_programs.pipeline


def loop_of(fn: Callable[..., Any], args: tuple[Any, ...], num_micro_batches: int) -> TracedStep:
    return StepSource.of(fn, args, {}, StepOptions()).as_loop(num_micro_batches)


def body_of(looped: TracedStep) -> Program:
    assert looped.loop is not None
    return looped.program.equations[looped.loop].bodies[0]


def layers_cut_at(body: Program, cuts: Sequence[float]) -> list[Layer]:
    """Forward equations in their order, cut at these shares of their number."""
    regions = equation_regions(body)
    forward = [i for i, region in enumerate(regions) if region != BACKWARD]
    ends = [0, *(round(cut * len(forward)) for cut in sorted(cuts)), len(forward)]
    return [
        Layer(f"layer {n}", tuple(forward[start:end]), (), 1.0, 0, 0)
        for n, (start, end) in enumerate(pairwise(ends))
    ]


def cut_step(
    looped: TracedStep, layers: Sequence[Layer], stage_of: Sequence[int], schedule: str
) -> StagedStep:
    attached = attach_layers(body_of(looped), layers)
    sliced = slice_step(looped, attached, stage_of)
    shardings = [unsharded(stage.step.program) for stage in sliced.stages]
    count, num = len(sliced.stages), looped.num_micro_batches
    stage_mesh = list(range(count))
    if schedule == "interleaved_1f1b" and count % 2 == 0:
        stage_mesh = [s % (count // 2) for s in range(count)]
    stage_programs = cut_into_stage_programs(
        sliced.stages,
        shardings,
        num,
        stage_mesh=stage_mesh,
        split_weights=schedule == "zero_bubble",
        donated=looped.donated,
    )
    made = make_schedule(schedule, count, num, stage_mesh=stage_mesh)
    return StagedStep(
        looped, attached, sliced, stage_programs, emit_programs(stage_programs.pipeline, made)
    )


def run_lists(staged: StagedStep, leaves: Sequence[Any]) -> list[Any]:
    """The step's results, by the instruction lists of its meshes."""
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    functions = [jax.jit(stage_program_function(p, mesh)) for p in staged.stage_programs.programs]
    meshes = staged.programs.meshes
    memory = {
        (number, buffer): leaves[position]
        for number, own in enumerate(meshes)
        for position, buffer in own.inputs
    }
    for at, instruction, received in interleave(staged.programs):
        if isinstance(instruction, Run):
            results = functions[instruction.stage_program](
                *(memory[at, b] for b in instruction.reads)
            )
            memory.update(zip([(at, b) for b in instruction.writes], results, strict=True))
        elif isinstance(instruction, Send):
            to = instruction.to_mesh
            for source, target in zip(instruction.buffers, received, strict=True):
                memory[to, target] = memory[at, source]
        else:
            for buffer in instruction.buffers:
                del memory[at, buffer]
    found = {
        position: memory[number, buffer]
        for number, own in enumerate(meshes)
        for position, buffer in own.outputs
    }
    return [found[position] for position in range(len(found))]
