"""The best few plans compiled for GPUs that are not there, and ranked by what XLA made of them.

    function, arguments, cluster, target → the k best plans → VerifyReport of each → ParallelPlan

Without devices nothing can be timed. Compiling shows memory, which may rule a plan out, and the
scheduled program, of which the judge reads the time (`autopar.measure.judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.compiler import plan_step
from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.judged import JudgedStep
from autopar.ir.memory_found import MemoryCorrection
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import SearchReport, TriedPlan
from autopar.ir.text import format_bytes
from autopar.measure.candidates import plan_candidates
from autopar.measure.judged_plan import judged_step
from autopar.measure.rerank import plan_summary
from autopar.measure.verify.report import VerifyReport
from autopar.measure.verify.verify_plan import check_compiler, verify
from autopar.methods import ParallelMethod, options_of
from autopar.progress import Progress
from autopar.sharding.refit import (
    Refit,
    can_refit,
    first_plan,
    on_devices_only,
    with_correction,
)
from autopar.tracer.trace import DEFAULT_BATCH, StepOptions


def plan_verified(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterSpec,
    method: ParallelMethod,
    target: str | Path | None = None,
    time_limit_s: float = 3600.0,
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    **kwargs: Any,
) -> ParallelPlan:
    """Plan for a cluster that need not exist, and compile the plan for its GPU: if it does not fit
    by XLA's count, plan again with what was learned. Of several plans, choose the best by what XLA
    made of them. Needs JAX's CUDA plugin: `pip install 'autopar[verify]'`.

    fn:           the step; `args` and `kwargs` are its arguments.
    cluster:      a `ClusterSpec`.
    method:       one that searches; `ShardingOptions(rerank=…)` is how many plans to choose from,
                  0 for one plan that fits.
    target:       the GPU, as for `autopar.verify`. Default: the cluster's device.
    time_limit_s: for compiling one program.
    batch_argnums: as for `parallelize`.

    Returns the plan. Raises `MemoryBudgetError` if no compiled plan fits, and `CompileError` if XLA
    rejects a program.
    """
    if not can_refit(method):
        raise ArgumentError(
            f"plan_verified(method={method!r}): needs a method that searches, such as "
            "AutoParallel() or ShardParallel(options=ShardingOptions(rerank=4)). For another, use "
            "autopar.plan(…) and autopar.verify(…, plan=plan)."
        )
    method = on_devices_only(method, "GPUs that are absent") or method
    num = options_of(method).rerank
    if not isinstance(cluster, ClusterSpec):
        raise ArgumentError(f"plan_verified(cluster={cluster!r}): needs an autopar.ClusterSpec.")
    check_compiler(cluster, target)
    options = StepOptions.checked(batch_argnums=batch_argnums)
    if not num:
        settings = {"target": target, "time_limit_s": time_limit_s, "batch_argnums": batch_argnums}
        return _first_that_fits(fn, args, kwargs, cluster, method, options, settings)
    candidates = plan_candidates(
        fn, args, kwargs, cluster=cluster, method=method, options=options, num=num
    )
    compiled = []
    with Progress("compiling plans", len(candidates)) as progress:
        for planned in candidates:
            report = verify(
                fn,
                *args,
                plan=planned.plan,
                target=target,
                time_limit_s=time_limit_s,
                batch_argnums=batch_argnums,
                **kwargs,
            )
            compiled.append(CompiledPlan(planned.plan, report))
            progress.step()
    return best_compiled(compiled)


def _first_that_fits(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: ClusterSpec,
    method: ParallelMethod | None,
    options: StepOptions,
    settings: dict[str, Any],
) -> ParallelPlan:
    """The loop that runs where devices are, with XLA's compiler alone."""

    def compiled(correction: MemoryCorrection | None) -> CompiledPlan:
        corrected = with_correction(method, correction)
        planned = plan_step(fn, args, kwargs, cluster=cluster, method=corrected, options=options)
        return verified(planned.plan)

    def verified(plan: ParallelPlan) -> CompiledPlan:
        return CompiledPlan(plan, verify(fn, *args, plan=plan, **settings, **kwargs))

    first, misfit = first_plan(compiled)
    try:
        return fitted_by_xla(first, compiled)
    except MemoryBudgetError as error:
        if misfit is None:
            raise
        raise misfit.having_tried({"XLA's count": error.problem}) from error


