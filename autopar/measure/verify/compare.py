"""XLA's figures beside the plan's: from `ProgramCosts` to `VerifiedProgram`s and `VerifiedMesh`es.

The memory of a mesh is what the runtime will see: while a stage program runs, its memory according
to XLA plus all other buffers that the instruction lists keep live.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf, prod

import numpy as np

from autopar.ir.judged import JudgedStep
from autopar.ir.pipeline import Recv, Run
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import LoweredStep, ShardedType
from autopar.ir.tiles import shard_box
from autopar.measure.judged_plan import added_runs
from autopar.measure.verify.jobs import Collectives, CompileJob, ProgramCosts
from autopar.measure.verify.report import (
    Compared,
    VerifiedMesh,
    VerifiedProgram,
    compared_collectives,
)
from autopar.runtime.order import interleave, peak_bytes, peak_live_bytes

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
_XLA_KIND = {"shift": "collective-permute"}


def verified_programs(
    lowered: LoweredStep,
    jobs: Sequence[CompileJob],
    job_of_stage_program: Sequence[int],
    costs: Sequence[ProgramCosts],
) -> tuple[VerifiedProgram, ...]:
    runs = _runs(lowered)
    programs = []
    for number, (job, program_costs) in enumerate(zip(jobs, costs, strict=True)):
        stage_programs = [p for p, j in enumerate(job_of_stage_program) if j == number]
        names = tuple(lowered.stage_programs[p].name for p in stage_programs)
        programs.append(
            VerifiedProgram(
                names, tuple(runs[p] for p in stage_programs), job.topology, program_costs
            )
        )
    return tuple(programs)


def _runs(lowered: LoweredStep) -> Counter[int]:
    """How often each stage program runs in a step."""
    lists = (mesh.instructions for mesh in lowered.programs.meshes)
    return Counter(
        i.stage_program for instructions in lists for i in instructions if isinstance(i, Run)
    )


def verified_meshes(
    plan: ParallelPlan,
    lowered: LoweredStep,
    jobs: Sequence[CompileJob],
    job_of_stage_program: Sequence[int],
    costs: Sequence[ProgramCosts],
    limit_bytes: float,
) -> tuple[VerifiedMesh, ...]:
    programs, runs = lowered.programs, _runs(lowered)
    size_of = _buffer_sizes(lowered).__getitem__
    order = interleave(programs)
    own_bytes = [costs[job].peak_bytes for job in job_of_stage_program]
    peaks = peak_bytes(order, programs, size_of, own_bytes)
    between = peak_live_bytes(order, programs, size_of)
    verified = []
    for mesh in range(len(lowered.meshes)):
        stages = tuple(s for s, on in enumerate(lowered.stage_mesh) if on == mesh)
        stage_programs = [p for p, on in enumerate(lowered.stage_program_mesh) if on == mesh]
        plans = [plan.stages[s].plan or plan for s in stages]
        budget = min(p.memory_budget_bytes for p in plans)
        verified.append(
            VerifiedMesh(
                mesh=mesh,
                stages=stages,
                topology=jobs[job_of_stage_program[stage_programs[0]]].topology,
                mesh_shape=plans[0].mesh_shape,
                # Stages that share a mesh use memory at the same time.
                peak_bytes=Compared(peaks[mesh], sum(p.estimated_peak_bytes for p in plans)),
                buffer_bytes=between[mesh],
                limit_bytes=limit_bytes,
                budget_bytes=budget if budget < inf else None,
                dot_flops=Compared(
                    sum(runs[p] * costs[job_of_stage_program[p]].dot_flops for p in stage_programs),
                    _predicted_flops(plans),
                ),
                collectives=compared_collectives(
                    _added(
                        Collectives(c.kind, runs[p] * c.count, runs[p] * c.sent_bytes)
                        for p in stage_programs
                        for c in costs[job_of_stage_program[p]].collectives
                    ),
                    _predicted_collectives(plans),
                ),
                judged=_judged(
                    [(runs[p], costs[job_of_stage_program[p]].times) for p in stage_programs]
                ),
                predicted_s=(
                    None if plan.is_pipeline or not plan.is_timed else plan.estimated_step_s
                ),
            )
        )
    return tuple(verified)


def _judged(programs: Sequence[tuple[int, JudgedStep | None]]) -> JudgedStep | None:
    known = [(runs, times) for runs, times in programs if times is not None]
    return added_runs(known) if len(known) == len(programs) else None


def _buffer_sizes(lowered: LoweredStep) -> dict[tuple[int, int], int]:
    """Bytes of every buffer on one device of its mesh."""
    held: dict[tuple[int, int], ShardedType] = {
        (bound.mesh, bound.buffer): bound.type for bound in (*lowered.arguments, *lowered.results)
    }
    for mesh, program in enumerate(lowered.programs.meshes):
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                writes = lowered.stage_programs[instruction.stage_program].writes
                held.update(zip(((mesh, b) for b in instruction.writes), writes, strict=True))
            elif isinstance(instruction, Recv):
                targets = [lowered.transfers[t].target for t in instruction.transfers]
                held.update(zip(((mesh, b) for b in instruction.buffers), targets, strict=True))
    sizes = {sharded: bytes_on_one_device(sharded) for sharded in set(held.values())}
    return {buffer: sizes[sharded] for buffer, sharded in held.items()}


def bytes_on_one_device(held: ShardedType) -> int:
    box = shard_box(held.shape, held.layout, held.mesh_shape, 0)
    return prod(end - start for start, end in box) * np.dtype(held.dtype).itemsize


def _predicted_flops(plans: Sequence[ParallelPlan]) -> float | None:
    total = 0.0
    for plan in plans:
        if plan.details is None:
            return None
        total += sum(row.flops for row in plan.details.ops.rows() if row.name in _PRODUCTS)
    return total


def _predicted_collectives(plans: Sequence[ParallelPlan]) -> tuple[Collectives, ...] | None:
    if any(plan.details is None for plan in plans):
        return None
    return _added(
        Collectives(_XLA_KIND.get(c.kind, c.kind), c.count, c.num_bytes)
        for plan in plans
        if plan.details is not None
        for c in plan.details.collectives
    )


def _added(parts: Iterable[Collectives]) -> tuple[Collectives, ...]:
    """Summed by kind."""
    counts: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    for collective in parts:
        counts[collective.kind] += collective.count
        sent[collective.kind] += collective.sent_bytes
    return tuple(Collectives(kind, counts[kind], sent[kind]) for kind in sorted(counts))
