"""`autopar plan`: plans a user's step for a described cluster; shows, saves and verifies it."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from dataclasses import replace

from autopar.cli.arguments import STARTED
from autopar.cli.baselines import baselines
from autopar.cli.requests import MadePlan, PlanRequest, make_plan, request_of, use_no_devices
from autopar.cli.targets import check_target
from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.memory_found import MemoryCorrection
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes, format_seconds
from autopar.measure.verify.plan_verified import CompiledPlan, fitted_by_xla
from autopar.measure.verify.report import VerifyReport
from autopar.measure.verify.verify_plan import check_compiler, verify
from autopar.sharding.refit import first_plan

OK, NOT_FITTING = 0, 1


def run_plan(arguments: Namespace) -> int:
    use_no_devices()
    check_target(arguments.save, "--save")
    check_target(arguments.report, "--report")
    request = replace(
        request_of(arguments),
        micro_batches=arguments.micro_batches,
        budget=arguments.budget,
        verify=arguments.verify,
    )
    if arguments.baselines:
        _check_baselines(arguments, request)
    if arguments.batch is not None:
        request = request.with_option("batch", arguments.batch)
    if arguments.verify:
        check_compiler(request.target().cluster, arguments.target)
    if arguments.verify:
        made, report = _verified(request, arguments)
    else:
        made, report = make_plan(request), None
    plan = made.plan
    if arguments.save:
        plan.save(arguments.save)
    if arguments.report:
        compare = {}
        if arguments.baselines:
            step = made.step
            compare = baselines(
                made.plan,
                made.target.cluster,
                lambda method: make_plan(request, step, method=method).plan,
            )
        plan.report(arguments.report, compare=compare)
    if not arguments.quiet:
        print(plan.explain(depth=arguments.depth, detail="full" if arguments.full else "short"))
        print()
    for path in arguments.why:
        print(plan.explain(path))
        print()
    print(summary(made))
    if arguments.save:
        print(f"saved: {arguments.save}")
    if arguments.report:
        print(f"report: {arguments.report}")
    code = OK
    if not fits(made):
        budget = format_bytes(made.target.cluster.spec.memory_bytes)
        print(f"autopar: the plan does not fit: each device has {budget}.", file=sys.stderr)
        code = NOT_FITTING
    if report is not None:
        print()
        print(report)
        code = code if report.fits else NOT_FITTING
    total = time.perf_counter() - STARTED
    print(f"planned in {made.seconds:.1f} s, {total:.1f} s in total")
    return code


def _check_baselines(arguments: Namespace, request: PlanRequest) -> None:
    if not arguments.report:
        raise ArgumentError(
            "--baselines: they are shown beside the plan in its report; add --report plan.html."
        )
    if request.target().mesh is not None:
        raise ArgumentError(
            "--baselines: links in relative units (alpha, beta) price communication alone, and "
            "baselines need step times. Give bandwidths and a device."
        )


def _verified(request: PlanRequest, arguments: Namespace) -> tuple[MadePlan, VerifyReport]:
    """The plan, or the first that fits by XLA's count, and what XLA made of it; where none does,
    the first one, whose report says so. A step that is predicted not to fit by a little is left to
    XLA."""
    made, misfit = first_plan(lambda correction: make_plan(request, correction=correction))
    batch = {} if arguments.batch_argnums is None else {"batch_argnums": arguments.batch_argnums}
    user, target = made.step, arguments.target
    tried: list[tuple[MadePlan, CompiledPlan]] = []

    def compiled(made: MadePlan) -> CompiledPlan:
        plan = made.plan
        report = verify(user.step, *user.args, plan=plan, target=target, **batch, **user.kwargs)
        tried.append((made, CompiledPlan(plan, report)))
        return tried[-1][1]

    def again(correction: MemoryCorrection) -> CompiledPlan:
        made = make_plan(request, user, correction)
        if made.plan.correction != correction:
            text = f"{made.plan.method} has one plan alone"
            raise MemoryBudgetError(text, first.report.peak_bytes)
        return compiled(made)

    first = compiled(made)
    try:
        plan = fitted_by_xla(first, again)
    except MemoryBudgetError as error:
        if misfit is not None:
            raise misfit.having_tried({"XLA's count": error.problem}) from error
        print(f"autopar: {error}", file=sys.stderr)
        return made, first.report
    last, one = tried[-1]
    return replace(last, plan=plan), one.report


def fits(made: MadePlan) -> bool:
    """Whether the predicted peak is within the memory of a device."""
    return made.plan.estimated_peak_bytes <= made.target.cluster.spec.memory_bytes


def summary(made: MadePlan) -> str:
    plan, cluster = made.plan, made.target.cluster
    device = cluster.spec
    lines = [
        f"cluster: {cluster.num_hosts} × {cluster.devices_per_host} {device.name}, "
        f"{format_bytes(device.memory_bytes)} each",
    ]
    parts = [f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"]
    if plan.num_micro_batches > 1:
        parts.append(f"{plan.num_micro_batches} micro-batches")
    if made.target.mesh is not None:
        parts.append(f"cost {plan.estimated_step_s:.4g} in the units of alpha and beta")
    else:
        parts.append(f"step {format_seconds(plan.estimated_step_s)}")
        rates = throughput(plan)
        parts += [f"{rate:,.0f} {name}/s" for name, rate in rates.items()]
    parts.append(f"peak {format_bytes(plan.estimated_peak_bytes)} per device")
    return "\n".join([*lines, "plan: " + ", ".join(parts)])


def throughput(plan: ParallelPlan) -> dict[str, float]:
    """Predicted samples per second, and tokens if the batch has integer arrays of one length."""
    rows, tokens = batch_size(plan)
    if not rows or not plan.estimated_step_s:
        return {}
    rates = {"samples": rows / plan.estimated_step_s}
    if tokens:
        rates["tokens"] = tokens / plan.estimated_step_s
    return rates


def batch_size(plan: ParallelPlan) -> tuple[int, int]:
    """(rows, tokens) of a batch; 0 tokens without two-dimensional integer arrays."""
    batch = [tensor for tensor in plan.inputs if tensor.role == "batch" and tensor.shape]
    rows = batch[0].shape[0] if batch else 0
    lengths = {
        tensor.shape[1]
        for tensor in batch
        if len(tensor.shape) == 2 and tensor.dtype.startswith(("int", "uint"))
    }
    return rows, rows * max(lengths, default=0)
