"""Requests of `autopar plan` and `sweep`: from options to a `PlanRequest` to a `MadePlan`.

A `PlanRequest` is plain data, so it can be sent to other processes.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

from autopar import api, methods
from autopar.cli.arguments import METHODS
from autopar.cli.clusters import ClusterTarget, Overrides, parse_target, with_devices
from autopar.cli.factories import UserStep, load_object, load_step, parse_options
from autopar.cli.units import parse_quantity
from autopar.errors import ArgumentError, FactoryError, near_names, shortened
from autopar.ir.memory_found import MemoryCorrection
from autopar.ir.plan import ParallelPlan
from autopar.sharding.refit import on_devices_only, with_correction


@dataclass(frozen=True)
class PlanRequest:
    """As on the command line. `options`: of the factory; `devices`: instead of the cluster's;
    `verify`: the plan will be compiled for absent GPUs."""

    factory: str
    cluster: str
    options: tuple[tuple[str, Any], ...] = ()
    overrides: Overrides | None = None
    method: str | None = None
    micro_batches: int | str | None = None
    budget: str | None = None
    stages: int | None = None
    layers: int | None = None
    schedule: str | None = None
    remat: str | None = None
    batch_argnums: tuple[int, ...] | None = None
    devices: int | None = None
    verify: bool = False

    def with_option(self, name: str, value: Any) -> PlanRequest:
        return replace(self, options=tuple({**dict(self.options), name: value}.items()))

    def target(self) -> ClusterTarget:
        target = parse_target(self.cluster, self.overrides)
        return target if self.devices is None else with_devices(target, self.devices)


@dataclass(frozen=True)
class MadePlan:
    """`seconds`: of planning; `load_s`: of importing and calling the factory."""

    plan: ParallelPlan
    target: ClusterTarget
    step: UserStep
    load_s: float
    seconds: float


def request_of(arguments: Namespace) -> PlanRequest:
    """The request of the options that `plan` and `sweep` share."""
    return PlanRequest(
        factory=arguments.factory,
        cluster=arguments.cluster,
        options=tuple(parse_options(arguments.set).items()),
        overrides=Overrides(
            arguments.memory,
            arguments.intra_bandwidth,
            arguments.inter_bandwidth,
            arguments.profile,
        ),
        method=arguments.method,
        stages=arguments.stages,
        layers=arguments.layers,
        schedule=arguments.schedule,
        remat=arguments.remat,
        batch_argnums=arguments.batch_argnums,
    )


def use_no_devices() -> None:
    """Keep JAX from looking for devices, which planning does not need, unless the user chose some,
    and from warning about a CUDA plugin without a GPU."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def make_plan(
    request: PlanRequest,
    loaded: UserStep | None = None,
    correction: MemoryCorrection | None = None,
    method: methods.ParallelMethod | None = None,
) -> MadePlan:
    """`loaded`: the step, if the factory was already called. `correction`: what XLA was found to
    keep, over what is predicted. `method`: instead of the one that the options select."""
    target = request.target()
    started = time.perf_counter()
    step = load_step(request.factory, dict(request.options)) if loaded is None else loaded
    parallelized = step.step if isinstance(step.step, api.ParallelFunction) else None
    chosen = method or method_of(request, target, parallelized and parallelized.method)
    if not isinstance(chosen, ParallelPlan):
        chosen = with_correction(chosen, correction)
        if request.verify:
            chosen = on_devices_only(chosen, "GPUs that are absent")
    loaded_at = time.perf_counter()
    batch = {} if request.batch_argnums is None else {"batch_argnums": request.batch_argnums}
    if request.batch_argnums is not None and parallelized is not None:
        raise ArgumentError(
            "--batch-argnums: the factory's step is already parallelized; pass batch_argnums to "
            "autopar.parallelize there."
        )
    plan = api.plan(
        step.step, *step.args, cluster=target.cluster, method=chosen, **batch, **step.kwargs
    )
    done = time.perf_counter()
    return MadePlan(plan, target, step, loaded_at - started, done - loaded_at)


