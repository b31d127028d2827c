"""The whole compiler, as a list of passes.

    trace      function, arguments           → TracedStep      (tracer.trace_step, tracer.flatten)
    remat      TracedStep, option            → TracedStep      (rewrite.layers, rewrite.remat)
    accumulate TracedStep, one micro-batch's → TracedStep      (rewrite.accumulate)
    graph      TracedStep                    → Graph           (tracer.build, tracer.rules)
    meshes     cluster, method               → LogicalMesh …   (constraints, steering)
    shard      Graph, LogicalMesh            → GraphSharding   (sharding.solve)
    assign     GraphSharding                 → ProgramSharding (lower.assign)
    plan       all of the above              → ParallelPlan    (assemble)
    annotate   ParallelPlan, devices         → function for jax.jit (lower.annotate)

Each pass takes and gives frozen data; `PassTimer` keeps what each took.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.tree_util import tree_flatten

from autopar.errors import ArgumentError, TraceError, shortened
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import MADE, ParallelPlan
from autopar.ir.traced_step import FlatCall, TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    AutoParallel,
    CreateStateParallel,
    FollowParallel,
    ParallelMethod,
    PipeshardParallel,
    ShardParallel,
)
from autopar.progress import Progress, debugs, logged, tell
from autopar.rewrite.accumulate import accumulate, micro_batch_leaves
from autopar.rewrite.layers import Layer, find_layers, layers_by_name, worth_recomputing
from autopar.rewrite.remat import with_remat
from autopar.rewrite.single_microbatch import looped_once
from autopar.rewrite.unroll_scans import unrolled
from autopar.sharding.assemble import check_same_inputs
from autopar.sharding.constraints import candidate_meshes, options_of
from autopar.sharding.plan_mesh import Considered, PassTimer, plan_traced
from autopar.sharding.remat_choice import choose_remat
from autopar.stages.auto import plan_automatically
from autopar.stages.following import (
    arguments_of_training,
    placed_like_training,
    state_of_training,
)
from autopar.stages.looped import Loop
from autopar.stages.pipeline_following import bind_made, follow_pipeline, make_on_stages
from autopar.stages.plan_pipeline import bind_pipeline, plan_pipeline
from autopar.tracer.flat_call import argument_names, flatten_call
from autopar.tracer.trace_step import trace_step


@dataclass(frozen=True)
class StepOptions:
    """How the user's function is called; the arguments of `parallelize`."""

    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] | str = "auto"
    batch_argnums: tuple[int, ...] = (1,)


def plan_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cluster: ClusterSpec,
    method: ParallelMethod | ParallelPlan | LogicalMesh | None = None,
    options: StepOptions | None = None,
    mesh: LogicalMesh | None = None,
    one_mesh: bool = False,
    considered: Considered | None = None,
) -> PlannedStep:
    """Run every pass up to the plan. `mesh` replaces the meshes the cluster would give; `one_mesh`
    keeps the default from searching pipelines; `considered` takes other plans that were made."""
    if considered is None and options_of(method).rerank:
        raise ArgumentError(
            f"ShardingOptions(rerank={options_of(method).rerank}): plans are run on devices to be "
            "ranked, and here a plan is made without any. Use parallelize(fn, method=…) and its "
            ".plan(…) where the devices are; or autopar.plan_verified(…), which compiles them for "
            "GPUs that are not there; or leave rerank at 0."
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    with Progress(f"planning {name}"), logged(f"planning {name}"):
        timer = PassTimer(considered=considered)
        planned = _planned_step(fn, args, kwargs, cluster, method, options, mesh, one_mesh, timer)
    if debugs("plan"):
        tell("plan", planned.plan.explain())
    if debugs("strategies"):
        tell("strategies", planned.plan.strategies())
    return planned


def _planned_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: ClusterSpec,
    method: ParallelMethod | ParallelPlan | LogicalMesh | None,
    options: StepOptions | None,
    mesh: LogicalMesh | None,
    one_mesh: bool,
    timer: PassTimer,
) -> PlannedStep:
    options = options or StepOptions()
    with timer("trace"):
        traced = trace(fn, args, kwargs, options)
    loop = _looper(traced, fn, options)
    if isinstance(method, PipeshardParallel):
        return plan_pipeline(loop, method, cluster, timer)
    if isinstance(method, ParallelPlan) and method.is_pipeline:
        check_same_inputs(method, traced)
        if method.layering == MADE:
            return bind_made(method, traced, cluster)
        return bind_pipeline(method, loop, timer, cluster)
    if isinstance(method, (CreateStateParallel, FollowParallel)):
        if options.donate_argnums == "auto":  # the train step still needs what it is given
            traced = replace(traced, donated=())
        loop = _looper(traced, fn, options)
        return plan_beside_training(traced, loop, cluster, method, timer)
    if method is None and mesh is None:
        method = AutoParallel()
    if isinstance(method, AutoParallel):

        def intra(own: ShardParallel) -> PlannedStep:
            return plan_on_one_mesh(traced, fn, cluster, own, options, None, timer)

        return plan_automatically(traced, intra, loop, method, cluster, timer, one_mesh)
    return plan_on_one_mesh(traced, fn, cluster, method, options, mesh, timer)


