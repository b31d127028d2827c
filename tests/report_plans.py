"""Plans made by hand for tests of the report: of any size, with details, without planning."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.ir.details import (
    COLUMN,
    DATA,
    MEMORY_CATEGORIES,
    OTHER_LAYOUT,
    PARTIAL_SUMS,
    ROW,
    CollectiveCost,
    HeldArray,
    MemoryUse,
    OpRow,
    Parallelism,
    PlanDetails,
    op_table,
)
from autopar.ir.layering import Layering, LayerSource
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import (
    Fingerprint,
    ModuleCost,
    ParallelPlan,
    SolverReport,
    StagePlan,
    Tensor,
    check_plan,
)
from autopar.ir.program_sharding import ProgramSharding
from autopar.ir.spec import WHOLE
from autopar.ir.stages import PipelineChoice, SearchReport, StageChoice
from autopar.ir.timeline import Event, MeshTransferTime, PipelineTimes, StageProgramTime, Timeline

REGIONS = ("forward", "backward", "update")
GIB = 2.0**30


def op_rows(layers: range, ops_per_region: int, runs: int = 1) -> list[OpRow]:
    rows = []
    for region in REGIONS[:2]:
        for layer in layers:
            for number in range(ops_per_region):
                product = number % 4 == 0
                part = ("attention/qkv", "attention/out", "ffn/up", "ffn/down")[number // 4 % 4]
                module = f"GPT/layer_{layer}/{part}" if product else f"GPT/layer_{layer}"
                rows.append(
                    OpRow(
                        "dot_general" if product else ("add", "mul", "exp")[number % 3],
                        module,
                        region,
                        "bfloat16[64,1024,512]" if product else "float32[64,1024]",
                        "P('x', None, 'y')" if product else "P('x',)",
                        f"x: {DATA}, y: {COLUMN if 'qkv' in part or 'up' in part else ROW}",
                        f"model.py:{10 + number}",
                        runs,
                        2e10 * runs if product else 0.0,
                        runs * (1e-4 if product else 2e-6) * (2 if region == "backward" else 1),
                        5e-5 * runs if part.endswith(("out", "down")) and product else 0.0,
                        2**20 if part.endswith(("out", "down")) and product else 0.0,
                    )
                )
    rows.append(
        OpRow("mul", "", "update", "float32[512,512]", "P()", "", "optim.py:3", 1, 0.0, 1e-4, 0, 0)
    )
    return rows


def memory_use(points: int = 200) -> MemoryUse:
    """Parameters and state stay; activations grow and shrink."""
    held = []
    for point in range(points):
        grown = 1 - abs(2 * point / (points - 1) - 1)
        held.append((1 * GIB, 2 * GIB, (1 - grown) * GIB / 2, 3 * grown * GIB, 0.1 * GIB, 0, 0))
    peak = max(range(points), key=lambda point: sum(held[point]))
    largest = tuple(
        HeldArray(f"dot_general bfloat16[64,1024,{n}]", f"GPT/layer_{n}", "activations", GIB / n)
        for n in range(1, 9)
    )
    assert len(held[0]) == len(MEMORY_CATEGORIES)
    times = tuple(1e-4 * point for point in range(points))
    return MemoryUse(times, tuple(held), held[peak], times[peak], largest)


def details_of(rows: list[OpRow], layers: range) -> PlanDetails:
    collectives = []
    for layer in layers:
        module = f"GPT/layer_{layer}/ffn/down"
        product, norm = f"dot_general of {module}", f"add of GPT/layer_{layer}"
        for kind, axes, cause, seconds in (
            ("all-reduce", ("y",), PARTIAL_SUMS, 2e-5),
            ("all-gather", ("x",), OTHER_LAYOUT, 1e-5),
        ):
            collectives.append(
                CollectiveCost(
                    kind,
                    axes,
                    cause,
                    module,
                    "forward",
                    "bfloat16[64,1024,512]",
                    product,
                    norm,
                    "partial along y",
                    "P('x',)",
                    1,
                    2.0**20,
                    seconds,
                )
            )
    parallelism = tuple(
        Parallelism(
            f"state.params['layer_{layer}']['{name}']",
            f"GPT/layer_{layer}/ffn/{name}",
            (("x", DATA), ("y", word)),
            f"dot_general of GPT/layer_{layer}/ffn/{name}: y splits a dimension",
        )
        for layer in layers
        for name, word in (("up", COLUMN), ("down", ROW))
    )
    flops = sum(row.flops for row in rows)
    return PlanDetails(
        flops, 8 * flops, op_table(rows), tuple(collectives), memory_use(), parallelism
    )


def modules_of(rows: list[OpRow]) -> tuple[ModuleCost, ...]:
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found = sums.setdefault((row.module, row.region), [0.0, 0.0, 0.0])
        for position, value in enumerate(row[9:12]):
            found[position] += value
    return tuple(ModuleCost(*key, *values) for key, values in sums.items())


def params_of(layers: range, stage: int = 0) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"state.params['layer_{n}']['{name}']", shape, "float32", layout, "state", (stage,))
        for n in layers
        for name, shape, layout in (
            ("up", (512, 2048), (WHOLE, 1)),
            ("down", (2048, 512), (WHOLE, 0)),
        )
    )


def one_mesh(
    num_layers: int = 4, ops_per_region: int = 16, shape: tuple[int, int] = (2, 4), **fields: object
) -> ParallelPlan:
    layers = range(num_layers)
    rows = op_rows(layers, ops_per_region)
    batch = Tensor("batch['tokens']", (64, 1024), "int32", (0, WHOLE), "batch")
    inputs = (*params_of(layers), batch)
    step_s = sum(row.compute_s + row.communication_s for row in rows)
    plan = ParallelPlan(
        name="train_step",
        method="ShardParallel()",
        mesh_shape=shape,
        axis_names=("x", "y"),
        device="h100-sxm",
        inputs=inputs,
        outputs=(Tensor("result[1]", (), "float32", (WHOLE, WHOLE)),),
        program=ProgramSharding(tuple(t.layout for t in inputs), (), (((WHOLE, WHOLE),),)),
        stages=(StagePlan((0, 1), (1, prod(shape)), shape, step_s),),
        num_micro_batches=1,
        estimated_step_s=step_s,
        estimated_peak_bytes=6.1 * GIB,
        communication_bytes=sum(row.communication_bytes for row in rows),
        modules=modules_of(rows),
        solver=SolverReport(step_s, step_s, 0.0, {"nodes": len(rows)}, {"trace": 0.5, "shard": 1}),
        fingerprint=Fingerprint("0123456789abcdef", "0.10.2"),
        memory_budget_bytes=7 * GIB,
        cluster=ClusterSpec(1, prod(shape), "h100-sxm"),
        details=details_of(rows, layers),
    )
    plan = replace(plan, **fields)  # type: ignore[arg-type]
    check_plan(plan)
    return plan


def pipeline(
    num_stages: int = 4,
    num_micro_batches: int = 8,
    layers_per_stage: int = 2,
    ops_per_region: int = 16,
    shape: tuple[int, int] = (2, 4),
) -> ParallelPlan:
    """Equal stages, each on a mesh of its own."""
    size = prod(shape)
    stages, inputs = [], []
    for number in range(num_stages):
        layers = range(number * layers_per_stage, (number + 1) * layers_per_stage)
        rows = op_rows(layers, ops_per_region, num_micro_batches)
        own = one_mesh(
            shape=shape,
            inputs=params_of(layers),
            program=ProgramSharding(
                tuple(t.layout for t in params_of(layers)), (), (((WHOLE, WHOLE),),)
            ),
            modules=modules_of(rows),
            details=details_of(rows, layers),
            num_micro_batches=num_micro_batches,
            estimated_peak_bytes=(7 - number / num_stages) * GIB,
            memory_budget_bytes=7.2 * GIB,
        )
        inputs += params_of(layers, number)
        devices = tuple(range(number * size, (number + 1) * size))
        stages.append(
            StagePlan(
                (layers.start, layers.stop),
                (1, size),
                shape,
                0.003,
                own,
                devices,
                number,
                0.001,
                0.002,
                1e-4,
                5e-5,
                number == 0,
            )
        )
    inputs.append(Tensor("batch['tokens']", (64, 1024), "int32", (0, WHOLE), "batch", (0,)))
    choices = tuple(
        PipelineChoice(
            tuple(
                StageChoice(s.layers, s.submesh, s.mesh_shape, s.remat, 0, 0.003, 0, 6 * GIB, 0)
                for s in stages
            ),
            micro_batches,
            0.033 + 0.001 * number,
        )
        for number, micro_batches in enumerate((num_micro_batches, 2 * num_micro_batches))
    )
    step_s = (num_micro_batches + num_stages - 1) * 0.003 + 1e-4
    plan = ParallelPlan(
        name="train_step",
        method=f"PipeshardParallel(num_micro_batches={num_micro_batches})",
        mesh_shape=(num_stages * size,),
        axis_names=("x",),
        device="h100-sxm",
        inputs=tuple(inputs),
        outputs=(),
        program=ProgramSharding((), (), ()),
        stages=tuple(stages),
        num_micro_batches=num_micro_batches,
        estimated_step_s=step_s,
        estimated_peak_bytes=7 * GIB,
        communication_bytes=2.0**28,
        modules=(),
        solver=SolverReport(step_s, step_s * 0.99, 0.01, {"stages": num_stages}, {"trace": 0.5}),
        fingerprint=Fingerprint("0123456789abcdef", "0.10.2"),
        warnings=("Softmax of a custom kernel has no rule and is replicated (model.py:12).",),
        layers=tuple(f"GPT/layer_{n}" for n in range(num_stages * layers_per_stage)),
        layering=Layering(LayerSource.AUTO),
        schedule="1f1b",
        search=SearchReport(
            num_stages * layers_per_stage,
            1234,
            56,
            78,
            {"tables": 1.5},
            choices,
            ((0.033, 0.0334),),
            0.05,
            ("Submeshes of 3 devices were left out.",),
        ),
        cluster=ClusterSpec(num_stages * size // 8, 8, "h100-sxm"),
        times=times_of(num_stages),
    )
    check_plan(plan)
    return plan


def times_of(num_stages: int) -> PipelineTimes:
    """Forward passes of 1 ms, backward passes of 2 ms, and 4 MiB between neighbours."""
    forward_s, backward_s, update_s = 0.001, 0.002, 1e-4
    stage_programs, crossings = [], []
    for s in range(num_stages):
        phases = (("forward", forward_s), ("backward", backward_s), ("update", update_s))
        stage_programs += [StageProgramTime(s, phase, 0, seconds) for phase, seconds in phases]
    for s in range(num_stages - 1):
        for source, target, phase, offset in ((s, s + 1, "forward", 0), (s + 1, s, "backward", 1)):
            crossings.append(
                MeshTransferTime(
                    source,
                    target,
                    phase,
                    2.0**22,
                    5e-5,
                    value=2 * s + offset,
                    micro_batch=-1,
                    writers=((3 * source + offset, -1),),
                    readers=((3 * target + offset, -1),),
                )
            )
    each = (1.0,) * num_stages
    return PipelineTimes(
        tuple(forward_s * one for one in each),
        tuple(backward_s * one for one in each),
        (),
        tuple(update_s * one for one in each),
        tuple(crossings),
        tuple(stage_programs),
        tuple(3 * GIB for _ in each),
        tuple(GIB / 2 for _ in each),
        tuple(GIB for _ in each),
    )


def timeline(num_meshes: int, num_micro_batches: int, scale: float = 1.0) -> Timeline:
    """All forward passes and then all backward passes, one after the other on each mesh."""
    events = []
    forward_s, backward_s = 0.001 * scale, 0.002 * scale
    for mesh in range(num_meshes):
        for m in range(num_micro_batches):
            start = (mesh + m) * forward_s
            events.append(
                Event(mesh, "run", f"forward {mesh}", mesh, m, start, start + forward_s, "forward")
            )
            end = start + forward_s
            events.append(Event(mesh, "send", "activations", mesh, m, end, end + 5e-5, "", 2.0**22))
        turn = (num_meshes + num_micro_batches - 1) * forward_s
        for m in range(num_micro_batches):
            start = turn + (num_meshes - 1 - mesh + m) * backward_s
            end = start + backward_s
            events.append(Event(mesh, "run", f"backward {mesh}", mesh, m, start, end, "backward"))
    step_s = max(event.end_s for event in events)
    return Timeline(tuple(events), step_s, num_meshes)
