"""The parallel plan: everything decided, as plain data that can be saved, read and shared.

A plan holds the layout of every operand and result of the program it was made for, so running it
needs no search. It is JSON, never code: `ParallelPlan.load` checks the format, the checksum and
every field before it believes a file, and applying a plan checks that the program is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar.ir.blocks import Blocks
from autopar.ir.decode import decode, json_key
from autopar.ir.details import PlanDetails
from autopar.ir.late_methods import late_method
from autopar.ir.mesh import ClusterSpec, decode_cluster
from autopar.ir.schedule import SCHEDULES
from autopar.ir.spec import PARTIAL, WHOLE, Layout, fits, spec_from_text, to_partition_spec
from autopar.ir.stages import SearchReport, decode_search
from autopar.ir.timeline import PipelineTimes, Timeline

FORMAT = "autopar-plan"
FORMAT_VERSION = 4

FOLLOWING = "following "  # before the layering of a step that follows another
HELD = "held"  # layers are what each stage does with the arguments that it has
MADE = "made"  # no layers: each stage makes results of its own, and nothing is sent

Chain = tuple[Layout, ...]  # layouts an operand is taken through before its use


@dataclass(frozen=True)
class UnreducedAxes:
    """Partial sums kept as data: one addend per rank of each axis, in leading dimensions of the
    array (*lanes*) that those axes split. A layout that is `PARTIAL` along an axis means such an
    array.

    axes:     the axes with lanes, in mesh order.
    operands: the layout each operand is read in; None for constants. Where it is `PARTIAL` along
              an axis the operand has lanes already; where it splits a dimension, that dimension is
              cut into lanes.
    """

    axes: tuple[int, ...]
    operands: tuple[Layout | None, ...]


@dataclass(frozen=True)
class EquationSharding:
    """Operands: the layouts each is resharded through. Results: the layouts each is taken through
    when it is made; none where it is left to the compiler (partial sums). Local: for an operator
    that is bound on each device to that one's parts, the layouts of operands and of results as it
    makes them; empty otherwise. Refetched: operands that are resharded here although they were
    before, so that the copy need not be kept."""

    operands: tuple[Chain, ...]
    results: tuple[Chain, ...]
    bodies: tuple[ProgramSharding, ...] = ()
    local: tuple[tuple[Layout, ...], ...] = ()
    refetched: tuple[Refetch, ...] = ()
    lanes: UnreducedAxes | None = None


@dataclass(frozen=True)
class Refetch:
    """An operand, by its position, of which all but the first `num_shared` layouts are passed
    through anew, and not before the value `after` is there."""

    operand: int
    num_shared: int
    after: int


@dataclass(frozen=True)
class ProgramSharding:
    inputs: tuple[Layout | None, ...]
    equations: tuple[EquationSharding, ...]
    outputs: tuple[Chain, ...]


@dataclass(frozen=True)
class Tensor:
    """An input or output by its path, with where it lies."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout  # on the mesh of the first of its stages
    role: str = ""  # "state", "batch" or ""
    stages: tuple[int, ...] = (0,)  # first the one it belongs to, then those that get a copy


@dataclass(frozen=True)
class ModuleCost:
    """What one of the user's modules costs in one step, on each device."""

    module: str
    region: str
    compute_s: float
    communication_s: float
    communication_bytes: float
    collectives: tuple[tuple[str, int], ...] = ()  # (kind and axes, how many)


