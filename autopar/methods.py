"""Parallel methods: how the user wants a step parallelized. Data that the compiler reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, near_names, shortened
from autopar.ir.memory_found import MemoryCorrection
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.schedule import SCHEDULES
from autopar.ir.xla_options import XlaValue, checked_xla_options


@dataclass(frozen=True)
class ShardingOptions:
    """Options and constraints of the sharding solver.

    Patterns are paths of inputs (`state.params['w']`) and outputs (`result[1]`) or names given by
    `autopar.constrain`, in which `*` stands for any text and `?` for any one character; brackets
    stand for themselves.

    solver:                 "highs", or the name of any solver that PuLP finds installed.
    solver_time_limit_s:    of one integer programme: then the best sharding so far is used, with
                            its proven gap.
    fold_layers:            give equal layers equal shardings; solve time then does not grow with
                            depth.
    pins:                   pattern -> `PartitionSpec` that all arrays it matches must have.
    forbid_axes:            pattern -> mesh axes that may not split the arrays it matches.
    batch_axis:             mesh axis or axes that split the batch along its first dimension; no
                            other axis then splits batch arguments, or rows anywhere in the step.
    allow_reduce_scatter:   False: partial sums are reduced by all-reduces only.
    allow_all_to_all:       False: a split moves to another dimension by a gather and a slice.
    allow_replicated_parameters: False: every state array of two or more dimensions is split over
                            some axis if any dimension can be; pins come first.
    memory_budget_bytes:    peak bytes of a step on one device; None for the device's memory.
    host_memory:            where devices are too small for a step, whatever is sharded, recomputed
                            and cut into micro-batches, the optimizer's state may lie in the memory
                            of their hosts, and then parameters that the step computes with in a
                            narrower type: "auto" as much as is needed, "never", or at most so many
                            bytes per device. Not in pipelines.
    memory_correction:      what XLA was found to keep, over what is predicted, for plans that must
                            fit: `plan.correction` of an earlier plan. Steps that are run, and
                            `plan_verified`, find it by themselves.
    remat:                  which layers recompute their activations in the backward pass: "auto"
                            as many as pay where memory is short, parts of them first, "none", or
                            "all".
    overlap:                on one host of GPUs, count that gathers of weights and sums of gradients
                            run under compute. XLA's schedules for GPTs, Llamas and mixtures of
                            experts become faster, those for Wide-ResNets slower. `rerank` tries
                            both.
    rerank:                 compile and run this many of the best plans, with made-up inputs, and
                            take the fastest; 0 takes the best predicted.
    rerank_by:              "run" times them on the devices; "program" only compiles them, and
                            takes the one whose scheduled program is judged the fastest.
    xla_options:            options of XLA's compiler for the step's programs alone, name -> value,
                            such as {"xla_gpu_enable_latency_hiding_scheduler": True}; the plan
                            keeps them. Those that a plan chooses itself (how far collectives are
                            merged) give way to these and to XLA_FLAGS, which are for the whole
                            process.
    planning_time_s:        seconds for the whole plan, tracing included: then the best plan so far
                            is used, with its proven gap, and `plan.solver.stopped` says what was
                            left out. Until there is a plan, planning goes on. None for no limit.
    keep_best_on_interrupt: Ctrl-C ends planning with the best plan so far; a second Ctrl-C raises
                            `KeyboardInterrupt`.

    With `mesh_shape="auto"`, meshes that cannot satisfy the options are skipped.
    """

    solver: str = "highs"
    solver_time_limit_s: float = 60.0
    fold_layers: bool = True
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict, hash=False)
    forbid_axes: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    batch_axis: str | Sequence[str] | None = field(default=None, hash=False)
    allow_reduce_scatter: bool = True
    allow_all_to_all: bool = True
    allow_replicated_parameters: bool = True
    memory_budget_bytes: float | None = None
    host_memory: str | float = "auto"
    memory_correction: MemoryCorrection | None = None
    remat: str = "auto"
    overlap: bool = False
    rerank: int = 0
    rerank_by: str = "run"
    xla_options: Mapping[str, XlaValue] = field(default_factory=dict, hash=False)
    planning_time_s: float | None = 60.0
    keep_best_on_interrupt: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.solver_time_limit_s) or not self.solver_time_limit_s > 0:
            _refuse(self, "solver_time_limit_s", "a number of seconds > 0")
        limit = self.planning_time_s
        if limit is not None and not (_is_number(limit) and limit > 0):
            _refuse(self, "planning_time_s", "a number of seconds > 0, or None for no limit")
        if not isinstance(self.solver, str):
            _refuse(self, "solver", "the name of a solver, such as 'highs'")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                _refuse(self, name, "True or False")
        budget = self.memory_budget_bytes
        if budget is not None and not (_is_number(budget) and budget > 0):
            _refuse(self, "memory_budget_bytes", "a number of bytes > 0, or None")
        host = self.host_memory
        if host not in ("auto", "never") and not (_is_number(host) and host > 0):  # type: ignore[operator]
            _refuse(self, "host_memory", "'auto', 'never' or a number of bytes > 0")
        correction = self.memory_correction
        if correction is not None and not isinstance(correction, MemoryCorrection):
            _refuse(self, "memory_correction", "the correction of a plan, or None")
        if self.remat not in ("none", "auto", "all"):
            _refuse(self, "remat", "'none', 'auto' or 'all'")
        if self.rerank != 0 and not _is_count(self.rerank):
            _refuse(self, "rerank", "a number of plans ≥ 0")
        if self.rerank_by not in ("run", "program"):
            _refuse(self, "rerank_by", "'run' or 'program'")
        checked = checked_xla_options(self.xla_options, "ShardingOptions(xla_options")
        object.__setattr__(self, "xla_options", checked)
        self._check_patterns()

    def _check_patterns(self) -> None:
        """Copies mappings, so that later changes of the user's dicts have no effect."""
        pins, forbidden, batch = self.pins, self.forbid_axes, self.batch_axis
        if not _is_mapping(pins, lambda spec: isinstance(spec, PartitionSpec)):
            needed = "a dict from path patterns to jax.sharding.PartitionSpec, such as "
            _refuse(self, "pins", needed + "{\"*['kernel']\": PartitionSpec(None, 'x')}")
        if not _is_mapping(forbidden, _are_axes):
            needed = "a dict from path patterns to axis names, such as {'batch*': ('y',)}"
            _refuse(self, "forbid_axes", needed)
        if batch is not None and not _are_axes(batch):
            _refuse(self, "batch_axis", "the name of a mesh axis, several different ones, or None")
        object.__setattr__(self, "pins", dict(pins))
        forbidden = {pattern: _as_names(axes) for pattern, axes in forbidden.items()}
        object.__setattr__(self, "forbid_axes", forbidden)
        object.__setattr__(self, "batch_axis", None if batch is None else _as_names(batch))