def _looper(traced: TracedStep, fn: Callable[..., Any], options: StepOptions) -> Loop:
    """The step as a loop over micro-batches, made once per number of them."""
    known: dict[int, TracedStep] = {}

    def loop(num_micro_batches: int) -> TracedStep:
        if num_micro_batches not in known:
            whole = unrolled(traced)
            if num_micro_batches == 1:
                known[1] = looped_once(whole)
            else:
                micro = trace_micro_batch(traced, fn, options, num_micro_batches)
                known[num_micro_batches] = accumulate(whole, unrolled(micro), num_micro_batches)
        return known[num_micro_batches]

    return loop


def plan_on_one_mesh(
    traced: TracedStep,
    fn: Callable[..., Any],
    cluster: ClusterSpec,
    method: Any,
    options: StepOptions,
    mesh: LogicalMesh | None,
    timer: PassTimer,
) -> PlannedStep:
    """Every pass after the first trace, for methods that put the whole step on one mesh."""
    num_micro_batches = getattr(method, "num_micro_batches", 1)
    micro = None
    if num_micro_batches > 1:
        with timer("trace"):
            micro = trace_micro_batch(traced, fn, options, num_micro_batches)
    if isinstance(method, ShardParallel | None) and options_of(method).remat == "auto":

        def attempt(
            layers: Sequence[Layer], shape: tuple[int, ...] | None, in_full: bool
        ) -> PlannedStep:
            with timer("remat"):
                step = rewritten(traced, micro, num_micro_batches, layers)
            only = mesh
            if mesh is None and shape is not None:  # the candidate, with what its method forbids
                known = candidate_meshes(cluster, method or ShardParallel())
                only = next((m for m in known if m.shape == shape), None)
            return timer.consider(
                plan_traced(
                    step, cluster=cluster, method=method, mesh=only, timer=timer, in_full=in_full
                )
            )

        def candidates() -> tuple[Layer, ...]:
            with timer("remat"):
                return worth_recomputing(find_layers(traced.program, batch=traced.batch))

        return choose_remat(attempt, candidates, cluster.spec, cluster.num_devices)
    with timer("remat"):
        layers = layers_to_recompute(traced, method)
    with timer("trace"):
        traced = rewritten(traced, micro, num_micro_batches, layers)
    return timer.consider(
        plan_traced(traced, cluster=cluster, method=method, mesh=mesh, timer=timer)
    )