@dataclass(frozen=True)
class StagePlan:
    """A contiguous part of the step on its own submesh. Intra-operator plans have one.

    layers:     a half-open range.
    submesh:    hosts, devices per host.
    cost:       seconds: of the whole step without a pipeline; else of one micro-batch, with its
                share of what is done once per step.
    plan:       how the stage's own step is sharded; None without a pipeline.
    devices:    positions of its devices among all, host-major.
    mesh:       number of its submesh: stages of an interleaved schedule share some.
    forward_s, backward_s, once_s: what `cost` is made of; `transfer_s` is what it waits for.
    remat:      the backward pass computes its layers again.
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
    """What a plan was made for."""

    program: str  # hash of every equation with its shapes
    jax_version: str


@dataclass(frozen=True)
class SolverReport:
    """How the sharding was found and how good it is known to be. `unbounded`: what objective and
    peak bytes would have been without a memory budget, where the budget made a difference."""

    objective: float
    lower_bound: float
    gap: float
    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unbounded: tuple[float, ...] = ()


@dataclass(frozen=True)
class ParallelPlan:
    """Everything that is decided about a step, as data. `autopar.plan` and `step.plan` make it.

    name, method:         the step's name, and the method as text.
    mesh_shape, axis_names, device: the mesh, of a plan without a pipeline, and its devices.
    cluster:              what it was planned for.
    inputs, outputs:      all arguments and results, with path, shape, role and layout.
    named:                values that `autopar.constrain` named.
    stages:               of a pipeline, each with its layers, submesh and own plan; else one.
    num_micro_batches:    into how many the batch is cut.
    remat:                layers that are computed again in the backward pass.
    layers, layering, schedule, times: of a pipeline: its layers, how they were found, the schedule,
                          and predicted times of its programs and transfers.
    estimated_step_s:     predicted seconds of a step.
    estimated_peak_bytes: predicted bytes on the fullest device, at the peak.
    memory_budget_bytes:  what was kept to.
    communication_bytes:  what a device sends in a step.
    modules, details:     the user's modules with their costs; every operator, collective and
                          parameter.
    solver, search:       what the sharding solver and the stage search did, with bounds.
    pinned, unpinned_step_s: what `with_pins` asked for, and the step before.
    warnings:             what the user should know.
    program, fingerprint: how the program is annotated, and what identifies it.
    in_tree, out_tree, origin: pytrees, and what the plan can be solved again from; not in files.
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
    named: tuple[Tensor, ...] = ()  # what `autopar.constrain` named; a name may occur often
    memory_budget_bytes: float = inf  # per device, of the step; infinite if none was kept to
    remat: tuple[str, ...] = ()  # layers whose forward pass is computed again in the backward pass
    layers: tuple[str, ...] = ()  # names of a pipeline's layers
    layering: str = ""  # how they were found: "auto", "manual", their number, `HELD` or `MADE`
    schedule: str = ""  # of a pipeline; none if its stages are `MADE`
    search: SearchReport | None = None  # what the stage search considered, if there was one
    cluster: ClusterSpec | None = None  # what it was planned for
    details: PlanDetails | None = (
        None  # of a plan on one mesh; those of a pipeline's are its stages'
    )
    times: PipelineTimes | None = None  # of a pipeline
    pinned: tuple[tuple[str, str], ...] = ()  # what `with_pins` asked for: pattern, spec as text
    unpinned_step_s: float | None = None  # the predicted step before `with_pins`
    in_tree: Any = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)
    origin: Any = field(default=None, compare=False, repr=False)  # what re-solves it, if known

    @property
    def num_stages(self) -> int:
        """1 without a pipeline."""
        return len(self.stages)

    @property
    def is_pipeline(self) -> bool:
        """Whether it has stages on meshes of their own."""
        return self.stages[0].plan is not None

    @property
    def num_devices(self) -> int:
        """Of its mesh."""
        count = 1
        for size in self.mesh_shape:
            count *= size
        return count

    def spec_of(self, tensor: Tensor) -> PartitionSpec:
        """On the mesh of the stage that holds it."""
        own = self.stages[tensor.stages[0]].plan or self
        return to_partition_spec(tensor.layout, len(tensor.shape), own.axis_names)

    @property
    def input_specs(self) -> Any:
        """`PartitionSpec`s in the pytree of the function's arguments. A plan read from a file
        knows paths, not pytrees: there it is a dict from path to spec."""
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
    def _tree(tensors: tuple[Tensor, ...], tree: Any, of: Any) -> Any:
        if tree is None:
            return {t.path: of(t) for t in tensors}
        build, args = tree
        return build(args, [of(t) for t in tensors])

    def explain(self, path: str | None = None, *, depth: int | None = None) -> str:
        """The plan in words, in the names of the user's own modules, down to `depth` levels of
        them. With a path (of an input, an output or a named value): why that is sharded so."""
        return late_method("explain")(self, path, depth)

    def report(self, target: str | Path, *, measured: Timeline | None = None) -> None:
        """Write the plan as one HTML page that needs no network; `measured` is drawn beside the
        predicted timeline."""
        late_method("report")(self, target, measured)

    def timeline(self) -> Timeline:
        """When what is predicted to run in a step, on each mesh."""
        return late_method("timeline")(self)

    def blocks(self, stage: int = 0) -> Blocks:
        """The step as parallel blocks, with the strategies of their entry operators, what was
        chosen and what it costs: `print(plan.blocks())`. Of a pipeline, one stage's."""
        return late_method("blocks")(self, stage)

    def strategies(self) -> str:
        """How every operator is sharded, as a table."""
        return late_method("strategies")(self)

    def with_pins(self, pins: Mapping[str, Any]) -> ParallelPlan:
        """The best plan with these arrays pinned to specs, on the same meshes and stages."""
        return late_method("with_pins")(self, pins)

    # -- files

    def to_json(self) -> str:
        """The text of the plan's file."""
        body = _encode(self)
        document = {"format": FORMAT, "version": FORMAT_VERSION, "plan": body}
        document["sha256"] = _digest(body)
        return json.dumps(document, indent=None, separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a crash leaves the old file or the new one, never half."""
        target = Path(path)
        if not target.parent.is_dir():
            raise PlanError(f"plan.save({str(path)!r}): the folder {target.parent} does not exist.")
        if target.is_dir():
            raise PlanError(f"plan.save({str(path)!r}): is a folder; give the path of a file.")
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_text(self.to_json())
        temporary.replace(target)

    @staticmethod
    def load(path: str | Path) -> ParallelPlan:
        """Read and check a plan file."""
        try:
            text = Path(path).read_text()
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise PlanError(f"ParallelPlan.load({str(path)!r}): cannot be read: {error}") from error
        return ParallelPlan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan") -> ParallelPlan:
        """A plan from the text of its file; `PlanError` if it is malformed."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where}: not JSON ({error}). Save the plan again.") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlanError(f"{where}: not an autopar plan. Give a file written by plan.save().")
        if document.get("version") != FORMAT_VERSION:
            found = document.get("version")
            newer = isinstance(found, int) and found > FORMAT_VERSION
            remedy = "Use the autopar that wrote it, or a newer one" if newer else "Plan again"
            raise PlanError(
                f"{where}: plan format {found!r}, this autopar reads {FORMAT_VERSION}. {remedy}."
            )
        body: Any = document.get("plan")
        if document.get("sha256") != _digest(body):
            raise PlanError(
                f"{where}: the checksum does not match, so the file was altered or cut short. "
                "Plan again, or restore the file."
            )
        try:
            plan = _decode_plan(body)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"{where}: malformed plan ({error!r}). Plan again.") from error
        check_plan(plan, where)
        return plan


