"""One step in many processes that the user starts: from the same call in each to one common plan.

The processes are those of `jax.distributed.initialize`.

Process 0 plans; the others receive its plan as text. Every process, process 0 too, binds that text
to its own trace. In each phase all report what they have (versions, devices, shapes, program,
plan), and process 0 compares. An error in one process is raised in all of them.

    arguments   all have the same step, method, versions, devices and shapes
    cluster     all see the same hosts: processes of one machine are one
    program     for `CreateStateParallel`: all have the same program; then its train step is planned
    plan        process 0 plans, or finds that no plan fits
    binding     all have the same program, and the plan fits it
    compiling   XLA compiled the program in every process
    memory      the most that it takes by XLA's count, in any process
    room        before the first run: whether every process has the memory that a run needs
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autopar.compiler import plan_step
from autopar.errors import MemoryBudgetError, MeshError
from autopar.ir.identity import plan_digest
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.program import Constant, Program
from autopar.ir.traced_step import FlatCall, TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    CreateStateParallel,
    FollowParallel,
    ParallelMethod,
)
from autopar.runtime.ranks.consensus import Consensus, arrival_limit_s, planning_limit_s
from autopar.runtime.ranks.failures import is_out_of_memory
from autopar.session import devices_per_process
from autopar.stages.training_arrays import state_of_training
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.flat_call import flatten_call
from autopar.tracer.trace import StepOptions, trace

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OTHER_PLANS = (
    "Every process passed a plan to parallelize, but not the same one. Processes that plan by "
    "themselves may find different plans, if their code, versions, devices or time limits differ. "
    "Let process 0 plan for all: parallelize(method=None), or a method such as "
    "autopar.ShardParallel(). Or save the plan in one process with plan.save(…), and read it in "
    "all with autopar.ParallelPlan.load(…)."
)


def is_multi_controller() -> bool:
    """Whether this process is one of several that run the same program."""
    return jax.process_count() > 1


def plan_together(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    devices: Sequence[Any],
    cluster_of: Callable[[], ClusterSpec],
    method: ParallelMethod | ParallelPlan | None,
    given: ParallelMethod | ParallelPlan | None,
    options: StepOptions,
) -> PlannedStep:
    """`plan_step`, once for all processes; each of them must call it. `given`: the method as the
    user gave it, for errors."""
    name = getattr(fn, "__name__", type(fn).__name__)
    consensus = Consensus(name)

    def arguments() -> dict[str, Any]:
        devices_per_process(devices)  # raises if they cannot be a cluster
        call = flatten_call(fn, args, kwargs, options.static_argnums)
        asked = {"step": name, "options": repr(options), **_method_report(given)}
        return {"devices": [d.id for d in devices], **asked, **_types_report(call)}

    remedies = {"plan": _OTHER_PLANS}
    consensus.agree("arguments", arguments, arrival_limit_s(), remedies=remedies)
    cluster = consensus.agree("cluster", cluster_of, arrival_limit_s(), report=_cluster_report)
    planning_s = planning_limit_s()
    if isinstance(method, CreateStateParallel):
        traced = consensus.agree(
            "program", lambda: trace(fn, args, kwargs, options), planning_s, report=_identity
        )
        state_of_training(traced, method)

    one_mesh, found = _has_arrays_across_processes(args, kwargs), _Found(devices)

    def plan() -> str:
        return found.text_of(
            lambda: plan_step(
                fn, args, kwargs, cluster=cluster, method=method, options=options, one_mesh=one_mesh
            )
        )

    text = _plan_text(consensus.from_first("plan", plan, planning_s))
    if isinstance(method, (CreateStateParallel, FollowParallel)) and (
        options.donate_argnums == "auto"
    ):
        options = replace(options, donate_argnums=())  # these methods donate nothing

    def bound() -> PlannedStep:
        received = ParallelPlan.from_json(text, "the plan of process 0")
        bound = plan_step(fn, args, kwargs, cluster=cluster, method=received, options=options)
        return replace(bound, cache_key=found.cache_key)

    return consensus.agree("binding", bound, planning_s, report=_identity)


class _Found:
    """What process 0 finds for all. `cache_key`: of its plan cache."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._num_devices, self.cache_key = len(devices), ""

    def text_of(self, plan: Callable[[], PlannedStep]) -> str:
        """The plan, or why none fits, for the other processes."""
        try:
            planned = plan()
        except MemoryBudgetError as error:
            return json.dumps({"misfit": _misfit_fields(error)})
        _check_plan(planned.plan, self._num_devices)
        self.cache_key = planned.cache_key
        return json.dumps({"plan": planned.plan.to_json()})


