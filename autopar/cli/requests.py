"""What is to be planned, as plain data, and the plan that comes of it.

A `PlanRequest` has nothing but texts and numbers, so that other processes can be given one;
`make_plan` goes from it to a `MadePlan`.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar import api, methods
from autopar.cli.arguments import METHODS
from autopar.cli.clusters import ClusterTarget, Overrides, parse_target, with_devices
from autopar.cli.factories import UserStep, load_object, load_step, parse_options
from autopar.cli.units import parse_quantity
from autopar.errors import ArgumentError, FactoryError, near_names, shortened
from autopar.ir.plan import ParallelPlan


@dataclass(frozen=True)
class PlanRequest:
    """As written on the command line; `options` are the factory's, `devices` replaces the number
    that the cluster has."""

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

    def with_option(self, name: str, value: Any) -> PlanRequest:
        return replace(self, options=tuple({**dict(self.options), name: value}.items()))

    def target(self) -> ClusterTarget:
        target = parse_target(self.cluster, self.overrides)
        return target if self.devices is None else with_devices(target, self.devices)


@dataclass(frozen=True)
class MadePlan:
    """`seconds`: of planning; `load_s`: of importing the user's code and calling its factory."""

    plan: ParallelPlan
    target: ClusterTarget
    step: UserStep
    load_s: float
    seconds: float


def request_of(arguments: Namespace) -> PlanRequest:
    """What the flags that `plan` and `sweep` share ask for."""
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
    """Planning needs no device: JAX is kept from looking for any, unless the user says which, and
    from complaining of a CUDA plugin that finds no GPU."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def make_plan(request: PlanRequest, loaded: UserStep | None = None) -> MadePlan:
    """`loaded`: the step, if the factory was called already."""
    target = request.target()
    started = time.perf_counter()
    step = load_step(request.factory, dict(request.options)) if loaded is None else loaded
    fn, own_method = _own(step.step)
    method = method_of(request, target, own_method)
    loaded_at = time.perf_counter()
    batch = {} if request.batch_argnums is None else {"batch_argnums": request.batch_argnums}
    if request.batch_argnums is not None and isinstance(step.step, api.ParallelFunction):
        raise ArgumentError(
            "--batch-argnums: the factory's step is parallelized already and has its own; give it "
            "to autopar.parallelize there."
        )
    plan = api.plan(fn, *step.args, cluster=target.cluster, method=method, **batch, **step.kwargs)
    done = time.perf_counter()
    return MadePlan(plan, target, step, loaded_at - started, done - loaded_at)


def _own(step: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    return step, step.method if isinstance(step, api.ParallelFunction) else None


def method_of(request: PlanRequest, target: ClusterTarget, own: Any = None) -> Any:
    """The method that the flags ask for; `own` is the step's, if it has one."""
    name = request.method
    if target.mesh is not None:
        return _on_relative_mesh(request, target)
    if name is None and own is not None:
        given = [flag for flag, value in _flags(request).items() if value is not None]
        if given:
            raise ArgumentError(
                f"{', '.join(given)}: the factory's step has its own method, {shortened(own)}. "
                "Give --method too, to plan by another, or change it there."
            )
        return own
    if name is not None and ":" in name:
        method = load_object(name)
        if not isinstance(method, methods.ParallelMethod):
            raise FactoryError(
                f"--method {name}: is {shortened(method)}; needs a method such as "
                "autopar.ShardParallel(…)."
            )
        _refuse_flags(request, f"--method {name}", ())
        return method
    return _named(name or "auto", request)


def _named(name: str, request: PlanRequest) -> Any:
    if name not in METHODS:
        raise ArgumentError(
            f"--method {name}: there is none of that name{near_names(name, METHODS)}. Choose one "
            f"of {', '.join(METHODS)}, or MODULE:OBJECT."
        )
    plain = {"data": methods.DataParallel, "zero2": methods.Zero2Parallel}
    plain["zero3"] = methods.Zero3Parallel
    number = request.micro_batches
    if name in plain:
        _refuse_flags(request, f"--method {name}", ("--micro-batches",))
        return plain[name](_number(name, number))
    options = _options(request)
    if name == "shard":
        _refuse_flags(request, "--method shard", ("--micro-batches", "--budget", "--remat"))
        return methods.ShardParallel(num_micro_batches=_number(name, number), options=options)
    if name == "auto":
        _refuse_flags(request, "--method auto", ("--micro-batches", "--budget", "--remat"))
        return methods.AutoParallel("auto" if number is None else number, options=options)
    layers = methods.AutoLayers("auto" if request.layers is None else request.layers)
    stages: Any = methods.AutoStages()
    if request.stages is not None:
        stages = methods.UniformStages(request.stages)
    if number is None:
        number = "auto"
    if number == "auto" and request.stages is not None:
        raise ArgumentError(
            f"--stages {request.stages}: needs --micro-batches N as well; numbers of micro-batches "
            "are searched together with stages."
        )
    return methods.PipeshardParallel(
        number, layers=layers, stages=stages, schedule=request.schedule or "1f1b", options=options
    )


def _number(name: str, given: int | str | None) -> int:
    if given == "auto":
        raise ArgumentError(
            f"--micro-batches auto: --method {name} needs a number; auto and pipeline search it."
        )
    return 1 if given is None else int(given)


def _options(request: PlanRequest) -> methods.ShardingOptions:
    budget = None
    if request.budget is not None:
        budget = parse_quantity(request.budget, "memory", "--budget")
    return methods.ShardingOptions(memory_budget_bytes=budget, remat=request.remat or "auto")


def _on_relative_mesh(request: PlanRequest, target: ClusterTarget) -> Any:
    if request.method not in (None, "shard"):
        raise ArgumentError(
            f"--method {request.method}: links in relative units (alpha, beta) price communication "
            "alone, on one mesh. Use --method shard, or give bandwidths and a device."
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
            raise ArgumentError(f"{flag} {value}: {where} has no such option.")
