"""The predicted timeline of a pipeline: from stage plans to `PipelineTimes` and a `Timeline`.

Transfers between stages are priced from the layouts in the stages' plans. The timeline needs
nothing but the plan, so it can be drawn from a plan file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from autopar.cost.pipeline_links import boundary_s, transfer_time
from autopar.cost.pipeline_times import pipeline_of_times, pipeline_times
from autopar.cost.simulator import (
    SimulationInput,
    SimulationResult,
    TransferTime,
    host_routes,
    simulate,
    simulation_input,
    timeline,
)
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.pipeline import PER_MICRO_BATCH, Phase, Pipeline, PipelinePrograms
from autopar.ir.plan import ParallelPlan
from autopar.ir.schedule import Schedule
from autopar.ir.spec import WHOLE
from autopar.ir.stages import LayerTable
from autopar.ir.timeline import Event, PipelineTimes, StageProgramTime, Timeline
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.lower.stage_bodies import StagePrograms
from autopar.lower.stage_programs import cut_into_stage_programs
from autopar.lower.tiles import plan_tiles
from autopar.lower.unreduced import partial_axes, unreduced_layout
from autopar.rewrite.stage_slices import SlicedStep

if TYPE_CHECKING:  # a timeline needs no solver
    from autopar.stages.stage_plans import SolvedStage

# Planning tiles of larger meshes takes seconds; transfers between them are priced in closed form.
MAX_TILED = 256

Hosts = Sequence[frozenset[int]]  # of each mesh


def stage_times(
    sliced: SlicedStep,
    solved: Sequence[SolvedStage],
    *,
    devices: Sequence[Sequence[int]],
    stage_mesh: Sequence[int],
    schedule: str,
    num_micro_batches: int,
    cluster: ClusterSpec,
    launch_s: float,
) -> PipelineTimes:
    """Times of a planned pipeline. Work done once per step counts for the first stage program of
    the update."""
    stage_programs = cut_into_stage_programs(
        sliced.stages,
        [stage.plan.program for stage in solved],
        num_micro_batches,
        stage_mesh=stage_mesh,
        split_weights=schedule == "zero_bubble",
    )
    tables = [stage.costs for stage in solved]
    return pipeline_times(
        stage_programs.pipeline,
        _stage_program_seconds(stage_programs.pipeline, tables, launch_s),
        _transfer_times(stage_programs, sliced.program.avals, solved, devices, stage_mesh, cluster),
        [float(table.held_bytes[0]) for table in tables],
        [float(table.in_flight_bytes[0]) for table in tables],
        [float(table.working_bytes[0]) for table in tables],
    )


def _stage_program_seconds(
    pipeline: Pipeline, tables: Sequence[LayerTable], launch_s: float
) -> list[float]:
    """Seconds of one run of each stage program. The stage programs of a backward pass share its
    time evenly."""
    of_stage: dict[tuple[int, Phase], list[int]] = {}
    for number, stage_program in enumerate(pipeline.stage_programs):
        of_stage.setdefault((stage_program.stage, stage_program.phase), []).append(number)
    seconds = [launch_s] * len(pipeline.stage_programs)
    for stage, table in enumerate(tables):
        for number in of_stage.get((stage, Phase.FORWARD), []):
            seconds[number] += float(table.forward_s[0])
        later = [*of_stage.get((stage, Phase.BACKWARD), [])]
        later += of_stage.get((stage, Phase.WEIGHTS), [])
        for number in later:
            seconds[number] += float(table.latency_s[0] - table.forward_s[0]) / len(later)
        once = [*of_stage.get((stage, Phase.UPDATE), []), *of_stage.get((stage, Phase.PREPARE), [])]
        if once:
            seconds[once[0]] += float(table.once_s[0])
    return seconds


def _transfer_times(
    stage_programs: StagePrograms,
    avals: Sequence[Any],
    solved: Sequence[SolvedStage],
    devices: Sequence[Sequence[int]],
    stage_mesh: Sequence[int],
    cluster: ClusterSpec,
) -> list[TransferTime]:
    """Time of every transfer, for one micro-batch; 0 where both stages are on one mesh."""
    shapes = [stage.plan.mesh_shape for stage in solved]
    hosts = [tuple(d // cluster.devices_per_host for d in numbers) for numbers in devices]
    meshes = [
        mesh_of_cluster(replace(cluster, num_hosts=len(set(on))), shape)
        for shape, on in zip(shapes, hosts, strict=True)
    ]
    known: dict[Hashable, TransferTime] = {}
    times = []
    for transfer in stage_programs.pipeline.transfers:
        source, target, value = transfer.source, transfer.target, transfer.ref.value
        if stage_mesh[source] == stage_mesh[target]:
            times.append(TransferTime(0.0, 0.0))
            continue
        aval = avals[value]
        shape = tuple(getattr(aval, "shape", ()))
        ends = [
            _laid_out(stage_programs, stage, value, shape, shapes[stage])
            for stage in (source, target)
        ]
        # One array of one type is sent: partial sums are finished before.
        way = (ends[0][0], aval.dtype.itemsize, ends[0][1], shapes[source], ends[1][1])
        key = (*way, shapes[target], hosts[source], hosts[target])
        if key not in known and max(len(devices[source]), len(devices[target])) > MAX_TILED:
            known[key] = _in_closed_form(way[0], way[1], hosts[source], hosts[target], cluster)
        elif key not in known:
            plan = plan_tiles(*way, shapes[target])
            known[key] = transfer_time(plan, hosts[source], hosts[target], cluster, meshes[target])
        times.append(known[key])
    return times


def _in_closed_form(
    shape: tuple[int, ...],
    itemsize: int,
    source_hosts: Sequence[int],
    target_hosts: Sequence[int],
    cluster: ClusterSpec,
) -> TransferTime:
    """As if every byte crossed once, over all links between the two meshes."""
    num_bytes = float(itemsize * prod(shape))
    same_host = len({*source_hosts, *target_hosts}) == 1
    seconds = boundary_s(num_bytes, len(source_hosts), len(target_hosts), same_host, cluster)
    device = cluster.spec
    latency_s = device.intra_host_alpha_s if same_host else device.inter_host_alpha_s
    return TransferTime(num_bytes, seconds, min(latency_s, seconds))


def _laid_out(
    stage_programs: StagePrograms,
    stage: int,
    value: int,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape with lanes, layout) of a value's buffers."""
    layout = stage_programs.layouts[stage, value]
    if layout is None:
        layout = (WHOLE,) * len(mesh_shape)
    lanes = [mesh_shape[axis] for axis in partial_axes(layout)]
    return (*lanes, *shape), unreduced_layout(layout)


