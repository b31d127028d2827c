"""Pin and solve again: from a plan and specs by pattern to the best plan with them.

Meshes, stages, micro-batches and recomputed layers stay as they are; pins that the plan had stay,
and a new one comes before whatever else is asked of its arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, PlanError, SpecError
from autopar.inspect.why import origin_of, without_program
from autopar.ir.plan import MADE, ParallelPlan
from autopar.ir.spec import spec_to_text
from autopar.sharding.layout_constraints import matching_paths
from autopar.sharding.origin import pins_of
from autopar.sharding.plan_mesh import PassTimer, plan_traced
from autopar.stages.plan_pipeline import PipelineOrigin, repin_pipeline


def with_pins(plan: ParallelPlan, pins: Mapping[str, Any]) -> ParallelPlan:
    _check_pins(plan, pins)
    every = {**pins_of(plan), **pins}
    timer = PassTimer()
    if plan.is_pipeline:
        if plan.layering == MADE:
            raise PlanError(
                f"with_pins: the results of {plan.name} lie as the train step wants them. Pin "
                "arrays of the train step's plan, and make the initialiser from that."
            )
        if not isinstance(plan.origin, PipelineOrigin):
            raise without_program(plan, "with_pins(…)")
        found = repin_pipeline(plan, plan.origin, every, timer)
    else:
        if plan.num_devices == 1:
            raise PlanError(f"with_pins: {plan.name} is planned for one device; nothing to pin.")
        origin = origin_of(plan, "with_pins(…)")
        if origin.change is not None:
            raise PlanError(
                f"with_pins: this is the plan of one stage of {plan.name}. Call with_pins of the "
                "whole plan; it solves only the stages whose arrays are pinned."
            )
        found = plan_traced(
            origin.traced,
            cluster=origin.cluster,
            method=origin.method,
            mesh=origin.mesh,
            timer=timer,
            pins=every,
            built=origin.built if origin.step is origin.traced else None,
        ).plan
    before_s = plan.unpinned_step_s if plan.pinned else plan.estimated_step_s
    return replace(
        found,
        pinned=tuple((pattern, spec_to_text(spec)) for pattern, spec in every.items()),
        unpinned_step_s=before_s,
        search=found.search or plan.search,
    )


def _check_pins(plan: ParallelPlan, pins: Any) -> None:
    if not isinstance(pins, Mapping) or not pins:
        raise ArgumentError(
            f"with_pins({pins!r}): needs a dict from paths or patterns to "
            "jax.sharding.PartitionSpec, such as {\"*['kernel']\": PartitionSpec(None, 'x')}."
        )
    paths = [t.path for t in (*plan.inputs, *plan.outputs, *plan.named)]
    for pattern, spec in pins.items():
        if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                f"with_pins({{{pattern!r}: {spec!r}}}): needs a path or pattern as text and a "
                "jax.sharding.PartitionSpec."
            )
        if not matching_paths(paths, pattern):
            near = get_close_matches(pattern, dict.fromkeys(paths), n=5, cutoff=0.3) or paths[:5]
            raise SpecError(
                f"with_pins: the pattern {pattern!r} matches no input, output or named value of "
                f"{plan.name}. Near it are: {', '.join(near)}. In patterns '*' stands for any text "
                "and '?' for any one character."
            )
