"""The best few plans compiled for GPUs that are not there, and ranked by what XLA made of them.

    function, arguments, cluster, target → the k best plans → VerifyReport of each → ParallelPlan

Without devices nothing can be timed. What compiling shows is memory, which may rule a plan out, and
the bytes that XLA's collectives send, with which the predicted communication is corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.compiler import StepOptions
from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import SearchReport, TriedPlan
from autopar.ir.text import format_bytes
from autopar.measure.candidates import plan_candidates
from autopar.measure.rerank import in_few_words
from autopar.measure.verify.report import VerifyReport
from autopar.measure.verify.verify_plan import check_compiler, verify
from autopar.methods import ParallelMethod
from autopar.progress import Progress


def plan_verified(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterSpec,
    method: ParallelMethod,
    target: str | Path | None = None,
    time_limit_s: float = 3600.0,
    batch_argnums: int | Sequence[int] = (1,),
    **kwargs: Any,
) -> ParallelPlan:
    """Plan for a cluster that need not exist, and take the best of several plans by compiling them
    for its GPU: as many as the method's `ShardingOptions(rerank=…)` says. JAX's CUDA plugin is
    needed: `pip install 'autopar[verify]'`.

    fn:           the step; `args` and `kwargs` are what it is called with.
    cluster:      a `ClusterSpec`.
    method:       one that searches, with `ShardingOptions(rerank=…)`.
    target:       the GPU, as for `autopar.verify`. Default: the cluster's device.
    time_limit_s: seconds that XLA may take for one program.
    batch_argnums: positions of arguments whose arrays have a leading batch dimension.

    Returns the plan. Raises `MemoryBudgetError` if none of them fits by XLA's figures, and
    `CompileError` if XLA refuses a program.
    """
    num = getattr(getattr(method, "options", None), "rerank", 0)
    if not num:
        raise ArgumentError(
            f"plan_verified(method={method!r}): needs a method whose options say how many plans to "
            "compile, such as ShardParallel(options=ShardingOptions(rerank=4)). For one plan, use "
            "autopar.plan(…) and autopar.verify(…, plan=plan)."
        )
    if not isinstance(cluster, ClusterSpec):
        raise ArgumentError(f"plan_verified(cluster={cluster!r}): needs an autopar.ClusterSpec.")
    check_compiler(cluster, target)
    positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    options = StepOptions(batch_argnums=positions)
    candidates = plan_candidates(
        fn, args, kwargs, cluster=cluster, method=method, options=options, num=num
    )
    proved = []
    with Progress("compiling plans", len(candidates)) as progress:
        for planned in candidates:
            report = verify(
                fn,
                *args,
                plan=planned.plan,
                target=target,
                time_limit_s=time_limit_s,
                batch_argnums=positions,
                **kwargs,
            )
            proved.append(Proved(planned.plan, report))
            progress.step()
    return best_proved(proved)


@dataclass(frozen=True, eq=False)
class Proved:
    plan: ParallelPlan
    report: VerifyReport

    @property
    def step_s(self) -> float:
        """The predicted step, with its communication as much more or less as XLA's collectives send
        than predicted."""
        pairs = [own.sent_bytes for mesh in self.report.meshes for own in mesh.collectives]
        predicted = sum(pair.predicted or 0.0 for pair in pairs)
        compute_s = sum(module.compute_s for module in self.plan.modules)
        communication_s = sum(module.communication_s for module in self.plan.modules)
        if not predicted or not communication_s:
            return self.plan.estimated_step_s
        more = sum(pair.xla for pair in pairs) / predicted - 1
        share = communication_s / (compute_s + communication_s)
        return self.plan.estimated_step_s * (1 + share * more)


def best_proved(proved: Sequence[Proved]) -> ParallelPlan:
    """The plan that promises most, of those that fit by XLA's figures; it says what was tried."""
    fitting = [one for one in proved if one.report.fits]
    if not fitting:
        raise _none_fits(proved)
    winner = min(fitting, key=lambda one: one.step_s)
    tried = tuple(
        TriedPlan(
            what=in_few_words(one.plan),
            predicted_s=one.plan.estimated_step_s,
            measured_s=None,
            spread=0.0,
            predicted_bytes=one.plan.estimated_peak_bytes,
            memory_bytes=one.report.peak_bytes,
            failure="" if one.report.fits else f"needs {_more(one)} more than there is",
            is_chosen=one is winner,
            compiled_s=one.step_s,
        )
        for one in proved
    )
    report = winner.plan.search or SearchReport(0, 0, 0, 0)
    return replace(winner.plan, search=replace(report, tried=tried))


def _more(one: Proved) -> str:
    return format_bytes(one.report.excess_bytes)


def _none_fits(proved: Sequence[Proved]) -> MemoryBudgetError:
    least = min(proved, key=lambda one: one.report.excess_bytes)
    lines = "\n".join(f"  - {in_few_words(one.plan)}: {_more(one)} too much" for one in proved)
    peak = least.report.peak_bytes
    return MemoryBudgetError(
        f"{least.plan.name}: ShardingOptions(rerank=…) compiled {len(proved)} plans for "
        f"{least.report.target}, and none fits.\n{lines}\nGive a lower "
        "ShardingOptions(memory_budget_bytes=…), remat='all', more micro-batches or more devices.",
        peak,
        peak - least.report.excess_bytes,
    )
