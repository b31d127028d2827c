"""The parallel plan: everything decided about a step, as plain data that can be saved and shared.

    text of a plan file ↔ ParallelPlan

A plan holds the layout of every operand and result of the program it was made for, so running it
needs no search. Its file is JSON, never code: `ParallelPlan.load` checks the format, the checksum
and every field, and applying a plan checks that the program is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar.ir.blocks import Blocks
from autopar.ir.details import PlanDetails
from autopar.ir.files import write_whole
from autopar.ir.host_memory import HostMemory
from autopar.ir.judged import JudgedStep
from autopar.ir.late_methods import late_method
from autopar.ir.layering import PER_STAGE_OUTPUTS, STORED_LAYERING, Layering
from autopar.ir.memory_found import MemoryCorrection, MemoryFound
from autopar.ir.mesh import ClusterSpec
from autopar.ir.program_sharding import ProgramSharding, check_program_sharding
from autopar.ir.rows import Rows, rows_grid, rows_shape, split_rows
from autopar.ir.schedule import SCHEDULES
from autopar.ir.sealed import SealedFormat
from autopar.ir.spec import WHOLE, Layout, fits, spec_from_text, to_partition_spec
from autopar.ir.stages import SearchReport
from autopar.ir.timeline import PipelineTimes, Timeline
from autopar.ir.xla_options import StoredOptions, are_stored

FORMAT_VERSION = 4
PLAN_FORMAT = SealedFormat(
    "autopar-plan",
    FORMAT_VERSION,
    "plan",
    PlanError,
    "Plan again, or give a file that plan.save() wrote.",
)

WALL = "planning.wall"  # in `SolverReport.seconds`: by the clock; the others are of passes
COMMUNICATION_ONLY = "communication only"  # `ParallelPlan.device` where compute has no price

# A function and its first argument, which put leaves into a pytree of the step.
PytreeBuilder = tuple[Callable[[Any, list[Any]], Any], Any]
NOT_IN_FILES = {"key": None}


_KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}  # NumPy does not know them


def item_bytes(dtype: str) -> int:
    """The bytes of an element, by the name of its type; those of random keys too."""
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype, max(_KEY_BYTES.values()))
    return np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Tensor:
    """An input or output by its path, with its layout.

    split:   of a stack over layers that is split over its stages, the number of rows that each of
             them holds. Of a scan of scans, rows are those of the leading dimensions together, as
             many dimensions as the numbers add up to; a stage whose rows are no box of these
             dimensions (`ir.rows`) is among the stages once for each of its boxes.
    layouts: per stage of such a stack, its layout there, if the stages are too unlike for all rows
             to be one `jax.Array`: it is a `DistributedArray`. None if all have `layout`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout  # on the mesh of the first of its stages
    role: str = ""  # "state", "batch" or ""
    stages: tuple[int, ...] = (0,)  # its own stage, then stages that get a copy
    split: tuple[int, ...] | None = field(default=None, metadata={"omit_none": True})
    layouts: tuple[Layout, ...] | None = field(default=None, metadata={"omit_none": True})

    def holders(self) -> tuple[int, ...]:
        """The stages that have it from the start: one, or those that have rows of it."""
        return self.stages[:1] if self.split is None else self.stages

    def held_shape(self) -> tuple[int, ...]:
        """The shape of what a stage has of it from the start; the most that one has."""
        if self.split is None:
            return self.shape
        return max((rows_shape(self.shape, rows) for rows in self.rows() if rows), key=prod)

    def held_layouts(self) -> tuple[Layout, ...]:
        """Per stage that has it from the start, its layout there."""
        return self.layouts or (self.layout,) * len(self.holders())

    def rows(self) -> tuple[Rows | None, ...]:
        """Per stage that has it from the start, its rows; None for all."""
        if self.split is None:
            return (None,)
        rows = split_rows(self.split, self.shape)
        assert rows is not None
        return rows