def plan_beside_training(
    traced: TracedStep,
    loop: Loop,
    cluster: ClusterSpec,
    method: CreateStateParallel | FollowParallel,
    timer: PassTimer,
) -> PlannedStep:
    """An initialiser or an evaluation, by the train step's plan."""
    if isinstance(method, CreateStateParallel):
        plan, tensors = state_of_training(traced, method)
        if plan.is_pipeline:
            return make_on_stages(traced, plan, tensors, cluster, timer)
    else:
        plan, matches = arguments_of_training(traced, method)
        if plan.is_pipeline:
            return follow_pipeline(traced, plan, matches, loop, cluster, timer)
    placed = placed_like_training(traced, method, cluster)
    return plan_traced(traced, cluster=cluster, method=placed, timer=timer)


# -- tracing


def trace(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions
) -> TracedStep:
    """`trace_step`, with errors that name arguments as the user does. What the user's own function
    raises goes through unchanged, at most with a note."""
    call = flatten_call(fn, args, kwargs, options.static_argnums)
    _check_batch(fn, args, kwargs, call, options)
    try:
        return trace_step(
            fn,
            args,
            kwargs,
            static_argnums=options.static_argnums,
            donate_argnums=options.donate_argnums,
            batch_argnums=options.batch_argnums,
        )
    except TypeError as error:
        for leaf, path in zip(call.leaves, call.paths, strict=True):
            try:
                jax.eval_shape(lambda x: x, leaf)
            except TypeError:
                raise TraceError(
                    f"{path}: a {type(leaf).__name__} of {leaf.dtype} is no array that JAX can "
                    "trace. Convert it with numpy.asarray to numbers or booleans first."
                ) from error
        # JAX names arguments by their place among all leaves.
        named = {int(n) for n in re.findall(r"\bleaves\[(\d+)\]", str(error))}
        for n in sorted(named & set(range(len(call.paths)))):
            error.add_note(f"autopar: leaves[{n}] is {call.paths[n]}")
        raise


def trace_micro_batch(
    traced: TracedStep, fn: Callable[..., Any], options: StepOptions, num_micro_batches: int
) -> TracedStep:
    """The step traced once more, with one micro-batch."""
    leaves = micro_batch_leaves(traced, num_micro_batches)
    args, kwargs = traced.call.rebuild(leaves)
    return trace(fn, args, kwargs, options)


def _check_batch(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: FlatCall,
    options: StepOptions,
) -> None:
    """A batch argument that is text or another object fails here and not somewhere in the model.
    Functions are let through (optimizers are made of them). Unless `batch_argnums` was given, so
    is anything if a third argument has arrays: then that may be the batch."""
    owners = set(call.argument)
    if len(owners) != 1 and options.batch_argnums == StepOptions.batch_argnums:
        return
    names = argument_names(fn)
    for position in options.batch_argnums:
        name = names[position] if position < len(names) else f"args[{position}]"
        if position in options.static_argnums or owners & {position, name}:
            continue
        given = args[position] if position < len(args) else kwargs.get(name)
        odd = [leaf for leaf in tree_flatten(given)[0] if not callable(leaf)]
        if odd:
            raise TraceError(
                f"{name}: the batch argument holds no array, but a {type(odd[0]).__name__}: "
                f"{shortened(odd[0])}. Pass arrays with a leading batch dimension; or say with "
                "batch_argnums which arguments have them, and with static_argnums which are part "
                "of the program."
            )


# -- recomputation and micro-batches


def layers_to_recompute(traced: TracedStep, method: Any) -> tuple[Layer, ...]:
    """The layers that a method says are computed again in the backward pass: those of a plan (if
    one is not there, the program is not the plan's, and `bind_plan` says so), or all."""
    names = method.remat if isinstance(method, ParallelPlan) else ()
    if not names and options_of(method).remat != "all":
        return ()
    layers = find_layers(traced.program, batch=traced.batch)
    return layers_by_name(layers, names) if names else worth_recomputing(layers)


def rewritten(
    traced: TracedStep,
    micro: TracedStep | None,
    num_micro_batches: int,
    layers: Sequence[Layer],
) -> TracedStep:
    """The step with these layers computed again in its backward pass, as a loop over micro-batches
    if it was traced with one."""
    if micro is None:
        return with_remat(traced, layers)
    return accumulate(traced, micro, num_micro_batches, layers)
