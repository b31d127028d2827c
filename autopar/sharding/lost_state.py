"""A step that computes gradients and returns no updated state: from a plan to a warning.

Nothing of such a step fails. It runs, the loss is the same in every step, and the state is copied
where it could be donated.
"""

from __future__ import annotations

from autopar.ir.plan import ParallelPlan
from autopar.tracer.regions import BACKWARD


def lost_state_warning(plan: ParallelPlan) -> str | None:
    """What the user should be told; None if the step returns updated state, or has no gradients."""
    if any(tensor.role == "state" for tensor in plan.inputs):
        return None
    costs = [*plan.modules, *(m for s in plan.stages if s.plan is not None for m in s.plan.modules)]
    if not any(cost.region == BACKWARD for cost in costs):
        return None
    others = [tensor for tensor in plan.inputs if tensor.role != "batch" and tensor.shape]
    if {tensor.shape for tensor in others} & {tensor.shape for tensor in plan.outputs}:
        return None  # gradients, for the caller to use
    what = others[0].path if others else "its arguments"
    returned = ", ".join(tensor.path for tensor in plan.outputs[:2])
    more = f" and {len(plan.outputs) - 2} more" if len(plan.outputs) > 2 else ""
    return (
        f"{plan.name} computes gradients but returns no updated state: no result ({returned}{more})"
        f" has the shape of an argument such as {what}. What the step computes is lost "
        "when it ends. Return the new state, as in `return new_state, loss`; if the step keeps "
        "nothing on purpose, ignore this."
    )
