"""Pin and solve again: from a `ParallelPlan` and specs by pattern to the best plan with them.

Meshes, stages, micro-batches and recomputed layers stay. So do earlier pins; a new pin overrides
what else the user asks of its arrays. Re-solves only the stages whose pins changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, PlanError, SpecError
from autopar.inspect.find_arrays import no_match_text, plan_arrays
from autopar.inspect.plan_origin import origin_of, without_program
from autopar.ir.layering import PER_STAGE_OUTPUTS
from autopar.ir.plan import ParallelPlan
from autopar.ir.spec import spec_to_text
from autopar.sharding.layout_constraints import matching_paths
from autopar.sharding.origin import pins_of
from autopar.sharding.plan_mesh import ShardingTask, plan_mesh
from autopar.sharding.planning_log import PlanningLog
from autopar.stages.bind_pipeline import repin_pipeline
from autopar.stages.pipeline_task import PipelineOrigin


def with_pins(plan: ParallelPlan, pins: Mapping[str, Any]) -> ParallelPlan:
    _check_pins(plan, pins)
    every = {**pins_of(plan), **pins}
    log = PlanningLog()
    if plan.is_pipeline:
        if plan.layering == PER_STAGE_OUTPUTS:
            raise PlanError(
                f"with_pins: {plan.name} places its results where the train step wants them. Pin "
                "arrays of the train step's plan, and make the initializer from that plan."
            )
        if not isinstance(plan.origin, PipelineOrigin):
            raise without_program(plan, "with_pins(…)")
        pinned = repin_pipeline(plan, plan.origin, every, log)
    else:
        if plan.num_devices == 1:
            raise PlanError(f"with_pins: {plan.name} has one device, so nothing can be pinned.")
        origin = origin_of(plan, "with_pins(…)")
        if origin.change is not None:
            raise PlanError(
                f"with_pins: this is the plan of one stage of {plan.name}. Call with_pins on the "
                "whole plan; it re-solves only the stages whose pins changed."
            )
        task = ShardingTask(
            origin.traced,
            origin.cluster,
            origin.method,
            origin.mesh,
            pins=every,
            built=origin.built if origin.step is origin.traced else None,
        )
        pinned = plan_mesh(task, log).plan
    before_s = plan.unpinned_step_s if plan.pinned else plan.estimated_step_s
    return replace(
        pinned,
        pinned=tuple((pattern, spec_to_text(spec)) for pattern, spec in every.items()),
        unpinned_step_s=before_s,
        search=pinned.search or plan.search,
    )


def _check_pins(plan: ParallelPlan, pins: Any) -> None:
    if not isinstance(pins, Mapping) or not pins:
        raise ArgumentError(
            f"with_pins({pins!r}): needs a dict from paths or patterns to "
            "jax.sharding.PartitionSpec, such as {\"*['kernel']\": PartitionSpec(None, 'x')}."
        )
    paths = [array.tensor.path for array in plan_arrays(plan)]
    for pattern, spec in pins.items():
        if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                f"with_pins({{{pattern!r}: {spec!r}}}): needs a path or pattern (str) and a "
                "jax.sharding.PartitionSpec."
            )
        if not matching_paths(paths, pattern):
            raise SpecError(f"with_pins: {pattern!r} {no_match_text(plan, pattern)}")