def mesh_hosts(
    devices: Sequence[Sequence[int]], stage_mesh: Sequence[int], devices_per_host: int
) -> list[frozenset[int]]:
    """The hosts on which each mesh has devices, given the devices of every stage."""
    hosts: list[set[int]] = [set() for _ in range(max(stage_mesh) + 1)]
    for numbers, mesh in zip(devices, stage_mesh, strict=True):
        hosts[mesh].update(number // devices_per_host for number in numbers)
    return list(map(frozenset, hosts))


def predicted_s(times: PipelineTimes, schedule: Schedule, hosts: Hosts | None = None) -> float:
    """Seconds of a step, by simulating it."""
    return _simulated(times, schedule, hosts)[3].step_s


def _simulated(
    times: PipelineTimes, schedule: Schedule, hosts: Hosts | None
) -> tuple[Pipeline, PipelinePrograms, SimulationInput, SimulationResult]:
    stage_mesh, number = schedule.stage_mesh, schedule.num_micro_batches
    pipeline, stage_program_s, transfers = pipeline_of_times(times, stage_mesh, number)
    programs = emit_programs(pipeline, schedule)
    if hosts is None:
        work = simulation_input(pipeline, programs, stage_program_s, transfers)
    else:
        work = simulation_input(pipeline, programs, stage_program_s, transfers, host_routes(hosts))
    return pipeline, programs, work, simulate(work)


# -- timelines


def predicted_timeline(plan: ParallelPlan) -> Timeline:
    """When what runs in a step of the plan: stage programs and transfers of a pipeline on its
    meshes, or forward passes, backward passes and the update of a step on one mesh."""
    if not plan.is_pipeline:
        return _on_one_mesh(plan)
    stage_mesh = [stage.mesh for stage in plan.stages]
    if not plan.schedule:
        return _side_by_side(plan, stage_mesh)
    times = plan.times or _times_of_stages(plan)
    schedule = make_schedule(
        plan.schedule, len(plan.stages), plan.num_micro_batches, stage_mesh=stage_mesh
    )
    hosts = None
    if plan.cluster is not None:
        devices = [stage.devices for stage in plan.stages]
        hosts = mesh_hosts(devices, stage_mesh, plan.cluster.devices_per_host)
    events = timeline(*_simulated(times, schedule, hosts))
    if not times.held_bytes:
        return events
    return replace(events, memory=_memory(events, times, stage_mesh))


def _memory(
    line: Timeline, times: PipelineTimes, stage_mesh: Sequence[int]
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Bytes on one device of each mesh: what its stages hold all the time, what they keep of each
    micro-batch from the start of its forward pass to the end of its last phase, and what they need
    while a stage program runs."""
    ends: dict[tuple[int, int | None], float] = {}
    for event in line.events:
        if event.kind == "run" and event.micro_batch is not None:
            key = event.stage, event.micro_batch
            ends[key] = max(ends.get(key, 0.0), event.end_s)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(line.num_meshes)]
    for event in line.events:
        if event.kind != "run":
            continue
        on_mesh, stage = changes[event.mesh], event.stage
        on_mesh.append((event.start_s, times.working_bytes[stage]))
        on_mesh.append((event.end_s, -times.working_bytes[stage]))
        if event.phase == Phase.FORWARD.value:
            on_mesh.append((event.start_s, times.kept_bytes[stage]))
            on_mesh.append((ends[stage, event.micro_batch], -times.kept_bytes[stage]))
    lines = []
    for mesh, on_mesh in enumerate(changes):
        held = sum(b for b, m in zip(times.held_bytes, stage_mesh, strict=True) if m == mesh)
        at_time: dict[float, float] = {0.0: held}
        for at, change in sorted(on_mesh):
            held += change
            at_time[at] = held
        lines.append(tuple(at_time.items()))
    return tuple(lines)


def _times_of_stages(plan: ParallelPlan) -> PipelineTimes:
    """Times of a plan that says nothing of its transfers: they take none."""
    phases = [Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS, Phase.UPDATE]
    if plan.schedule == "inference":
        phases = [Phase.FORWARD]
    elif plan.schedule != "zero_bubble":
        phases.remove(Phase.WEIGHTS)
    stage_programs = []
    for number, stage in enumerate(plan.stages):
        backward_s = stage.backward_s / (2 if Phase.WEIGHTS in phases else 1)
        seconds = {
            Phase.FORWARD: stage.forward_s,
            Phase.BACKWARD: backward_s,
            Phase.WEIGHTS: backward_s,
            Phase.UPDATE: stage.once_s,
        }
        stage_programs += (
            StageProgramTime(number, phase.value, 0, seconds[phase]) for phase in phases
        )
    return PipelineTimes((), (), (), (), (), tuple(stage_programs))


def _side_by_side(plan: ParallelPlan, stage_mesh: Sequence[int]) -> Timeline:
    """Stages that make results independently, one after another on each mesh."""
    now_s = [0.0] * (max(stage_mesh) + 1)
    events = []
    for number, (stage, mesh) in enumerate(zip(plan.stages, stage_mesh, strict=True)):
        took_s = 0.0 if stage.plan is None else stage.plan.estimated_step_s
        start = now_s[mesh]
        now_s[mesh] = start + took_s
        events.append(
            Event(mesh, "run", f"stage{number}_results", number, None, start, now_s[mesh])
        )
    return Timeline(tuple(events), max(now_s), len(now_s))


def _on_one_mesh(plan: ParallelPlan) -> Timeline:
    """One event per region: its modules' share of the plan's step time."""
    regions: dict[str, float] = {}
    for module in plan.modules:
        took_s = module.compute_s + module.communication_s
        regions[module.region] = regions.get(module.region, 0.0) + took_s
    total = sum(regions.values())
    if not total:
        whole = Event(0, "run", plan.name, 0, None, 0.0, plan.estimated_step_s)
        return Timeline((whole,), plan.estimated_step_s, 1)
    scale = plan.estimated_step_s / total
    per_micro_batch = [p.value for p in PER_MICRO_BATCH]
    number = plan.num_micro_batches
    looped = [r for r in per_micro_batch if regions.get(r)]
    once = [r for r in regions if r not in per_micro_batch and regions[r]]
    runs = [(r, m, regions[r] * scale / number) for m in range(number) for r in looped]
    runs += [(r, None, regions[r] * scale) for r in once]
    events, now = [], 0.0
    for region, micro_batch, took_s in runs:
        index = micro_batch if number > 1 else None
        name = region or "other"
        events.append(Event(0, "run", name, 0, index, now, now + took_s, region))
        now += took_s
    return Timeline(tuple(events), plan.estimated_step_s, 1, _one_mesh_memory(plan))


def _one_mesh_memory(plan: ParallelPlan) -> tuple[tuple[tuple[float, float], ...], ...]:
    memory = None if plan.details is None else plan.details.memory
    if memory is None:
        return ()
    at_points = map(sum, memory.held)
    return (tuple(zip(memory.seconds, at_points, strict=True)),)
