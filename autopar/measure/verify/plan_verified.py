"""The best few plans compiled for GPUs that are not there, and ranked by what XLA made of them.

    function, arguments, cluster, target → the k best plans → VerifyReport of each → ParallelPlan

Without devices nothing can be timed. Compiling shows memory, which may rule a plan out, and the
bytes that XLA's collectives send, which correct the predicted communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import SearchReport, TriedPlan
from autopar.ir.text import format_bytes
from autopar.measure.candidates import plan_candidates
from autopar.measure.rerank import plan_summary
from autopar.measure.verify.report import VerifyReport
from autopar.measure.verify.verify_plan import check_compiler, verify
from autopar.methods import ParallelMethod
from autopar.progress import Progress
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
    """Plan for a cluster that need not exist, and choose the best of several plans by compiling
    them for its GPU. Needs JAX's CUDA plugin: `pip install 'autopar[verify]'`.

    fn:           the step; `args` and `kwargs` are its arguments.
    cluster:      a `ClusterSpec`.
    method:       one that searches; its `ShardingOptions(rerank=…)` is the number of plans.
    target:       the GPU, as for `autopar.verify`. Default: the cluster's device.
    time_limit_s: for compiling one program.
    batch_argnums: as for `parallelize`.

    Returns the plan. Raises `MemoryBudgetError` if no compiled plan fits, and `CompileError` if XLA
    rejects a program.
    """
    num = getattr(getattr(method, "options", None), "rerank", 0)
    if not num:
        raise ArgumentError(
            f"plan_verified(method={method!r}): needs a method with a number of plans to compile, "
            "such as ShardParallel(options=ShardingOptions(rerank=4)). For one plan, use "
            "autopar.plan(…) and autopar.verify(…, plan=plan)."
        )
    if not isinstance(cluster, ClusterSpec):
        raise ArgumentError(f"plan_verified(cluster={cluster!r}): needs an autopar.ClusterSpec.")
    check_compiler(cluster, target)
    options = StepOptions.checked(batch_argnums=batch_argnums)
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


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    plan: ParallelPlan
    report: VerifyReport

    @property
    def step_s(self) -> float:
        """The predicted step, its communication scaled by the bytes of XLA's collectives over the
        predicted bytes."""
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
    """The plan with the shortest corrected step of those that fit; its search report has all."""
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
    return replace(winner.plan, search=replace(report, tried=tried))


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
