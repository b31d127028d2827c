"""The traced step and solver problem behind a plan: from a `ParallelPlan` to its `Origin`."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.plan import ParallelPlan
from autopar.sharding.origin import Origin


def origin_of(plan: ParallelPlan, call: str) -> Origin:
    """`call`: the user's, for the error of a plan that has no origin."""
    if isinstance(plan.origin, Origin):
        return plan.origin
    if not plan.is_timed:
        raise PlanError(
            f"plan.{call}: needs the link costs of the mesh {plan.mesh_shape}, which plan files do "
            "not store. Solve again with autopar.solve_sharding(…, mesh=…)."
        )
    raise without_program(plan, call)


def without_program(plan: ParallelPlan, call: str) -> PlanError:
    return PlanError(
        f"plan.{call}: needs the traced program of {plan.name}, which plan files do not store. "
        "Bind the plan to its function first: "
        "plan = autopar.parallelize(fn, method=plan).plan(*args)."
    )