def _plan_text(told: str) -> str:
    """The plan of process 0; if it found that none fits, the same error in every process."""
    found = json.loads(told)
    if "misfit" in found:
        raise MemoryBudgetError(**found["misfit"])
    return found["plan"]


def compile_together(name: str, compile: Callable[[], object]) -> None:
    """Compile in every process, so that none runs a step that another one cannot run."""

    def compiled() -> dict[str, Any]:
        compile()
        return {}

    Consensus(name).agree("compiling", compiled, planning_limit_s())


def count_together(name: str, count: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    """XLA's bytes by mesh, the most that any process counts, so that all judge a plan alike."""
    return Consensus(name).largest("memory", count, planning_limit_s())


def make_room_together(name: str, make_room: Callable[[], list[Any]]) -> list[Any]:
    """What `make_room` returns, once it has returned in every process. If memory is short in one,
    all raise that error of JAX: none has begun the step, in which the others would wait for ever.
    """
    made: list[Any] = []

    def who_lacks_it() -> tuple[float]:
        try:
            made.extend(make_room())
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return (float(jax.process_index()),)
        return (-1.0,)

    (who,) = Consensus(name).largest("room", who_lacks_it, planning_limit_s())
    if who >= 0:
        raise jax.errors.JaxRuntimeError(
            f"RESOURCE_EXHAUSTED: {name}: process {who:.0f} has no room for what a run makes "
            "beside its arguments. No process has begun the step."
        )
    return made


# -- checks and comparisons


def _misfit_fields(error: MemoryBudgetError) -> dict[str, Any]:
    """What the same error is made of in another process."""
    return {
        "message": error.problem,
        "peak_bytes": error.peak_bytes,
        "budget_bytes": error.budget_bytes,
        "tried": error.tried,
        "remedies": error.remedies,
        "num_micro_batches": error.num_micro_batches,
        "argument_bytes": error.argument_bytes,
    }


def _has_arrays_across_processes(*args: Any) -> bool:
    """Whether an argument spans processes: a pipeline does not take it."""
    return any(
        isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
        for leaf in jax.tree.leaves(args)
    )


def _check_plan(plan: ParallelPlan, num_devices: int) -> None:
    if plan.num_devices != num_devices:
        raise MeshError(
            f"the plan's mesh {plan.mesh_shape} has {plan.num_devices} devices, but the processes "
            f"have {num_devices} in total, and all must take part. Use a mesh of all of them, or "
            "autopar.init(devices=…) with fewer devices of every process."
        )


def _method_report(method: ParallelMethod | ParallelPlan | None) -> dict[str, str]:
    """What all must have in common of the method; of a plan, what decides how it runs."""
    if isinstance(method, ParallelPlan):
        plan = f"{method.mesh_shape} {plan_digest(method)[:16]}"
        return {"method": "ParallelPlan", "plan": plan, "program": method.fingerprint.program[:16]}
    if isinstance(method, (CreateStateParallel, FollowParallel)):
        return {"method": type(method).__name__}
    return {"method": _ADDRESS.sub("", repr(method))}


def _cluster_report(cluster: ClusterSpec) -> dict[str, str]:
    return {"cluster": repr(replace(cluster, profile=None)), "profile": str(cluster.priced_by)}


def _types_report(call: FlatCall) -> dict[str, str]:
    shapes = jax.eval_shape(lambda *leaves: list(leaves), *call.leaves)
    return {"JAX": jax.__version__, **dict(zip(call.paths, map(_type_text, shapes), strict=True))}


def _type_text(shape: jax.ShapeDtypeStruct) -> str:
    weak = ", weak" if shape.weak_type else ""
    return f"{shape.dtype}{list(shape.shape)}{weak}"


def _identity(result: TracedStep | PlannedStep) -> dict[str, str]:
    """What all processes must have in common: the program, its constants and the plan."""
    if isinstance(result, PlannedStep):
        return {"plan": plan_digest(result.plan)[:16], **_identity(result.traced)}
    program = result.program
    return {"program": program_fingerprint(program)[:16], "constants": _constants_digest(program)}


def _constants_digest(program: Program) -> str:
    """A digest of the constants in the program. The plan does not depend on them, but the results
    do."""
    digest = hashlib.sha256()

    def visit(body: Program) -> None:
        for _, value in body.captured:
            digest.update(_bytes_of(value))
        for equation in body.equations:
            for operand in equation.operands:
                if isinstance(operand, Constant):
                    digest.update(_bytes_of(operand.value))
            for inner in equation.bodies:
                visit(inner)

    visit(program)
    return digest.hexdigest()[:16]


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()