def check_plan(plan: ParallelPlan, where: str = "plan") -> None:
    """Layouts have one entry per mesh axis, fit their arrays, and counts agree."""
    if plan.is_pipeline:
        check_pipeline(plan, where)
        return
    axes = len(plan.mesh_shape)
    one_name_each = len(plan.axis_names) == len(set(plan.axis_names)) == axes
    if not one_name_each or not all(n >= 1 for n in plan.mesh_shape):
        raise PlanError(f"{where}: mesh {plan.mesh_shape} with axes {plan.axis_names}.")
    for tensor in (*plan.inputs, *plan.outputs, *plan.named):
        in_range = all(-1 <= entry < len(tensor.shape) for entry in tensor.layout)
        if len(tensor.layout) != axes or not in_range:
            raise PlanError(f"{where}: {tensor.path} has the layout {tensor.layout}.")
        if not fits(tensor.layout, tensor.shape, plan.mesh_shape):
            raise PlanError(
                f"{where}: {tensor.path} {tensor.shape} is not divided evenly by its layout "
                f"{tensor.layout} on the mesh {plan.mesh_shape}."
            )
    if len(plan.program.inputs) != len(plan.inputs):
        raise PlanError(f"{where}: {len(plan.inputs)} inputs, {len(plan.program.inputs)} layouts.")
    if len(plan.program.outputs) != len(plan.outputs):
        raise PlanError(
            f"{where}: {len(plan.outputs)} outputs, {len(plan.program.outputs)} layouts."
        )
    _check_program(plan.program, axes, where, least=WHOLE)