_SWITCHES = (
    "fold_layers", "allow_reduce_scatter", "allow_all_to_all", "allow_replicated_parameters",
    "keep_best_on_interrupt", "overlap",
)  # fmt: skip


def _refuse(owner: object, name: str, needed: str) -> NoReturn:
    given = getattr(owner, name)
    raise ArgumentError(f"{type(owner).__name__}({name}={given!r}): needs {needed}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_mapping(value: object, is_entry: Callable[[Any], bool]) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(k, str) and k and is_entry(v) for k, v in value.items())


def _as_names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _are_axes(value: object) -> bool:
    """A name of a mesh axis, or several different ones."""
    if not isinstance(value, (str, tuple, list)):
        return False
    names = _as_names(value)
    named = bool(names) and all(isinstance(name, str) and name for name in names)
    return named and len(set(names)) == len(names)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_micro_batches(method: ShardParallel | DataParallel | ManualParallel) -> None:
    given = method.num_micro_batches
    if not _is_count(given):
        raise ArgumentError(
            f"{type(method).__name__}(num_micro_batches={given!r}): needs a whole number ≥ 1."
        )


def _check_mesh_shape(method: ShardParallel | ManualParallel) -> None:
    shape = method.mesh_shape
    if shape == "auto" or isinstance(shape, LogicalMesh):
        return
    valid = isinstance(shape, (tuple, list)) and 1 <= len(shape) <= 2
    if not valid or not all(map(_is_count, shape)):
        raise ArgumentError(
            f"{type(method).__name__}(mesh_shape={shape!r}): needs one or two whole numbers ≥ 1 "
            "such as (8,) or (2, 4), or 'auto'."
        )


def _check_options(method: ShardParallel | PipeshardParallel | AutoParallel) -> None:
    if not isinstance(method.options, ShardingOptions):
        raise ArgumentError(
            f"{type(method).__name__}(options={method.options!r}): needs an "
            "autopar.ShardingOptions."
        )


@dataclass(frozen=True)
class ShardParallel:
    """Intra-operator parallelism: the solver shards every operator on one mesh.

    mesh_shape: devices along one or two axes; "auto" tries every factorisation of the number of
                devices and takes the best predicted; a `LogicalMesh` gives shape and link costs.
    num_micro_batches: parts of the batch over which gradients are accumulated.
    options:    of the solver.
    """

    mesh_shape: tuple[int, ...] | str | LogicalMesh = "auto"
    num_micro_batches: int = 1
    options: ShardingOptions = field(default_factory=ShardingOptions)

    def __post_init__(self) -> None:
        _check_mesh_shape(self)
        _check_micro_batches(self)
        _check_options(self)


@dataclass(frozen=True)
class DataParallel:
    """The batch split over all devices, everything else replicated, gradients all-reduced.

    num_micro_batches: parts of the batch over which gradients are accumulated.
    remat:             "none", or "all" to recompute every layer in the backward pass.
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def __post_init__(self) -> None:
        _check_micro_batches(self)
        if self.remat not in ("none", "all"):
            _refuse(self, "remat", "'none' or 'all'; ShardParallel and AutoParallel have 'auto'")

    @property
    def options(self) -> ShardingOptions:
        """What the solver is told: whether layers are recomputed."""
        return ShardingOptions(remat=self.remat)


@dataclass(frozen=True)
class Zero2Parallel(DataParallel):
    """Data parallelism with gradients and optimizer state sharded: gradients are reduce-scattered,
    each device updates its part, and the new parameters are gathered.

    num_micro_batches, remat: as for `DataParallel`.
    """


@dataclass(frozen=True)
class Zero3Parallel(DataParallel):
    """Data parallelism with gradients, optimizer state and parameters sharded: parameters are
    gathered where they are used; those that a scan slices, a layer at a time in its trip.

    num_micro_batches, remat: as for `DataParallel`.
    """


@dataclass(frozen=True, eq=False)
class ManualParallel:
    """The user gives the specs of inputs (and outputs); the solver shards everything between.

    mesh_shape, axis_names: the mesh.
    num_micro_batches: parts of the batch over which gradients are accumulated.
    in_specs, out_specs: pytrees of `PartitionSpec` like the arguments and the result, or prefixes
    of them; `None` where the solver may choose.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    in_specs: Any
    out_specs: Any = None
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        _check_mesh_shape(self)
        _check_micro_batches(self)
        shape, names = self.mesh_shape, self.axis_names
        fits = isinstance(shape, (tuple, list)) and isinstance(names, (tuple, list))
        fits = fits and all(isinstance(name, str) for name in names)
        if not fits or not len(shape) == len(names) == len(set(names)):
            raise ArgumentError(
                f"ManualParallel(mesh_shape={shape!r}, axis_names={names!r}): needs a shape such "
                "as (2, 4) and a tuple with a different name for each axis, such as ('x', 'y')."
            )


@dataclass(frozen=True, eq=False)
class CreateStateParallel:
    """For the function that creates the train state: every array is created in the shards that
    the train step needs, and never exists whole on one device. For a pipelined step, each stage's
    devices create that stage's arrays.

        create_state = parallelize(init_fn, method=CreateStateParallel(train_step, batch))
        state = create_state(key)

    train_step: the parallelized train step. It is planned for the state that `init_fn` returns
                (as its first argument that is neither batch nor static) and keeps that plan.
    batch:      the step's argument beside the state, as arrays or `jax.ShapeDtypeStruct`s; a
                tuple, in order, if there are several.
    """

    train_step: Any
    batch: Any

    def __post_init__(self) -> None:
        _check_train_step(self)


@dataclass(frozen=True, eq=False)
class FollowParallel:
    """For evaluation and the like: arguments that the train step also has keep training's layout.

    Arrays are matched by shape and by the names at the end of their paths, so `params['w']` is
    `state.params['w']`. Other batch arrays are split along their first dimension like training's;
    the solver decides everything else, results included, on the same mesh. For a pipelined step,
    the function becomes a pipeline on the same stages.

    train_step: a parallelized step that has been called or planned; the last plan counts.
    """

    train_step: Any

    def __post_init__(self) -> None:
        _check_train_step(self)


def _check_train_step(method: CreateStateParallel | FollowParallel) -> None:
    step = method.train_step
    if not (callable(step) and hasattr(step, "last_planned")):
        raise ArgumentError(
            f"{type(method).__name__}(train_step={step!r}): needs a train step that was made with "
            "autopar.parallelize."
        )


@dataclass(frozen=True, eq=False)
class PlacedParallel:
    """Internal: `CreateStateParallel` or `FollowParallel` resolved for one call. One spec per array
    leaf on the given mesh; `None` where the solver may choose."""

    name: str
    mesh: LogicalMesh
    in_specs: tuple[PartitionSpec | None, ...] | None = None
    out_specs: tuple[PartitionSpec | None, ...] | None = None


# -- pipelines


@dataclass(frozen=True)
class AutoLayers:
    """Finds layers: contiguous parts of the forward pass with little data between them.

    num_layers: how many, or "auto" for as many as the model has blocks.
    """

    num_layers: int | str = "auto"

    def __post_init__(self) -> None:
        if self.num_layers != "auto" and not _is_count(self.num_layers):
            _refuse(self, "num_layers", "a whole number ≥ 1, or 'auto'")


@dataclass(frozen=True)
class ManualLayers:
    """Layers end where the model calls `autopar.mark_layer_boundary()`."""


@dataclass(frozen=True)
class AutoStages:
    """Searches stages: which layers, on which submesh of the cluster, on which logical mesh.

    submeshes: shapes that a stage may have in a cluster of N hosts with M devices. "tiling": 1×1,
               1×2, 1×4 … 1×M, and k×M where k is a power of two or divides N; any such shapes that
               add up to the cluster can tile it. "all": every a×b where a divides N and b divides
               M; some combinations cannot tile the cluster.
    """

    submeshes: str = "tiling"

    def __post_init__(self) -> None:
        if self.submeshes not in ("tiling", "all"):
            _refuse(self, "submeshes", "'tiling' or 'all'")


@dataclass(frozen=True)
class UniformStages:
    """Stages with equal numbers of devices and about equal times.

    num_stages: how many.
    """

    num_stages: int

    def __post_init__(self) -> None:
        if not _is_count(self.num_stages):
            _refuse(self, "num_stages", "a whole number ≥ 1")


@dataclass(frozen=True)
class ManualStages:
    """Stages given by the user, in pipeline order.

        ManualStages([[0, 1], [2, 3, 4]], [(1, 4), (1, 4)], [(2, 2), None])

    layer_ids:   numbers of each stage's layers: 0, 1, 2 … in order, every layer in one stage.
    submeshes:   (hosts, devices per host) of each stage.
    mesh_shapes: the logical mesh of each stage, with as many devices as its submesh; `None` where
                 the planner may choose, or for all.
    """

    layer_ids: Sequence[Sequence[int]]
    submeshes: Sequence[tuple[int, int]]
    mesh_shapes: Sequence[tuple[int, ...] | None] | None = None

    def __post_init__(self) -> None:
        if not _is_list(self.layer_ids, lambda ids: _is_list(ids, _is_index)):
            _refuse(self, "layer_ids", "the layers of each stage, such as [[0, 1], [2, 3]]")
        if not _is_list(self.submeshes, lambda s: _is_shape(s) and len(s) == 2):
            _refuse(self, "submeshes", "(hosts, devices per host) of each stage, such as [(1, 4)]")
        shapes = self.mesh_shapes
        if shapes is None:
            shapes = [None] * len(self.submeshes)
        if not _is_list(shapes, lambda s: s is None or _is_shape(s)):
            needed = "a mesh of one or two axes for each stage, such as [(2, 2), None], or None"
            _refuse(self, "mesh_shapes", needed)
        flat = [layer for ids in self.layer_ids for layer in ids]
        if flat != list(range(len(flat))):
            _refuse(self, "layer_ids", "0, 1, 2 … in order, none left out and none given twice")
        for name, given in (("submeshes", self.submeshes), ("mesh_shapes", shapes)):
            if len(given) != len(self.layer_ids):
                needed = f"one entry for each of the {len(self.layer_ids)} stages in layer_ids"
                _refuse(self, name, needed)
        for stage, (submesh, shape) in enumerate(zip(self.submeshes, shapes, strict=True)):
            if shape is not None and prod(shape) != prod(submesh):
                needed = f"{prod(submesh)} devices in the mesh of stage {stage}, as many as its "
                needed += f"submesh {tuple(submesh)} has; {tuple(shape)} are {prod(shape)}"
                _refuse(self, "mesh_shapes", needed)
        object.__setattr__(self, "layer_ids", tuple(map(tuple, self.layer_ids)))
        object.__setattr__(self, "submeshes", tuple(map(tuple, self.submeshes)))
        shapes = tuple(None if shape is None else tuple(shape) for shape in shapes)
        object.__setattr__(self, "mesh_shapes", shapes)


@dataclass(frozen=True)
class PipeshardParallel:
    """Inter-operator parallelism: stages of layers on submeshes of the cluster, through which
    micro-batches flow; within each stage the solver shards operators.

    num_micro_batches: parts of the batch, or "auto" to search their number too.
    layers:            `AutoLayers(…)` or `ManualLayers()`.
    stages:            `AutoStages(…)`, `UniformStages(…)` or `ManualStages(…)`.
    schedule:          the order in which stages run micro-batches: "gpipe", "1f1b", "1f1b_eager",
                       "interleaved_1f1b", "zero_bubble", or "inference" (no backward pass).
    options:           of the solver, in every stage.
    """

    num_micro_batches: int | str
    layers: AutoLayers | ManualLayers = field(default_factory=AutoLayers)
    stages: AutoStages | UniformStages | ManualStages = field(default_factory=AutoStages)
    schedule: str = "1f1b"
    options: ShardingOptions = field(default_factory=ShardingOptions)

    def __post_init__(self) -> None:
        _check_micro_batches_or_auto(self)
        if not isinstance(self.layers, (AutoLayers, ManualLayers)):
            _refuse(self, "layers", "autopar.AutoLayers(…) or ManualLayers()")
        if not isinstance(self.stages, (AutoStages, UniformStages, ManualStages)):
            _refuse(self, "stages", "autopar.AutoStages(…), UniformStages(…) or ManualStages(…)")
        if self.schedule not in SCHEDULES:
            _refuse(self, "schedule", "one of " + ", ".join(map(repr, SCHEDULES)))
        _check_options(self)
        host = self.options.host_memory
        if _is_number(host):
            raise ArgumentError(
                f"PipeshardParallel(options=ShardingOptions(host_memory={host!r})): the stages of "
                "a pipeline keep their state on the devices. Use ShardParallel or AutoParallel, or "
                "leave host_memory at 'auto' or 'never'."
            )


@dataclass(frozen=True)
class AutoParallel:
    """Searches plans on one mesh and pipelines, and takes the best predicted that fits.

    num_micro_batches: parts of the batch, or "auto" to search their number too.
    options:           of the search.
    """

    num_micro_batches: int | str = "auto"
    options: ShardingOptions = field(default_factory=ShardingOptions)

    def __post_init__(self) -> None:
        _check_micro_batches_or_auto(self)
        _check_options(self)


def _check_micro_batches_or_auto(method: PipeshardParallel | AutoParallel) -> None:
    given = method.num_micro_batches
    if given != "auto" and not _is_count(given):
        _refuse(method, "num_micro_batches", "a whole number ≥ 1, or 'auto'")


def _is_list(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(map(is_entry, value))


def _is_shape(value: Any) -> bool:
    return _is_list(value, _is_count) and len(value) <= 2


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


ParallelMethod = (
    ShardParallel
    | DataParallel
    | ManualParallel
    | PipeshardParallel
    | AutoParallel
    | CreateStateParallel
    | FollowParallel
)
# Methods that run the whole step on one mesh, and all methods that the compiler takes.
OneMeshMethod = ShardParallel | DataParallel | ManualParallel | PlacedParallel | LogicalMesh
AnyMethod = ParallelMethod | PlacedParallel | LogicalMesh


def options_of(method: AnyMethod | None) -> ShardingOptions:
    """The method's options, or the defaults."""
    return getattr(method, "options", None) or ShardingOptions()


# -- methods as users give them

METHOD_NAMES: Mapping[str, Callable[[], ParallelMethod]] = {
    "auto": AutoParallel,
    "shard": ShardParallel,
    "data": DataParallel,
    "zero2": Zero2Parallel,
    "zero3": Zero3Parallel,
    "pipeline": lambda: PipeshardParallel("auto"),
}
_OTHER_NAMES = {
    "dp": "data", "ddp": "data", "zero": "zero2", "zero-2": "zero2", "zero-3": "zero3",
    "fsdp": "zero3", "tp": "shard", "tensor": "shard", "megatron": "shard", "gspmd": "shard",
    "pp": "pipeline", "pipeshard": "pipeline", "gpipe": "pipeline",
}  # fmt: skip
_EXAMPLES = {
    ManualParallel: "ManualParallel((2, 4), ('x', 'y'), in_specs)",
    PipeshardParallel: "PipeshardParallel(8)",
    CreateStateParallel: "CreateStateParallel(train_step, batch)",
    FollowParallel: "FollowParallel(train_step)",
}


def as_method(call: str, given: Any) -> ParallelMethod | ParallelPlan | None:
    """The method that a user gave: as it is, by one of `METHOD_NAMES`, or by a class that needs no
    arguments. `call`: the user's, for errors."""
    if given is None or isinstance(given, (ParallelMethod, ParallelPlan)):
        return given
    if isinstance(given, str):
        if given not in METHOD_NAMES:
            if given.endswith(".json"):
                raise ArgumentError(
                    f"{call}(method={given!r}): needs the plan, not its path; write "
                    f"method=autopar.ParallelPlan.load({given!r})."
                )
            known = _OTHER_NAMES.get(given.lower())
            hint = f" (that is {known!r} here)" if known else near_names(given, METHOD_NAMES)
            raise ArgumentError(
                f"{call}(method={given!r}): unknown method{hint}; "
                f"choose from {', '.join(map(repr, METHOD_NAMES))}, or give a method object."
            )
        return METHOD_NAMES[given]()
    if isinstance(given, type) and given in METHOD_NAMES.values():
        return given()
    if isinstance(given, type) and given in _EXAMPLES:
        raise ArgumentError(
            f"{call}(method={given.__name__}): this is the class, and it needs arguments; write "
            f"autopar.{_EXAMPLES[given]}."
        )
    if isinstance(given, ShardingOptions):
        raise ArgumentError(
            f"{call}(method=ShardingOptions(…)): options belong to a method; write "
            "autopar.AutoParallel(options=ShardingOptions(…))."
        )
    raise ArgumentError(
        f"{call}(method={shortened(given)}): needs a method such as autopar.AutoParallel(), "
        "ShardParallel(), DataParallel(), Zero2Parallel(), Zero3Parallel(), ManualParallel(…), "
        "PipeshardParallel(…), CreateStateParallel(…) or FollowParallel(…), one of "
        f"{', '.join(map(repr, METHOD_NAMES))}, a ParallelPlan, or None."
    )