@dataclass(frozen=True)
class ModuleCost:
    """The costs of one of the user's modules, per step and device."""

    module: str
    region: str
    compute_s: float
    communication_s: float
    communication_bytes: float
    collectives: tuple[tuple[str, int], ...] = ()  # (kind and axes, count)


@dataclass(frozen=True)
class StagePlan:
    """A contiguous part of the step on its own submesh. Plans without a pipeline have one.

    layers:     a half-open range.
    submesh:    hosts, devices per host.
    cost:       seconds: of the whole step without a pipeline; else of one micro-batch, with its
                share of the work done once per step.
    plan:       the sharding of the stage; None without a pipeline.
    devices:    positions of its devices among all, host-major.
    mesh:       number of its submesh; stages of an interleaved schedule share submeshes.
    forward_s, backward_s, once_s: the parts of `cost`; `transfer_s`: waiting for transfers.
    remat:      the backward pass recomputes its layers.
    """

    layers: tuple[int, int]
    submesh: tuple[int, int]
    mesh_shape: tuple[int, ...]
    cost: float
    plan: ParallelPlan | None = None
    devices: tuple[int, ...] = ()
    mesh: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    transfer_s: float = 0.0
    remat: bool = False


@dataclass(frozen=True)
class Fingerprint:
    """The program and the JAX release that a plan was made for."""

    program: str  # hash of every equation with its shapes
    jax_version: str


@dataclass(frozen=True)
class SolverReport:
    """The solver's result and its proven bound. `unbounded`: objective and peak bytes without the
    memory budget, where the budget made a difference; `stopped`: what was left out for want of
    planning time, and why, if anything was."""

    objective: float
    lower_bound: float
    gap: float
    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unbounded: tuple[float, ...] = ()
    stopped: str | None = field(default=None, metadata={"omit_none": True})