def check_pipeline(plan: ParallelPlan, where: str) -> None:
    """Stages are whole plans on devices of their own, and cover the layers in order."""
    if plan.schedule not in SCHEDULES and (plan.schedule or plan.layering != MADE):
        raise PlanError(f"{where}: the schedule {plan.schedule!r}.")
    layering = plan.layering.removeprefix(FOLLOWING)
    if layering not in ("auto", "manual", HELD, MADE) and not layering.isdecimal():
        raise PlanError(f"{where}: the layers found by {plan.layering!r}.")
    ends = [0, *(stage.layers[1] for stage in plan.stages)]
    if [stage.layers[0] for stage in plan.stages] != ends[:-1] or ends[-1] != len(plan.layers):
        raise PlanError(f"{where}: stages that do not cover {len(plan.layers)} layers in order.")
    devices: dict[int, tuple[int, ...]] = {}
    for number, stage in enumerate(plan.stages):
        own = stage.plan
        if own is None or own.is_pipeline or own.mesh_shape != stage.mesh_shape:
            raise PlanError(f"{where}: stage {number} has no plan for its mesh {stage.mesh_shape}.")
        if len(stage.devices) != own.num_devices or stage.layers[0] >= stage.layers[1]:
            raise PlanError(f"{where}: stage {number} has {len(stage.devices)} devices.")
        known = devices.setdefault(stage.mesh, stage.devices)
        if len(known) < len(stage.devices):  # one of two may leave some unused
            known, devices[stage.mesh] = stage.devices, stage.devices
        if known[: len(stage.devices)] != stage.devices:
            raise PlanError(f"{where}: stage {number} is on other devices than its mesh.")
        check_plan(own, f"{where}: stage {number}")
    every = [device for own in devices.values() for device in own]
    distinct = len(set(every)) == len(every) and max(every) < plan.num_devices
    if not distinct or set(devices) != set(range(len(devices))):
        raise PlanError(f"{where}: submeshes that do not tile {plan.num_devices} devices.")
    for tensor in (*plan.inputs, *plan.outputs, *plan.named):
        if not tensor.stages or not all(0 <= s < len(plan.stages) for s in tensor.stages):
            raise PlanError(f"{where}: {tensor.path} is on the stages {tensor.stages}.")
        own = plan.stages[tensor.stages[0]].plan
        assert own is not None
        in_range = all(-1 <= entry < len(tensor.shape) for entry in tensor.layout)
        if len(tensor.layout) != len(own.mesh_shape) or not in_range:
            raise PlanError(f"{where}: {tensor.path} has the layout {tensor.layout}.")
        if not fits(tensor.layout, tensor.shape, own.mesh_shape):
            raise PlanError(
                f"{where}: {tensor.path} {tensor.shape} is not divided evenly by its layout "
                f"{tensor.layout} on the mesh {own.mesh_shape}."
            )