def method_of(
    request: PlanRequest,
    target: ClusterTarget,
    step_method: methods.ParallelMethod | ParallelPlan | None = None,
) -> methods.ParallelMethod | ParallelPlan:
    """The method that the options select; by default that of a parallelized step."""
    name = request.method
    if target.mesh is not None:
        return _on_relative_mesh(request, target)
    if name is None and step_method is not None:
        given = [flag for flag, value in _flags(request).items() if value is not None]
        if given:
            raise ArgumentError(
                f"{', '.join(given)}: the factory's step already has a method, "
                f"{shortened(step_method)}. Override it with --method, or change it in the factory."
            )
        return step_method
    if name is not None and ":" in name:
        method = load_object(name)
        if not isinstance(method, methods.ParallelMethod):
            raise FactoryError(
                f"--method {name}: this is {shortened(method)}; needs a method such as "
                "autopar.ShardParallel(…)."
            )
        _refuse_flags(request, f"--method {name}", ())
        return method
    return _named(name or "auto", request)


def _named(name: str, request: PlanRequest) -> methods.ParallelMethod:
    if name not in METHODS:
        raise ArgumentError(
            f"--method {name}: unknown method{near_names(name, METHODS)}; choose from "
            f"{', '.join(METHODS)}, or give MODULE:OBJECT."
        )
    plain = {"data": methods.DataParallel, "zero2": methods.Zero2Parallel}
    plain["zero3"] = methods.Zero3Parallel
    number = request.micro_batches
    if name in plain:
        _refuse_flags(request, f"--method {name}", ("--micro-batches", "--remat"))
        return plain[name](_number(name, number), request.remat or "none")
    options = _options(request)
    if name == "shard":
        _refuse_flags(request, "--method shard", ("--micro-batches", "--budget", "--remat"))
        return methods.ShardParallel(num_micro_batches=_number(name, number), options=options)
    if name == "auto":
        _refuse_flags(request, "--method auto", ("--micro-batches", "--budget", "--remat"))
        return methods.AutoParallel("auto" if number is None else number, options=options)
    layers = methods.AutoLayers("auto" if request.layers is None else request.layers)
    stages: methods.AutoStages | methods.UniformStages = methods.AutoStages()
    if request.stages is not None:
        stages = methods.UniformStages(request.stages)
    if number is None:
        number = "auto"
    if number == "auto" and request.stages is not None:
        raise ArgumentError(
            f"--stages {request.stages}: needs --micro-batches N too, because micro-batches are "
            "only searched together with stages."
        )
    return methods.PipeshardParallel(
        number, layers=layers, stages=stages, schedule=request.schedule or "1f1b", options=options
    )


def _number(name: str, given: int | str | None) -> int:
    if given == "auto":
        raise ArgumentError(
            f"--micro-batches auto: --method {name} needs a number; only auto and pipeline search."
        )
    return 1 if given is None else int(given)


def _options(request: PlanRequest) -> methods.ShardingOptions:
    budget = None
    if request.budget is not None:
        budget = parse_quantity(request.budget, "memory", "--budget")
    return methods.ShardingOptions(memory_budget_bytes=budget, remat=request.remat or "auto")


def _on_relative_mesh(request: PlanRequest, target: ClusterTarget) -> methods.ShardParallel:
    if request.method not in (None, "shard"):
        raise ArgumentError(
            f"--method {request.method}: links in relative units (alpha, beta) only price "
            "communication on one mesh. Use --method shard, or give bandwidths and a device."
        )
    _refuse_flags(request, "links in relative units", ("--micro-batches", "--budget", "--remat"))
    assert target.mesh is not None
    number = _number("shard", request.micro_batches)
    return methods.ShardParallel(target.mesh, number, _options(request))


def _flags(request: PlanRequest) -> dict[str, Any]:
    return {
        "--micro-batches": request.micro_batches,
        "--budget": request.budget,
        "--remat": request.remat,
        "--stages": request.stages,
        "--layers": request.layers,
        "--schedule": request.schedule,
    }


def _refuse_flags(request: PlanRequest, where: str, known: tuple[str, ...]) -> None:
    for flag, value in _flags(request).items():
        if value is not None and flag not in known:
            raise ArgumentError(f"{flag} {value}: not an option of {where}.")
