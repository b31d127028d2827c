"""What users call: from a function to a `ParallelFunction`, a plan or an executable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten, tree_map, tree_map_with_path

from autopar import _jax, session
from autopar.compiler import keep_plan, last_search, plan_step
from autopar.errors import (
    ArgumentError,
    CompileError,
    MemoryBudgetError,
    MeshError,
    shortened,
)
from autopar.executables import lower_for_cluster, make_executable, make_remote_executable
from autopar.inspect.dump import describing
from autopar.ir.memory_found import MemoryCorrection, MemoryFound
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.objects.equinox_modules import is_equinox_module
from autopar.ir.objects.nnx import NO_OBJECTS, has_objects, is_object, split_objects, update_objects
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import LoweredStep
from autopar.ir.stages import SearchReport
from autopar.lower.given_devices import devices_of_step
from autopar.lower.planned_step import PlannedStep
from autopar.measure.judged_plan import judged_executable
from autopar.measure.rerank import plan_fastest
from autopar.methods import (
    CreateStateParallel,
    FollowParallel,
    ParallelMethod,
    ShardingOptions,
    ShardParallel,
    as_method,
    options_of,
)
from autopar.multi_controller import (
    compile_together,
    count_together,
    is_multi_controller,
    make_room_together,
    plan_together,
)
from autopar.runtime.executable import Executable
from autopar.runtime.local import LocalExecutable, SignatureChanged
from autopar.runtime.ranks.failures import add_remedy, is_out_of_memory
from autopar.runtime.remote.arrays import DistributedArray
from autopar.runtime.remote.executable import RemoteExecutable
from autopar.runtime.remote.session import RemoteSession
from autopar.session import checked_devices
from autopar.sharding.refit import (
    RAN_OUT,
    Refit,
    can_refit,
    hopeful,
    limit_of,
    on_devices_only,
    out_of_memory_excess,
    with_correction,
)
from autopar.tracer.flat_call import flatten_call, is_array_leaf
from autopar.tracer.jax_settings import outside_of_mesh, trace_settings
from autopar.tracer.trace import DEFAULT_BATCH, StepOptions, step_and_options
from autopar.tracer.users_names import use_users_names
from autopar.tracer.while_trips import SCOPE


def local_devices() -> tuple[Any, ...]:
    return session.current().all_devices()


class ParallelFunction:
    """A function that runs sharded and is called like the one it wraps; `parallelize` returns it.

    fn:              the wrapped function.
    method, options: those given to `parallelize`.
    last_executable: what ran last, with `hlo_text()`, `collectives()`, `memory_bytes()` and
                     `dump_debug_info(folder)`; None before the first call.

    The first call with arguments of new shapes or types plans and compiles. Calls raise
    `TraceError` if the function cannot be traced, `MemoryBudgetError` if no plan fits,
    `CompileError` if XLA rejects the program, and on a cluster `WorkerError` if a worker is lost.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        method: ParallelMethod | ParallelPlan | None,
        options: StepOptions,
    ) -> None:
        self._fn = fn
        self._method = method
        self._options = options
        self._plans: dict[Any, list[PlannedStep]] = {}
        self._lowered: list[tuple[PlannedStep, LoweredStep]] = []  # for clusters
        self._entries: dict[Any, list[tuple[PlannedStep, Executable]]] = {}
        # Compiled before they are called: to rank plans, or to see whether they fit.
        self._compiled_early: dict[Any, list[tuple[PlannedStep, Executable]]] = {}
        self._takes_objects = False  # whether a call had nnx objects among its arguments
        self.last_planned: PlannedStep | None = None
        self.last_executable: Executable | None = None
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f"<parallelized {getattr(self._fn, '__name__', self._fn)!r}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A parallelized method: `self` becomes part of the function, unless it is a module of nnx
        or equinox, whose arrays must be arguments."""
        if instance is None:
            return self
        if is_object(instance) or is_equinox_module(instance):
            return MethodType(self, instance)
        name = f"_autopar_{id(self)}"
        bound = instance.__dict__.get(name)
        if bound is None:
            function = self._fn.__get__(instance, owner)
            bound = ParallelFunction(function, self._method, self._options)
            instance.__dict__[name] = bound
        return bound

    def plan(self, *args: Any, **kwargs: Any) -> ParallelPlan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`). Runs nothing, unless
        the method times plans (`ShardingOptions(rerank=…)`)."""
        return self.planned(args, kwargs).plan

    def judged_plan(self) -> ParallelPlan:
        """The plan that ran last, with the time that XLA's schedule of its programs shows:
        `plan.judged`, which `explain()` and `report()` put beside the predicted step."""
        executable = self.last_executable
        if executable is None:
            raise ArgumentError(
                f"{self!r}.judged_plan(): reads a compiled step, and none has been compiled yet. "
                "Call the step once; without devices, use autopar.plan_verified(…)."
            )
        plan = executable.plan
        cluster = plan.cluster or session.current().cluster()
        return replace(plan, judged=judged_executable(executable, cluster))

    @property
    def options(self) -> StepOptions:
        """The argument positions given to `parallelize`."""
        return self._options

    @property
    def method(self) -> ParallelMethod | ParallelPlan | None:
        """The method given to `parallelize`; None searches everything."""
        return self._method

    def planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedStep:
        """The traced and planned step; planned once per shapes and types of arguments."""
        apart = split_objects(args, kwargs, self._options.static_argnums)
        args, kwargs = _without_values((apart.args, apart.kwargs))
        call = flatten_call(self._fn, args, kwargs, self._options.static_argnums)
        key = (
            call.treedef,
            call.static,
            call.static_args,
            trace_settings(),
            session.current().plan_key,
        )
        known = self._plans.setdefault(key, [])
        types = _types(call.leaves)
        planned = next((p for p in known if _types_of(p.traced.avals) == types), None)
        if planned is None:
            planned = self._make_plan(args, kwargs)
            known.append(planned)
        self.last_planned = planned
        return planned

    def _forget_ended_sessions(self) -> None:
        """After a restart, the plan is the same, but programs are compiled by new workers."""
        for kept in (self._entries, self._compiled_early):
            for old in [key for key in kept if session.is_over(key[-1])]:
                del kept[old]

    def planned_to_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedStep:
        """The planned step as it will run: where memory is limited, it is compiled, and planned
        again if it does not fit by XLA's count."""
        if _jax.is_tracing() or self._limit(self.planned(args, kwargs)) is None:
            return self.planned(args, kwargs)
        entry = self._compile(args, kwargs)
        self._keep_compiled(*entry)
        return entry[0]

    def _keep_compiled(self, planned: PlannedStep, executable: Executable) -> None:
        """For the first call."""
        key = (session.current().key,)
        self._compiled_early.setdefault(key, []).append((planned, executable))

    def _take_compiled(self, planned: PlannedStep) -> Executable | None:
        known = self._compiled_early.get((session.current().key,), [])
        found = next((executable for one, executable in known if one is planned), None)
        known[:] = [entry for entry in known if entry[0] is not planned]
        return found

    def _make_plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        correction: MemoryCorrection | None = None,
    ) -> PlannedStep:
        """`correction`: what XLA was found to keep, over what is predicted."""
        now, options = session.current(), self._options
        method = self._method
        if not isinstance(method, ParallelPlan):
            method = with_correction(method, correction)
            if now.remote is not None or is_multi_controller():
                where = "workers" if now.remote is not None else "the devices of several processes"
                method = on_devices_only(method, where)
        num = _rerank_of(method)
        if num:
            _check_rerank(num, now.remote is not None)
            return self._make_fastest(args, kwargs, num)
        if _is_together():
            return plan_together(
                self._fn,
                args,
                kwargs,
                devices=now.all_devices(),
                cluster_of=now.cluster,
                method=method,
                given=self._method,
                options=options,
            )
        planned = plan_step(
            self._fn, args, kwargs, cluster=now.cluster(), method=method, options=options
        )
        if now.remote is not None:
            return planned
        given = devices_of_step(planned.plan.name, planned.traced.program, now.all_devices())
        if given is None or planned.plan.num_devices <= len(given):
            return planned
        return self._plan_on_fewer(args, kwargs, given, method)

    def _plan_on_fewer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        devices: tuple[Any, ...],
        method: ParallelMethod | ParallelPlan | None,
    ) -> PlannedStep:
        """A step that names its devices, fewer than the session has."""
        cluster = replace(session.current(), devices=devices).cluster()
        try:
            return plan_step(
                self._fn,
                args,
                kwargs,
                cluster=cluster,
                method=method,
                options=self._options,
            )
        except MeshError as error:
            raise MeshError(
                f"{self!r}: a shard_map or sharding constraint in it has a mesh of {len(devices)} "
                f"devices, and all of a step runs on the same devices. {error}"
            ) from error

    def _make_fastest(self, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> PlannedStep:
        """The plan that ran fastest. Its executable is kept for the first call."""
        now = session.current()
        assert self._method is not None and not isinstance(self._method, ParallelPlan)
        fastest = plan_fastest(
            self._fn,
            args,
            kwargs,
            devices=now.all_devices(),
            cluster=now.cluster(),
            method=self._method,
            options=self._options,
            num=num,
        )
        if fastest.executable is not None:
            fastest.executable.plan = fastest.planned.plan
            self._keep_compiled(fastest.planned, fastest.executable)
        return fastest.planned

    def compiled_entries(self) -> list[tuple[PlannedStep, Executable]]:
        """Steps that were planned and compiled for the session's devices, the latest first."""
        known, now = list(self._entries.items()), session.current().key
        return [entry for key, entries in known[::-1] if key[-1] == now for entry in entries]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._fn(*args, **kwargs)  # line by line, as under `jax.jit`
        with outside_of_mesh():
            if self._takes_objects:
                apart = split_objects(args, kwargs, self._options.static_argnums)
                return update_objects(apart, self._run(apart.args, apart.kwargs))
            return update_objects(NO_OBJECTS, self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on arguments without nnx objects; returns results without them."""
        static = self._options.static_argnums
        if static:
            values = tuple(args[i] for i in static if i < len(args))
            dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        else:
            values, dynamic = (), args
        leaves, treedef = tree_flatten((dynamic, kwargs))
        key = (treedef, values, trace_settings(), session.current().key)
        try:
            entries = self._entries.get(key)
        except TypeError:  # an unhashable static argument: flatten_call reports it
            entries = None
        for planned, executable in entries or ():
            arrays = planned.traced.call.arrays_among(leaves)
            if arrays is None:
                continue
            try:
                results = _run(planned, executable, arrays)
            except SignatureChanged:
                continue
            self.last_planned, self.last_executable = planned, executable
            return planned.traced.rebuild_output(results)
        return self._first_call(args, kwargs, key)

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        if not self._takes_objects and has_objects((args, kwargs)):
            self._takes_objects = True  # plans are cached by arguments without objects
            return self(*args, **kwargs)
        planned, executable = self._compile(args, kwargs)
        leaves = flatten_call(self._fn, args, kwargs, self._options.static_argnums).leaves
        while True:
            others_may_run = False
            try:
                placed = self._with_room(planned, executable, leaves)
                others_may_run = _is_together()
                results = _run(planned, executable, placed)
                break
            except jax.errors.JaxRuntimeError as error:
                is_lost = others_may_run or any(map(_is_used_up, leaves))
                if is_lost or not is_out_of_memory(error):
                    raise
                planned, executable = self._after_out_of_memory(
                    (planned, executable), args, kwargs, error
                )
        self._entries.setdefault(key, []).insert(0, (planned, executable))
        self.last_executable = executable
        return planned.traced.rebuild_output(results)

    def _compile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PlannedStep, Executable]:
        """The plan, compiled; another one, if that does not fit by XLA's count."""
        misfit: MemoryBudgetError | None = None
        try:
            planned = self.planned(args, kwargs)
        except MemoryBudgetError as error:
            correction = hopeful(error)
            if correction is None or _jax.is_tracing() or not self._may_refit():
                raise
            misfit = error
            planned = self._plan_hopefully(args, kwargs, correction, error)
        if _jax.is_tracing():
            return self._compile_plan(planned)
        refit = self._refit(planned, args, kwargs)
        try:
            entry, found = refit.fitted(self._compile_plan(planned))
        except MemoryBudgetError as error:
            if misfit is None:
                raise
            raise misfit.having_tried({"XLA's count": error.problem}) from error
        return self._keep_found(planned, entry, found)

    def _plan_hopefully(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        correction: MemoryCorrection,
        misfit: MemoryBudgetError,
    ) -> PlannedStep:
        """A plan that is predicted not to fit by a little; XLA will tell."""
        apart = split_objects(args, kwargs, self._options.static_argnums)
        args, kwargs = _without_values((apart.args, apart.kwargs))
        try:
            return self._make_plan(args, kwargs, correction)
        except MemoryBudgetError:
            raise misfit from None

    def _compile_plan(self, planned: PlannedStep) -> tuple[PlannedStep, Executable]:
        remote = session.current().remote
        if remote is None:
            executable = self._compile_here(planned)
        else:
            self._forget_ended_sessions()
            executable = self._take_compiled(planned) or self._compile_there(planned, remote)
        executable.describe = describing(planned)
        return planned, executable

    # -- memory, by XLA's count

    def _may_refit(self) -> bool:
        return can_refit(self._method) and not _rerank_of(self._method)

    def _limit(self, planned: PlannedStep) -> float | None:
        """What the plan's devices have for it; None if nothing could be done about it."""
        method, now = self._method, session.current()
        if not self._may_refit() or isinstance(method, ParallelPlan):
            return None
        remote = now.remote
        platform = now.all_devices()[0].platform if remote is None else remote.cluster.platform
        return limit_of(planned.plan, options_of(method).memory_budget_bytes, platform)

    def _refit(
        self, planned: PlannedStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Refit[tuple[PlannedStep, Executable]]:
        apart = split_objects(args, kwargs, self._options.static_argnums)
        args, kwargs = _without_values((apart.args, apart.kwargs))
        limit = self._limit(planned)

        def bytes_of(entry: tuple[PlannedStep, Executable]) -> tuple[float, ...]:
            if not _is_together():
                return _compiled_bytes(*entry, limit)
            return count_together(planned.plan.name, lambda: _compiled_bytes(*entry, limit))

        return Refit(
            plan_again=lambda correction: self._compile_plan(
                self._make_plan(args, kwargs, correction)
            ),
            bytes_of=bytes_of,
            plan_of=lambda entry: entry[0].plan,
            limit_bytes=limit,
        )

    def _keep_found(
        self, first: PlannedStep, entry: tuple[PlannedStep, Executable], found: MemoryFound
    ) -> tuple[PlannedStep, Executable]:
        """The plan with XLA's figures takes the place of the one that was made first."""
        planned, executable = entry
        planned = replace(planned, plan=replace(planned.plan, memory_found=found))
        executable.plan = planned.plan
        if found.replanned:
            keep_plan(planned, first.cache_key)
        for known in self._plans.values():
            known[:] = [planned if p is first or p is entry[0] else p for p in known]
        self._lowered = [
            (planned if p is entry[0] else p, lowered)
            for p, lowered in self._lowered
            if p is not first or first is entry[0]
        ]
        if self.last_planned is first or self.last_planned is None:
            self.last_planned = planned
        return planned, executable

    def _with_room(
        self, planned: PlannedStep, executable: Executable, leaves: Sequence[Any]
    ) -> Sequence[Any]:
        """The arguments, where processes run a step together: placed, when all of them have room
        for the step. Inside it, one that has none could no longer tell the others. Workers are
        asked for room; their errors come when the step is under way."""
        if self._limit(planned) is None:
            return leaves
        if isinstance(executable, RemoteExecutable):
            executable.check_room(leaves)
        elif _is_together() and isinstance(executable, LocalExecutable):
            make_room = functools.partial(executable.place_with_room, leaves)
            return make_room_together(planned.plan.name, make_room)
        return leaves

    def _after_out_of_memory(
        self,
        entry: tuple[PlannedStep, Executable],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> tuple[PlannedStep, Executable]:
        """Another plan, after the first run of this one took more memory than there was."""
        planned, _ = entry
        found, refit = planned.plan.memory_found, self._refit(planned, args, kwargs)
        if found is None or refit.limit_bytes is None:
            raise error
        excess = out_of_memory_excess(found, refit.limit_bytes)
        try:
            again, found = refit.fitted(*refit.again(entry, found, excess))
        except MemoryBudgetError as misfit:
            raise misfit from error
        return self._keep_found(planned, again, found)

    def _compile_there(self, planned: PlannedStep, remote: RemoteSession) -> RemoteExecutable:
        """On workers. A step is lowered once, however often its cluster is restarted."""
        lowered = next((lowered for one, lowered in self._lowered if one is planned), None)
        if lowered is None:
            lowered = lower_for_cluster(planned, remote)
            self._lowered.append((planned, lowered))
        return make_remote_executable(planned, remote, lowered)

    def _compile_here(self, planned: PlannedStep) -> Executable:
        """On devices of this process; a plan that was timed is compiled already."""
        if is_multi_controller() and planned.plan.is_pipeline:
            return make_remote_executable(planned, session.process_session())
        executable = self._take_compiled(planned) or make_executable(planned, local_devices())
        if is_multi_controller():
            assert isinstance(executable, LocalExecutable)  # on_devices_only allows no other
            limit = self._limit(planned)
            compile_together(planned.plan.name, lambda: _compiled_bytes(planned, executable, limit))
        return executable


def _rerank_of(method: ParallelMethod | ParallelPlan | None) -> int:
    return getattr(getattr(method, "options", None), "rerank", 0)


def _is_used_up(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, DistributedArray)) and leaf.is_deleted()


def _is_together() -> bool:
    """Whether this process runs steps with others that a scheduler started."""
    return session.current().remote is None and is_multi_controller()


def _compiled_bytes(
    planned: PlannedStep, executable: Executable, limit: float | None
) -> tuple[float, ...]:
    """XLA's peak bytes per device, by mesh. Where XLA itself ran out of memory, more than the
    limit."""
    try:
        return executable.mesh_memory_bytes()
    except CompileError as error:
        if limit is not None and error.__cause__ and is_out_of_memory(error.__cause__):
            num_meshes = 1 + max(stage.mesh for stage in planned.plan.stages)
            return (RAN_OUT * limit,) * num_meshes
        use_users_names(error, planned.traced.call.paths)
        raise


def _check_rerank(num: int, is_remote: bool) -> None:
    """Plans can only be timed on devices of this process."""
    if not is_remote and not is_multi_controller():
        return
    where = "the devices of workers" if is_remote else "devices of several processes"
    raise ArgumentError(
        f"ShardingOptions(rerank={num}): plans can only be timed on the devices of one process, "
        f"and this step runs on {where}. Set rerank=0, or find the plan in one process with such "
        "devices, save it with plan.save(…), and pass it as method=."
    )


def _without_values(tree: Any) -> Any:
    """With the types of remote arrays in place of the arrays."""
    return tree_map(lambda x: x.aval if isinstance(x, DistributedArray) else x, tree)


def _types(leaves: Sequence[Any]) -> list[tuple] | None:
    """Shapes and types of leaves, as tracing sees them; None if JAX cannot trace one."""
    try:
        shapes = jax.eval_shape(lambda *xs: list(xs), *leaves)
    except TypeError:  # tracing reports it
        return None
    return _types_of(shapes)


def _types_of(avals: Sequence[Any]) -> list[tuple]:
    return [(aval.shape, aval.dtype, aval.weak_type) for aval in avals]


def _run(planned: PlannedStep, executable: Executable, leaves: Sequence[Any]) -> list[Any]:
    try:
        return executable(leaves)
    except RuntimeError as error:
        if is_out_of_memory(error):  # whether or not it has used up the old state
            add_remedy(error)
            raise
        for path, leaf in zip(planned.traced.call.paths, leaves, strict=True):
            if _is_used_up(leaf):
                raise ArgumentError(
                    f"{path}: this array was deleted. A step that returns updated state reuses the "
                    "buffers of the old state (donate_argnums='auto'). Use the state that the step "
                    "returned, or keep the old one with parallelize(…, donate_argnums=())."
                ) from error
        if isinstance(error, CompileError):
            use_users_names(error, planned.traced.call.paths)
        raise
    except (TypeError, ValueError) as error:
        use_users_names(error, planned.traced.call.paths)
        raise


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    method: ParallelMethod | ParallelPlan | type | str | None = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: Sequence[int] | str = "auto",
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
) -> Any:
    """Make a train step run on all devices. Use as `@parallelize`, `@parallelize(method=…)` or
    `parallelize(fn, method=…)`.

    method:         how to parallelize. The default, `AutoParallel()`, searches meshes and
                    pipelines. A `ParallelPlan`, loaded or made elsewhere, is a method too, and
                    so are "auto", "shard", "data", "zero2", "zero3" and "pipeline".
    static_argnums: positions of hashable arguments that are part of the program.
    donate_argnums: "auto" donates training state that the step returns updated. Positions donate
                    these arguments, which are state if the step returns them leaf for leaf.
    batch_argnums:  positions of arguments whose arrays have a leading batch dimension. By default
                    argument 1, or the first that is not state, and all others whose rows go along
                    with its rows; `plan.explain()` names them.

    Returns a `ParallelFunction`, which is called like `fn` and traces and plans at its first call.
    Raises `ArgumentError` for invalid arguments.
    """
    if fn is None:
        return functools.partial(
            parallelize,
            method=method,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            batch_argnums=batch_argnums,
        )
    if not callable(fn):
        raise ArgumentError(
            f"parallelize({fn!r}): needs a function; pass options by keyword, as in "
            "parallelize(fn, method=…)."
        )
    method = as_method("parallelize", method)
    options = StepOptions.checked(static_argnums, donate_argnums, batch_argnums)
    return ParallelFunction(fn, method, options)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterSpec,
    method: ParallelMethod | ParallelPlan | type | str | None = None,
    static_argnums: int | Sequence[int] = (),
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    **kwargs: Any,
) -> ParallelPlan:
    """Plan for a cluster that need not exist. Returns the plan; runs and allocates nothing.

    fn:             the step; `args` and `kwargs` are its arguments, arrays or
                    `jax.ShapeDtypeStruct`s.
    cluster:        a `ClusterSpec`.
    method:         as for `parallelize`.
    static_argnums: positions of arguments that are part of the program.
    batch_argnums:  as for `parallelize`.

    Raises `TraceError` if the function cannot be traced, `MeshError` if no mesh divides its arrays,
    `SpecError` if a pin or spec is infeasible, and `MemoryBudgetError` if no plan fits.
    """
    fn, options = step_and_options("plan", fn, static_argnums, batch_argnums)
    if not isinstance(cluster, ClusterSpec):
        raise ArgumentError(f"plan(cluster={cluster!r}): needs an autopar.ClusterSpec.")
    method = as_method("plan", method)
    if isinstance(method, (CreateStateParallel, FollowParallel)):
        raise ArgumentError(
            f"plan(method={type(method).__name__}(…)): this method follows a train step that is "
            "planned for this session's devices. Use parallelize(fn, method=…).plan(…)."
        )
    return plan_step(fn, args, kwargs, cluster=cluster, method=method, options=options).plan


def constrain(x: Any, name: str) -> Any:
    """Name a value inside the step: `ShardingOptions(pins={name: spec})` pins its sharding, and
    `plan.explain()` shows it. Arrays of a pytree are named `name` plus their path. Outside of
    functions that autopar shards it does nothing. The name belongs to the value, not to its
    gradient; under `jax.vmap`, a spec refers to the dimensions visible here.

    Returns `x`. Raises `ArgumentError` if `name` is not a non-empty string.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"constrain(…, name={name!r}): needs a non-empty string.")

    def named(path: Any, leaf: Any) -> Any:
        return _jax.named(leaf, name + keystr(path)) if is_array_leaf(leaf) else leaf

    return tree_map_with_path(named, x)


def get_last_dp_result() -> SearchReport | None:
    """The report of this process's last stage search: how many candidates and bounds, the best
    pipelines by the cost tables, and which of them were solved; None if there was no search. The
    report of a plan is `plan.search`."""
    return last_search()


def expected_trips(trips: int) -> AbstractContextManager[object]:
    """Say how many trips a `jax.lax.while_loop` usually takes, for the predicted time:

        with autopar.expected_trips(20):
            x = jax.lax.while_loop(goes_on, improve, x)

    It holds for while loops that are traced inside, but not for those in the bodies of these.
    Without it such a loop is priced as the trips that a counter in its condition allows, or as one.
    What the step computes does not depend on it. Raises `ArgumentError` if `trips` is no whole
    number ≥ 1."""
    if isinstance(trips, bool) or not isinstance(trips, int) or trips < 1:
        raise ArgumentError(
            f"expected_trips({trips!r}): needs a whole number of trips, at least 1."
        )
    return jax.named_scope(SCOPE.format(trips))


def mark_layer_boundary() -> None:
    """Mark the end of a layer, for `ManualLayers`. Call it in the model's forward code, between two
    layers, outside of loop bodies. It lowers to no operation, and other methods ignore it."""
    _jax.mark_boundary()


@dataclass(frozen=True)
class ShardingSolution:
    """The result of `solve_sharding`. Costs are in the units of the mesh's α and β.

    plan: the sharding as a plan; the properties read from it.
    """

    plan: ParallelPlan

    @property
    def objective(self) -> float:
        """The cost of the chosen sharding."""
        return self.plan.solver.objective

    @property
    def lower_bound(self) -> float:
        """A bound that no sharding can undercut."""
        return self.plan.solver.lower_bound

    @property
    def gap(self) -> float:
        """(objective − lower bound) / objective; 0 is proven optimal."""
        return self.plan.solver.gap

    @property
    def input_specs(self) -> Any:
        """`PartitionSpec`s in the pytree of the arguments."""
        return self.plan.input_specs

    @property
    def output_specs(self) -> Any:
        """`PartitionSpec`s in the pytree of the result."""
        return self.plan.output_specs

    @property
    def sizes(self) -> dict[str, int]:
        """Of the problem: nodes, variables, constraints."""
        return self.plan.solver.sizes

    @property
    def seconds(self) -> dict[str, float]:
        """Of each pass."""
        return self.plan.solver.seconds


def solve_sharding(
    fn: Callable[..., Any],
    *args: Any,
    mesh: LogicalMesh,
    options: ShardingOptions | None = None,
    static_argnums: int | Sequence[int] = (),
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    **kwargs: Any,
) -> ShardingSolution:
    """Shard a function's operators on a logical mesh, without devices. Returns a
    `ShardingSolution`.

    fn:             the function; `args` and `kwargs` are its arguments, arrays or
                    `jax.ShapeDtypeStruct`s.
    mesh:           a `LogicalMesh`, with the costs of its axes.
    options:        constraints for the solver.
    static_argnums: positions of arguments that are part of the program.
    batch_argnums:  as for `parallelize`.

    Raises `SpecError` if a pin or spec is infeasible, `MemoryBudgetError` if no sharding fits, and
    `SolverError` if the solver fails.
    """
    if not isinstance(mesh, LogicalMesh):
        raise ArgumentError(
            f"solve_sharding(mesh={shortened(mesh)}): needs an autopar.LogicalMesh."
        )
    if options is not None and not isinstance(options, ShardingOptions):
        raise ArgumentError(
            f"solve_sharding(options={options!r}): needs an autopar.ShardingOptions."
        )
    fn, step_options = step_and_options("solve_sharding", fn, static_argnums, batch_argnums)
    cluster = ClusterSpec(1, mesh.num_devices, mesh.device or "cpu")
    method = ShardParallel(mesh_shape=mesh, options=options or ShardingOptions())
    planned = plan_step(fn, args, kwargs, cluster=cluster, method=method, options=step_options)
    return ShardingSolution(planned.plan)


def compile(
    fn: Callable[..., Any],
    *args: Any,
    plan: ParallelPlan,
    devices: Sequence[Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    **kwargs: Any,
) -> dict[str, jax.stages.Compiled]:
    """Compile a planned function for devices, including those of a topology: compiling for GPUs
    needs no GPU. Returns {program name: compiled program}.

    fn:             the planned function; `args` and `kwargs` are its arguments, arrays or
                    `jax.ShapeDtypeStruct`s.
    plan:           from `autopar.plan`, `step.plan` or `ParallelPlan.load`.
    devices:        at least as many as the plan has; by default those of this process.
    static_argnums: positions of arguments that are part of the program.
    batch_argnums:  as for `parallelize`.

    Raises `PlanError` if the plan was made for another program, `MeshError` for too few devices,
    and `CompileError` if XLA rejects a program.
    """
    fn, options = step_and_options("compile", fn, static_argnums, batch_argnums)
    if not isinstance(plan, ParallelPlan):
        raise ArgumentError(
            f"compile(plan={plan!r}): needs a ParallelPlan; make one with autopar.plan(…) or read "
            "one with autopar.ParallelPlan.load(path)."
        )
    devices = local_devices() if devices is None else checked_devices("compile", devices)
    if len(devices) < plan.num_devices:
        raise MeshError(
            f"compile(devices=…): the plan's mesh {plan.mesh_shape} needs {plan.num_devices} "
            f"devices, got {len(devices)}. Pass more, or plan for a smaller mesh."
        )
    planned = plan_step(
        fn, args, kwargs, cluster=ClusterSpec(1, len(devices), "cpu"), method=plan, options=options
    )
    executable = make_executable(planned, devices)
    compiled = executable.compiled
    return compiled if isinstance(compiled, dict) else {"step": compiled}