def _check_program(program: ProgramSharding, axes: int, where: str, least: int) -> None:
    """`least` is what entries of inputs and outputs must be at least; those of loops' bodies and
    all between may be `PARTIAL`."""

    def check(layout: Layout | None, least: int = PARTIAL) -> None:
        if layout is not None and (len(layout) != axes or any(e < least for e in layout)):
            raise PlanError(f"{where}: a layout {layout} for a mesh of {axes} axes.")

    for layout in program.inputs:
        check(layout, least)
    for chain in program.outputs:
        for layout in chain:
            check(layout, least)
    for equation in program.equations:
        for chain in (*equation.operands, *equation.results):
            for layout in chain:
                check(layout)
        for layout in (layout for group in equation.local for layout in group):
            if len(layout) != axes or any(e < PARTIAL for e in layout):
                raise PlanError(f"{where}: a layout {layout} for a mesh of {axes} axes.")
        counts = [len(group) for group in equation.local]
        if counts not in ([], [len(equation.operands), len(equation.results)]):
            raise PlanError(f"{where}: layouts {equation.local} of an equation's parts.")
        for again in equation.refetched:
            known = 0 <= again.operand < len(equation.operands) and again.after >= 0
            if not known or not 0 <= again.num_shared <= len(equation.operands[again.operand]):
                raise PlanError(f"{where}: an operand cannot be fetched again as {again}.")
        if equation.lanes is not None:
            _check_lanes(equation, axes, where)
            for layout in equation.lanes.operands:
                check(layout)
        for body in equation.bodies:
            _check_program(body, axes, where, least=PARTIAL)


def _check_lanes(equation: EquationSharding, num_axes: int, where: str) -> None:
    assert equation.lanes is not None
    axes, operands = equation.lanes.axes, equation.lanes.operands
    in_order = tuple(sorted(set(axes))) == axes and all(0 <= a < num_axes for a in axes)
    if not axes or not in_order or len(operands) != len(equation.operands):
        raise PlanError(f"{where}: lanes {equation.lanes} for a mesh of {num_axes} axes.")


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(value: Any) -> Any:
    if isinstance(value, ClusterSpec) and value.measured is not None:
        return _encode(replace(value, profile=value.priced_by))
    if hasattr(value, "__dataclass_fields__"):
        skip = ("in_tree", "out_tree", "origin")
        if isinstance(value, ClusterSpec) and value.profile is None:
            skip = (*skip, "profile")
        shown = [f for f in fields(value) if f.name not in skip]
        return {json_key(f): _encode(getattr(value, f.name)) for f in shown}
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _encode(v) for k, v in value.items()}
    return None if value == inf else value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _budget(value: Any) -> float:
    """JSON has no infinity, so no budget is written as null."""
    budget = inf if value is None else float(value)
    if not budget > 0:
        raise ValueError(f"a memory budget of {value!r}")
    return budget


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(_whole(n) for n in value)
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {value!r}")
    return shape


def _layout(value: Any) -> Layout | None:
    return None if value is None else tuple(_whole(e) for e in value)