@dataclass(frozen=True)
class ParallelPlan:
    """Everything decided about a step, as data. `autopar.plan` and `step.plan` return it.

    name, method, asked:  the step's name, the method as text, and the one that the user gave if it
                          chose that method.
    mesh_shape, axis_names, device: the mesh of a plan without a pipeline, and its devices.
    cluster:              that the step was planned for.
    inputs, outputs:      all arguments and results, with path, shape, role and layout.
    named:                values that `autopar.constrain` named; a name may occur often.
    stages:               of a pipeline, each with its layers, submesh and own plan; else one.
    num_micro_batches:    parts of the batch.
    remat:                layers that the backward pass recomputes.
    unrolled:             whether scans over layers are written out on one mesh.
    layers, layering, schedule, times: of a pipeline: its layers, how they were found, the schedule,
                          and predicted times of its stage programs and transfers.
    estimated_step_s:     predicted seconds of a step.
    estimated_peak_bytes: predicted peak bytes on the fullest device.
    memory_budget_bytes:  the budget per device; infinite if there was none.
    communication_bytes:  sent by a device in a step.
    modules, details:     the user's modules with their costs; every operator, collective and
                          parameter.
    solver, search:       results of the sharding solver and the stage search, with bounds.
    pinned, unpinned_step_s: the pins of `with_pins` as (pattern, spec as text), and the predicted
                          step without them.
    correction:           what XLA was found to keep, over what was predicted; in its predictions.
    memory_found:         XLA's bytes, once the plan is compiled.
    host:                 what lies in host memory, if anything does.
    xla_options:          of XLA's compiler, for the plan's programs; None for its defaults.
    hidden_s:             predicted seconds of the modules' communication that run under compute,
                          and so are no part of the step; None if it was not asked.
    judged:               the step as XLA's schedule shows it, once the plan was compiled and read.
    warnings:             for the user.
    program, fingerprint: the annotated program, and its identity.
    in_tree, out_tree, origin: pytrees, and the problem that the plan solves; not in files.
    cached:               the file of the plan cache that it was read from, if it was.
    """

    name: str
    method: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    program: ProgramSharding
    stages: tuple[StagePlan, ...]
    num_micro_batches: int
    estimated_step_s: float
    estimated_peak_bytes: float
    communication_bytes: float
    modules: tuple[ModuleCost, ...]
    solver: SolverReport
    fingerprint: Fingerprint
    warnings: tuple[str, ...] = ()
    named: tuple[Tensor, ...] = ()
    memory_budget_bytes: float = inf
    remat: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    layering: Layering | None = field(default=None, metadata={"stored": STORED_LAYERING})
    schedule: str = ""  # of a pipeline; none if each stage computes its own results
    search: SearchReport | None = None
    cluster: ClusterSpec | None = None
    details: PlanDetails | None = None  # of a plan on one mesh; a pipeline's stages have their own
    times: PipelineTimes | None = None
    pinned: tuple[tuple[str, str], ...] = ()
    unpinned_step_s: float | None = None
    asked: str | None = field(default=None, metadata={"omit_none": True})
    correction: MemoryCorrection | None = field(default=None, metadata={"omit_none": True})
    memory_found: MemoryFound | None = field(
        default=None, compare=False, metadata={"omit_none": True}
    )
    unrolled: bool | None = field(default=None, metadata={"omit_none": True})
    host: HostMemory | None = field(default=None, metadata={"omit_none": True})
    xla_options: StoredOptions | None = field(default=None, metadata={"omit_none": True})
    hidden_s: float | None = field(default=None, metadata={"omit_none": True})
    judged: JudgedStep | None = field(default=None, compare=False, metadata={"omit_none": True})
    in_tree: PytreeBuilder | None = field(
        default=None, compare=False, repr=False, metadata=NOT_IN_FILES
    )
    out_tree: PytreeBuilder | None = field(
        default=None, compare=False, repr=False, metadata=NOT_IN_FILES
    )
    cached: str = field(default="", compare=False, repr=False, metadata=NOT_IN_FILES)
    # The problem that the plan solves, if known: an `Origin` of `sharding` or `stages`.
    origin: Any = field(default=None, compare=False, repr=False, metadata=NOT_IN_FILES)

    @property
    def num_stages(self) -> int:
        """1 without a pipeline."""
        return len(self.stages)

    @property
    def is_pipeline(self) -> bool:
        """Whether its stages have meshes of their own."""
        return self.stages[0].plan is not None

    @property
    def is_timed(self) -> bool:
        """Whether costs are seconds. Without a device, only communication has a price, in the
        units of the mesh."""
        return self.device != COMMUNICATION_ONLY

    @property
    def num_devices(self) -> int:
        """Of its mesh."""
        return prod(self.mesh_shape)

    def mesh_plan(self, tensor: Tensor) -> ParallelPlan:
        """The plan of the mesh that a tensor belongs to: its stage's, or this one."""
        return self.stages[tensor.stages[0]].plan or self

    def spec_of(self, tensor: Tensor) -> PartitionSpec:
        """On the mesh of the stage that holds it."""
        return self.held_specs(tensor)[0]

    def held_specs(self, tensor: Tensor) -> tuple[PartitionSpec, ...]:
        """Per stage that has a tensor from the start, its spec on that stage's mesh."""
        return tuple(
            to_partition_spec(layout, len(tensor.shape), (self.stages[s].plan or self).axis_names)
            for s, layout in zip(tensor.holders(), tensor.held_layouts(), strict=True)
        )

    @property
    def input_specs(self) -> Any:
        """`PartitionSpec`s in the pytree of the function's arguments. A plan read from a file has
        no pytrees: then it is a dict from path to spec."""
        return self._tree(self.inputs, self.in_tree, self.spec_of)

    @property
    def output_specs(self) -> Any:
        """`PartitionSpec`s in the pytree of the function's result (a dict if read from a file)."""
        return self._tree(self.outputs, self.out_tree, self.spec_of)

    @property
    def input_stages(self) -> Any:
        """The stages that hold each input: always `(0,)` without a pipeline."""
        return self._tree(self.inputs, self.in_tree, lambda tensor: tensor.stages)

    @property
    def output_stages(self) -> Any:
        """The stages that hold each output."""
        return self._tree(self.outputs, self.out_tree, lambda tensor: tensor.stages)

    @staticmethod
    def _tree(
        tensors: tuple[Tensor, ...], tree: PytreeBuilder | None, leaf_of: Callable[[Tensor], Any]
    ) -> Any:
        if tree is None:
            return {tensor.path: leaf_of(tensor) for tensor in tensors}
        build, args = tree
        return build(args, [leaf_of(tensor) for tensor in tensors])

    def explain(
        self, path: str | None = None, *, depth: int | None = None, detail: str = "short"
    ) -> str:
        """The plan in words, on one screen: what limits the step, the parallelism of the user's
        modules down to `depth` levels, memory. `detail="full"` adds parameters, collectives, all
        inputs and the search. With a path of an input, an output or a named value: why it is
        sharded as it is."""
        if path is not None:
            return late_method("explain_path")(self, path)
        return late_method("explain")(self, depth, detail)

    def __repr__(self) -> str:
        step = f"{self.estimated_step_s:.4g}" + (" s" if self.is_timed else "")
        where = f"{self.num_stages} stages" if self.is_pipeline else f"mesh {self.mesh_shape}"
        return f"<ParallelPlan of {self.name}: {where}, step {step}, {self.asked or self.method}>"

    def __str__(self) -> str:
        return late_method("summary")(self)

    def _repr_html_(self) -> str:
        return late_method("summary_html")(self)

    def report(
        self,
        target: str | Path,
        *,
        measured: Timeline | None = None,
        compare: Mapping[str, ParallelPlan | str] | None = None,
    ) -> None:
        """Write the plan as one HTML page that needs no network, with the `measured` timeline
        beside the predicted one, and other plans of the step by name in `compare` (a text says why
        there is no plan)."""
        late_method("report")(self, target, measured, compare)

    def timeline(self) -> Timeline:
        """The predicted timeline of a step, on each mesh."""
        return late_method("timeline")(self)

    def blocks(self, stage: int = 0) -> Blocks:
        """The step as parallel blocks, with the strategies of their entry operators, the chosen
        one and its costs: `print(plan.blocks())`. Of a pipeline, those of one stage."""
        return late_method("blocks")(self, stage)

    def strategies(self) -> str:
        """How every operator is sharded, as a table."""
        return late_method("strategies")(self)

    def with_pins(self, pins: Mapping[str, Any]) -> ParallelPlan:
        """The best plan with these arrays pinned to specs, on the same meshes and stages."""
        return late_method("with_pins")(self, pins)

    def to_json(self) -> str:
        """The text of the plan's file."""
        return PLAN_FORMAT.text(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a crash leaves the old file or the new one, never half."""
        target = Path(path)
        if not target.parent.is_dir():
            raise PlanError(f"plan.save({str(path)!r}): the folder {target.parent} does not exist.")
        if target.is_dir():
            raise PlanError(f"plan.save({str(path)!r}): is a folder; give the path of a file.")
        write_whole(target, self.to_json())

    @staticmethod
    def load(path: str | Path) -> ParallelPlan:
        """Read and check a plan file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise PlanError(f"ParallelPlan.load({str(path)!r}): cannot be read: {error}") from error
        return ParallelPlan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan") -> ParallelPlan:
        """A plan from the text of its file; `PlanError` if it is malformed."""
        plan = PLAN_FORMAT.read(ParallelPlan, text, where)
        check_plan(plan, where)
        return plan


def check_plan(plan: ParallelPlan, where: str = "plan") -> None:
    """`PlanError` unless layouts have one entry per mesh axis and fit their arrays, counts agree,
    and numbers are in range."""
    _check_values(plan, where)
    if plan.is_pipeline:
        _check_pipeline(plan, where)
    else:
        _check_mesh(plan, where)
    for tensor in (*plan.inputs, *plan.outputs, *plan.named):
        _check_tensor(plan, tensor, where)


def _check_values(plan: ParallelPlan, where: str) -> None:
    if not 0 <= (plan.hidden_s or 0.0) < inf:
        raise PLAN_FORMAT.malformed(where, f"hidden_s: {plan.hidden_s}")
    if not 0 <= plan.estimated_step_s < inf:
        raise PLAN_FORMAT.malformed(where, f"estimated_step_s: {plan.estimated_step_s}")
    if not plan.memory_budget_bytes > 0:
        raise PLAN_FORMAT.malformed(where, f"memory_budget_bytes: {plan.memory_budget_bytes}")
    correction = plan.correction
    if correction is not None and not (
        0 < correction.kept < inf and 0 < correction.recomputed < inf
    ):
        raise PLAN_FORMAT.malformed(where, f"correction: {correction}")
    if plan.memory_found is not None and not plan.memory_found.compiled_bytes:
        raise PLAN_FORMAT.malformed(where, "memory_found: no bytes of any mesh")
    if plan.xla_options is not None and not are_stored(plan.xla_options):
        raise PLAN_FORMAT.malformed(where, f"xla_options: {plan.xla_options!r:.200}")
    if plan.judged is not None and not plan.judged.is_sound:
        raise PLAN_FORMAT.malformed(where, f"judged: {plan.judged!r}")
    if plan.host is not None:
        fault = plan.host.fault(len(plan.inputs), len(plan.outputs))
        if fault is not None or plan.is_pipeline:
            raise PLAN_FORMAT.malformed(where, f"host: {fault or 'in a pipeline'}")
    for name, values in (("remat", plan.remat), ("layers", plan.layers)):
        if len(set(values)) != len(values):
            raise PLAN_FORMAT.malformed(where, f"{name}: {values!r:.60} has a name twice")
    try:
        for _, spec in plan.pinned:
            spec_from_text(spec)
    except ValueError as error:
        raise PLAN_FORMAT.malformed(where, f"pinned: {error}") from error


def _check_mesh(plan: ParallelPlan, where: str) -> None:
    num_axes = len(plan.mesh_shape)
    one_name_each = len(plan.axis_names) == len(set(plan.axis_names)) == num_axes
    if not one_name_each or not all(size >= 1 for size in plan.mesh_shape):
        raise PlanError(f"{where}: mesh {plan.mesh_shape} with axes {plan.axis_names}.")
    for name in ("inputs", "outputs"):
        num_arrays, num_layouts = len(getattr(plan, name)), len(getattr(plan.program, name))
        if num_arrays != num_layouts:
            raise PlanError(f"{where}: {num_arrays} {name}, {num_layouts} layouts.")
    check_program_sharding(plan.program, num_axes, where, smallest_entry=WHOLE)


def _check_pipeline(plan: ParallelPlan, where: str) -> None:
    """Stages are plans of their own on disjoint devices, and cover the layers in order."""
    if plan.layering is None:
        raise PlanError(f"{where}: does not say how its layers were found.")
    if plan.schedule not in SCHEDULES and (plan.schedule or plan.layering != PER_STAGE_OUTPUTS):
        raise PlanError(
            f"{where}: unknown schedule {plan.schedule!r}; choose from {', '.join(SCHEDULES)}."
        )
    ends = [0, *(stage.layers[1] for stage in plan.stages)]
    if [stage.layers[0] for stage in plan.stages] != ends[:-1] or ends[-1] != len(plan.layers):
        raise PlanError(f"{where}: stages that do not cover {len(plan.layers)} layers in order.")
    mesh_devices: dict[int, tuple[int, ...]] = {}
    for number, stage in enumerate(plan.stages):
        _check_stage(stage, f"{where}: stage {number}")
        devices = stage.devices
        known = mesh_devices.setdefault(stage.mesh, devices)
        if len(known) < len(devices):  # stages of one mesh may leave some devices unused
            known = mesh_devices[stage.mesh] = devices
        if known[: len(devices)] != devices:
            raise PlanError(f"{where}: stage {number} is on other devices than its mesh.")
    every = [device for devices in mesh_devices.values() for device in devices]
    in_range = 0 <= min(every) <= max(every) < plan.num_devices
    are_meshes = set(mesh_devices) == set(range(len(mesh_devices)))
    if len(set(every)) != len(every) or not in_range or not are_meshes:
        raise PlanError(f"{where}: submeshes that do not tile {plan.num_devices} devices.")


def _check_stage(stage: StagePlan, where: str) -> None:
    plan = stage.plan
    if plan is None or plan.is_pipeline or plan.mesh_shape != stage.mesh_shape:
        raise PlanError(f"{where} has no plan for its mesh {stage.mesh_shape}.")
    if len(stage.devices) != plan.num_devices or stage.layers[0] >= stage.layers[1]:
        raise PlanError(
            f"{where} has {len(stage.devices)} devices and the layers {stage.layers}; its mesh "
            f"needs {plan.num_devices} devices."
        )
    check_plan(plan, where)


def is_one_array(
    rows: Sequence[Rows], meshes: Sequence[int], mesh_shapes: Sequence[tuple[int, ...]]
) -> bool:
    """Whether these rows of a stack can be shards of one array: boxes of one shape, on meshes of
    one shape, no two on one mesh."""
    is_even = rows_grid(rows) is not None
    return is_even and len(set(mesh_shapes)) == 1 and len(set(meshes)) == len(meshes)


def _check_split(plan: ParallelPlan, tensor: Tensor, where: str) -> None:
    """A stack without layouts of its own per stage is one array."""
    assert tensor.split is not None
    stages = [plan.stages[s] for s in tensor.stages]
    rows = split_rows(tensor.split, tensor.shape)
    has_layouts = tensor.layouts is not None and len(tensor.layouts) == len(stages)
    meshes, shapes = [s.mesh for s in stages], [s.mesh_shape for s in stages]
    if (
        rows is None
        or len(stages) != len(rows)
        or not (has_layouts or is_one_array(rows, meshes, shapes))
    ):
        raise PlanError(
            f"{where}: {tensor.path} {tensor.shape} is split into {tensor.split} rows over the "
            f"stages {tensor.stages}."
        )


def _check_tensor(plan: ParallelPlan, tensor: Tensor, where: str) -> None:
    if not tensor.stages or not all(0 <= s < len(plan.stages) for s in tensor.stages):
        raise PlanError(f"{where}: {tensor.path} is on the stages {tensor.stages}.")
    if any(size < 0 for size in tensor.shape):
        raise PLAN_FORMAT.malformed(where, f"{tensor.path} has the shape {tensor.shape}")
    if tensor.split is not None:
        _check_split(plan, tensor, where)
    held = zip(tensor.holders(), tensor.held_layouts(), tensor.rows(), strict=True)
    for stage, layout, rows in held:
        mesh_shape = (plan.stages[stage].plan or plan).mesh_shape
        in_range = all(WHOLE <= entry < len(tensor.shape) for entry in layout)
        if len(layout) != len(mesh_shape) or not in_range:
            raise PlanError(f"{where}: {tensor.path} has the layout {layout}.")
        shape = tensor.shape if rows is None else rows_shape(tensor.shape, rows)
        if not fits(layout, shape, mesh_shape):
            raise PlanError(
                f"{where}: {tensor.path} {shape} is not divided evenly by its layout "
                f"{layout} on the mesh {mesh_shape}."
            )
