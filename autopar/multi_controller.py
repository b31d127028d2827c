"""One step in many processes that the user starts: from the same call in each to one common plan.

The processes are those of `jax.distributed.initialize`.

Process 0 plans; the others receive its plan as text, and every process, process 0 too, binds that
text to its own trace. In between all tell what they have (versions, devices, shapes, program,
plan), and process 0 compares. Whatever goes wrong in one process is raised in every one of them.

    arguments   all have the same step, method, versions, devices and shapes
    program     for `CreateStateParallel`, whose train step is then planned, in the same way
    plan        process 0 plans
    binding     all have the same program, and the plan fits it
    compiling   XLA took it, in every process
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autopar.compiler import plan_step
from autopar.errors import ArgumentError, MeshError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.program import Constant, Program
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    CreateStateParallel,
    FollowParallel,
    ParallelMethod,
    PipeshardParallel,
)
from autopar.runtime.consensus import Consensus, arrival_limit_s, planning_limit_s
from autopar.stages.training_arrays import state_of_training
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.flat_call import flatten_call
from autopar.tracer.trace import StepOptions, trace

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
    options: StepOptions,
) -> PlannedStep:
    """`plan_step`, once for all processes; every one of them must call it."""
    name = getattr(fn, "__name__", type(fn).__name__)
    talk = Consensus(name)

    def arguments() -> dict[str, Any]:
        _check_method(method)
        cluster_of()
        call = flatten_call(fn, args, kwargs, options.static_argnums)
        shapes = jax.eval_shape(lambda *leaves: list(leaves), *call.leaves)
        types = dict(zip(call.paths, map(_type_text, shapes), strict=True))
        return {
            "JAX": jax.__version__,
            "devices": [d.id for d in devices],
            "step": name,
            "method": _method_text(method),
            **types,
        }

    talk.agree("arguments", arguments, arrival_limit_s())
    cluster = cluster_of()
    planning_s = planning_limit_s()
    if isinstance(method, CreateStateParallel):
        traced = talk.agree(
            "program", lambda: trace(fn, args, kwargs, options), planning_s, tell=_identity
        )
        state_of_training(traced, method)

    def plan() -> str:
        planned = plan_step(
            fn, args, kwargs, cluster=cluster, method=method, options=options, one_mesh=True
        )
        _check_plan(planned.plan, len(devices))
        return planned.plan.to_json()

    text = talk.from_first("plan", plan, planning_s)
    if isinstance(method, (CreateStateParallel, FollowParallel)) and (
        options.donate_argnums == "auto"
    ):
        options = replace(options, donate_argnums=())  # as these methods have it

    def bound() -> PlannedStep:
        received = ParallelPlan.from_json(text, "the plan of process 0")
        return plan_step(fn, args, kwargs, cluster=cluster, method=received, options=options)

    return talk.agree("binding", bound, planning_s, tell=_identity)


def compile_together(name: str, compile: Callable[[], Any]) -> None:
    """Compile in every process, so that none runs a step that another one cannot."""

    def compiled() -> dict[str, Any]:
        compile()
        return {}

    Consensus(name).agree("compiling", compiled, planning_limit_s())


# -- what is compared


def _check_method(method: Any) -> None:
    is_pipeline = isinstance(method, PipeshardParallel) or (
        isinstance(method, ParallelPlan) and method.is_pipeline
    )
    if is_pipeline:
        raise ArgumentError(
            "parallelize(method=…): a pipeline on devices of several processes needs workers that "
            'autopar starts: use autopar.init(cluster="ray"). Where each process was started on '
            "its own, use a method with one mesh, such as autopar.ShardParallel()."
        )


def _check_plan(plan: ParallelPlan, num_devices: int) -> None:
    _check_method(plan)
    if plan.num_devices != num_devices:
        raise MeshError(
            f"the plan's mesh {plan.mesh_shape} has {plan.num_devices} devices, but the processes "
            f"have {num_devices} together, and each must take part. Use a mesh of all of them, or "
            "autopar.init(devices=…) with fewer of every process."
        )


def _method_text(method: Any) -> str:
    if isinstance(method, ParallelPlan):
        return f"ParallelPlan {_digest(method.to_json())}"
    if isinstance(method, (CreateStateParallel, FollowParallel)):
        return type(method).__name__
    return _ADDRESS.sub("", repr(method))


def _type_text(shape: Any) -> str:
    weak = ", weak" if shape.weak_type else ""
    return f"{shape.dtype}{list(shape.shape)}{weak}"


def _identity(result: Any) -> dict[str, Any]:
    """What must be the same of a traced or a planned step."""
    if isinstance(result, PlannedStep):
        return {"plan": _digest(result.plan.to_json()), **_identity(result.traced)}
    program = result.program
    return {"program": program_fingerprint(program)[:16], "constants": _constants_digest(program)}


def _constants_digest(program: Program) -> str:
    """Of the values that the program holds: a plan does not depend on them, but what processes
    compute does."""
    digest = hashlib.sha256()

    def visit(part: Program) -> None:
        for _, value in part.captured:
            digest.update(_bytes_of(value))
        for equation in part.equations:
            for operand in equation.operands:
                if isinstance(operand, Constant):
                    digest.update(_bytes_of(operand.value))
            for body in equation.bodies:
                visit(body)

    visit(program)
    return digest.hexdigest()[:16]


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