def _names(value: Any) -> tuple[str, ...]:
    names = tuple(value)
    if isinstance(value, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{value!r} is not a list of names")
    if len(set(names)) != len(names):
        raise ValueError(f"{value!r} has a name twice")
    return names


def _chain(value: Any) -> Chain:
    layouts = tuple(_layout(v) for v in value)
    if None in layouts:
        raise ValueError("an empty layout in a chain")
    return layouts  # type: ignore[return-value]


def _decode_program(body: dict[str, Any]) -> ProgramSharding:
    return ProgramSharding(
        inputs=tuple(_layout(v) for v in body["inputs"]),
        equations=tuple(
            EquationSharding(
                operands=tuple(_chain(c) for c in e["operands"]),
                results=tuple(_chain(c) for c in e["results"]),
                bodies=tuple(_decode_program(b) for b in e["bodies"]),
                local=tuple(_chain(c) for c in e["local"]),
                refetched=tuple(
                    Refetch(_whole(r["operand"]), _whole(r["num_shared"]), _whole(r["after"]))
                    for r in e["refetched"]
                ),
                lanes=_decode_lanes(e["lanes"]),
            )
            for e in body["equations"]
        ),
        outputs=tuple(_chain(c) for c in body["outputs"]),
    )


def _decode_lanes(body: dict[str, Any] | None) -> UnreducedAxes | None:
    if body is None:
        return None
    return UnreducedAxes(_shape(body["axes"]), tuple(_layout(v) for v in body["operands"]))


def _decode_tensor(body: dict[str, Any]) -> Tensor:
    layout = _layout(body["layout"])
    if layout is None:
        raise ValueError(f"{body['path']}: no layout")
    return Tensor(
        str(body["path"]),
        _shape(body["shape"]),
        str(body["dtype"]),
        layout,
        str(body["role"]),
        _shape(body["stages"]),
    )


def _decode_stage(body: dict[str, Any]) -> StagePlan:
    return StagePlan(
        layers=(_whole(body["layers"][0]), _whole(body["layers"][1])),
        submesh=(_whole(body["submesh"][0]), _whole(body["submesh"][1])),
        mesh_shape=_shape(body["mesh_shape"]),
        cost=float(body["cost"]),
        plan=None if body["plan"] is None else _decode_plan(body["plan"]),
        devices=_shape(body["devices"]),
        mesh=_whole(body["mesh"]),
        forward_s=float(body["forward_s"]),
        backward_s=float(body["backward_s"]),
        once_s=float(body["once_s"]),
        transfer_s=float(body["transfer_s"]),
        remat=bool(body["remat"]),
    )


def _pins(body: Any) -> tuple[tuple[str, str], ...]:
    pins = decode(tuple[tuple[str, str], ...], body)
    for _, text in pins:
        spec_from_text(text)  # raises what does not fit
    return pins


def _decode_plan(body: dict[str, Any]) -> ParallelPlan:
    return ParallelPlan(
        name=str(body["name"]),
        method=str(body["method"]),
        mesh_shape=_shape(body["mesh_shape"]),
        axis_names=tuple(str(n) for n in body["axis_names"]),
        device=str(body["device"]),
        inputs=tuple(_decode_tensor(t) for t in body["inputs"]),
        outputs=tuple(_decode_tensor(t) for t in body["outputs"]),
        program=_decode_program(body["program"]),
        stages=tuple(_decode_stage(stage) for stage in body["stages"]),
        num_micro_batches=_whole(body["num_micro_batches"]),
        estimated_step_s=float(body["estimated_step_s"]),
        estimated_peak_bytes=float(body["estimated_peak_bytes"]),
        communication_bytes=float(body["communication_bytes"]),
        modules=tuple(
            ModuleCost(
                str(m["module"]),
                str(m["region"]),
                float(m["compute_s"]),
                float(m["communication_s"]),
                float(m["communication_bytes"]),
                tuple((str(k), _whole(n)) for k, n in m["collectives"]),
            )
            for m in body["modules"]
        ),
        solver=SolverReport(
            float(body["solver"]["objective"]),
            float(body["solver"]["lower_bound"]),
            float(body["solver"]["gap"]),
            {str(k): _whole(v) for k, v in body["solver"]["sizes"].items()},
            {str(k): float(v) for k, v in body["solver"]["seconds"].items()},
            tuple(float(v) for v in body["solver"]["unbounded"]),
        ),
        fingerprint=Fingerprint(
            str(body["fingerprint"]["program"]), str(body["fingerprint"]["jax_version"])
        ),
        warnings=tuple(str(w) for w in body["warnings"]),
        named=tuple(_decode_tensor(t) for t in body["named"]),
        memory_budget_bytes=_budget(body["memory_budget_bytes"]),
        remat=_names(body["remat"]),
        layers=_names(body["layers"]),
        layering=str(body["layering"]),
        schedule=str(body["schedule"]),
        search=None if body["search"] is None else decode_search(body["search"]),
        cluster=None if body["cluster"] is None else decode_cluster(body["cluster"]),
        details=decode(PlanDetails | None, body["details"]),
        times=decode(PipelineTimes | None, body["times"]),
        pinned=_pins(body["pinned"]),
        unpinned_step_s=decode(float | None, body["unpinned_step_s"]),
    )
