"""A planned step as the content of a cache file and back: `PlannedStep` ↔ text.

Reading checks what reading a plan file checks: format, checksum, every field, and the plan as a
whole; binding then checks the program. A file holds more than a plan file: the solver's choice, by
which a plan from the cache can be explained and pinned like the one that was solved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import AutoparError, PlanError
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan, check_plan
from autopar.ir.sealed import SealedFormat
from autopar.lower.planned_step import PlannedStep
from autopar.methods import AnyMethod, AutoParallel, OneMeshMethod, ShardParallel, options_of
from autopar.sharding.constraints import candidate_meshes
from autopar.sharding.memory_budget import memory_budget
from autopar.sharding.origin import Origin, constraints_with_pins

FORMAT = SealedFormat(
    "autopar-cached-plan", 1, "entry", PlanError, "It is replaced.", is_quick=True
)


@dataclass(frozen=True)
class CachedPlan:
    """choice, refetch, price: as in the plan's `Origin`; of a pipeline, none."""

    key: str
    plan: ParallelPlan
    choice: tuple[tuple[int, int], ...] | None = None
    refetch: bool = False
    price: float = 0.0


def entry_text(key: str, planned: PlannedStep) -> str:
    origin = planned.plan.origin
    if not isinstance(origin, Origin) or origin.choice is None:
        return FORMAT.text(CachedPlan(key, planned.plan))
    choice = tuple((int(owner), int(index)) for owner, index in origin.choice.items())
    entry = CachedPlan(key, planned.plan, choice, bool(origin.refetch), float(origin.price))
    return FORMAT.text(entry)


def read_entry(key: str, text: str, where: str) -> CachedPlan:
    """`PlanError` if the text is not the entry of this key, whole and consistent."""
    entry = FORMAT.read(CachedPlan, text, where)
    if entry.key != key:
        raise PlanError(f"{where}: belongs to another key, {entry.key[:16]}….")
    check_plan(entry.plan, where)
    return entry


def as_solved(
    planned: PlannedStep,
    entry: CachedPlan,
    cluster: ClusterSpec,
    method: AnyMethod | None,
    mesh: LogicalMesh | None,
) -> PlannedStep:
    """A bound plan with the cluster and the origin that it had when it was solved. Files hold a
    summary of the cluster's profile, and nothing of the method's constraints."""
    plan = planned.plan
    has_own_mesh = (
        mesh is not None
        or isinstance(method, LogicalMesh)
        or (isinstance(method, ShardParallel) and isinstance(method.mesh_shape, LogicalMesh))
    )
    if not has_own_mesh and plan.num_devices > cluster.num_devices:
        raise PlanError(f"a plan for {plan.num_devices} devices, where {cluster.num_devices} are.")
    if plan.cluster is not None:
        plan = replace(plan, cluster=cluster)
    origin = _origin(planned, entry, cluster, _one_mesh_method(plan, method), mesh)
    return replace(planned, plan=plan if origin is None else replace(plan, origin=origin))


def _one_mesh_method(plan: ParallelPlan, method: AnyMethod | None) -> OneMeshMethod | None:
    """The method by which the planner solved a plan on one mesh; None for a pipeline."""
    if plan.is_pipeline:
        return None
    if method is None or isinstance(method, AutoParallel):
        return ShardParallel(num_micro_batches=plan.num_micro_batches, options=options_of(method))
    return method if isinstance(method, OneMeshMethod) else None


def _origin(
    planned: PlannedStep,
    entry: CachedPlan,
    cluster: ClusterSpec,
    method: OneMeshMethod | None,
    mesh: LogicalMesh | None,
) -> Origin | None:
    """None where binding knows as much."""
    if method is None or entry.choice is None:
        return None
    plan = planned.plan
    try:
        meshes = [mesh] if mesh is not None else candidate_meshes(cluster, method)
    except AutoparError:
        return None
    names = plan.mesh_shape, plan.axis_names
    used = next((m for m in meshes if (m.shape, m.axis_names) == names), None)
    if used is None:  # a mesh of fewer devices than there are
        return None
    return Origin(
        traced=planned.traced,
        mesh=used,
        cluster=cluster,
        method=method,
        constraints=constraints_with_pins(planned.traced, method, {}),
        choice=dict(entry.choice),
        refetch=entry.refetch,
        budget=memory_budget(used, method),
        pins={},
        price=entry.price,
    )