def fitted_by_xla(
    first: CompiledPlan, again: Callable[[MemoryCorrection], CompiledPlan]
) -> ParallelPlan:
    """The plan if it fits its devices and its budget by XLA's count, else the first that does, with
    XLA's figures."""
    limits = [
        mesh.limit_bytes if mesh.budget_bytes is None else min(mesh.limit_bytes, mesh.budget_bytes)
        for mesh in first.report.meshes
    ]
    refit = Refit(
        plan_again=again,
        bytes_of=lambda one: [mesh.peak_bytes.xla for mesh in one.report.meshes],
        plan_of=lambda one: one.plan,
        limit_bytes=min(limits),
    )
    fitted, found = refit.fitted(first)
    return replace(fitted.plan, memory_found=found, judged=fitted.judged)


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    plan: ParallelPlan
    report: VerifyReport

    @cached_property
    def judged(self) -> JudgedStep | None:
        """The step as the judge reads XLA's schedules; None if it read none."""
        meshes = [mesh.judged for mesh in self.report.meshes if mesh.judged is not None]
        if len(meshes) < len(self.report.meshes):
            return None
        return judged_step(self.plan, meshes)

    @property
    def step_s(self) -> float:
        """The judged step, or else the predicted one, its communication scaled by the bytes of
        XLA's collectives over the predicted bytes."""
        if self.judged is not None:
            return self.judged.step_s
        pairs = [c.sent_bytes for mesh in self.report.meshes for c in mesh.collectives]
        predicted = sum(pair.predicted or 0.0 for pair in pairs)
        compute_s = sum(module.compute_s for module in self.plan.modules)
        communication_s = sum(module.communication_s for module in self.plan.modules)
        if not predicted or not communication_s:
            return self.plan.estimated_step_s
        more = sum(pair.xla for pair in pairs) / predicted - 1
        share = communication_s / (compute_s + communication_s)
        return self.plan.estimated_step_s * (1 + share * more)


def best_compiled(compiled: Sequence[CompiledPlan]) -> ParallelPlan:
    """The plan with the shortest compiled step of those that fit; its search report has all."""
    fitting = [candidate for candidate in compiled if candidate.report.fits]
    if not fitting:
        raise _none_fits(compiled)
    winner = min(fitting, key=lambda candidate: candidate.step_s)
    tried = tuple(
        TriedPlan(
            what=plan_summary(candidate.plan),
            predicted_s=candidate.plan.estimated_step_s,
            measured_s=None,
            spread=0.0,
            predicted_bytes=candidate.plan.estimated_peak_bytes,
            memory_bytes=candidate.report.peak_bytes,
            failure="" if candidate.report.fits else f"exceeds the memory by {_excess(candidate)}",
            is_chosen=candidate is winner,
            compiled_s=candidate.step_s,
        )
        for candidate in compiled
    )
    report = winner.plan.search or SearchReport(0, 0, 0, 0)
    return replace(winner.plan, search=replace(report, tried=tried), judged=winner.judged)


def _excess(candidate: CompiledPlan) -> str:
    return format_bytes(candidate.report.excess_bytes)


def _none_fits(compiled: Sequence[CompiledPlan]) -> MemoryBudgetError:
    least = min(compiled, key=lambda candidate: candidate.report.excess_bytes)
    lines = "\n".join(f"  - {plan_summary(c.plan)}: {_excess(c)} too much" for c in compiled)
    peak = least.report.peak_bytes
    return MemoryBudgetError(
        f"{least.plan.name}: none of {len(compiled)} plans compiled for {least.report.target} "
        f"fits.\n{lines}\nUse a lower ShardingOptions(memory_budget_bytes=…), remat='all', more "
        "micro-batches or more devices.",
        peak,
        peak - least.report.excess_bytes,
    )
