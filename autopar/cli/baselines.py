"""Baselines: a step planned by the methods that most people would use → plans beside its own.

Each baseline takes the fewest micro-batches with which it fits, by doubling, as one would by hand.
Where the whole batch does not fit, every layer recomputed is tried too, and the faster counts.

    data parallel, ZeRO-2, FSDP   as the methods of these names
    Megatron                      a mesh of data × tensor. The first axis splits the batch and never
                                  the state; the second, inside a host, splits every weight along
                                  whichever dimension the solver finds, and may gather it for use
                                  where that is faster. Of all tensor axes that divide a host, the
                                  fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import prod

from autopar.errors import AutoparError, MemoryBudgetError, MeshError
from autopar.inspect.why import tensor_bytes
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.text import format_bytes
from autopar.methods import (
    DataParallel,
    ParallelMethod,
    ShardingOptions,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from autopar.sharding.memory_budget import RESERVE_SHARE

Make = Callable[[ParallelMethod], ParallelPlan]
TITLES = {
    DataParallel: "data parallel",
    Zero2Parallel: "ZeRO-2",
    Zero3Parallel: "FSDP (ZeRO-3)",
}
MEGATRON = "Megatron"
_ARGUMENT = re.compile(r"\w+([.\[]|$)")


def baselines(
    plan: ParallelPlan, cluster: ClusterSpec, make: Make
) -> dict[str, ParallelPlan | str]:
    """By title, the plan, or why there is none. `plan`: one of the step; `make`: plans that step by
    a method."""
    budget = min(plan.memory_budget_bytes, cluster.spec.memory_bytes * (1 - RESERVE_SHARE))
    found: dict[str, ParallelPlan | str] = {}
    for method, title in TITLES.items():
        found[title] = _or_why(lambda method=method: _data_parallel(plan, method, budget, make))
    found[MEGATRON] = _or_why(lambda: _megatron(plan, cluster, budget, make))
    return found


def _or_why(make: Callable[[], ParallelPlan]) -> ParallelPlan | str:
    try:
        return make()
    except AutoparError as error:
        return str(error).splitlines()[0]


def _data_parallel(
    plan: ParallelPlan, method: type[DataParallel], budget: float, make: Make
) -> ParallelPlan:
    """The faster of the two ways to fit, with and without recomputation; where neither does, the
    step without micro-batches."""
    first = make(method())
    if first.estimated_peak_bytes <= budget or _held_bytes(first) > budget:
        return first
    numbers = _more_micro_batches(plan, first.num_devices)
    ways = [("none", numbers), ("all", chain((1,), _more_micro_batches(plan, first.num_devices)))]
    found = [_fewest(lambda n, r=remat: make(method(n, r)), tried, budget) for remat, tried in ways]
    fitting = [made for made in found if made is not None]
    return min(fitting, key=lambda made: made.estimated_step_s, default=first)


def _fewest(
    make: Callable[[int], ParallelPlan], numbers: Iterable[int], budget: float
) -> ParallelPlan | None:
    """The plan with the fewest micro-batches that fits."""
    for number in numbers:
        try:
            made = make(number)
        except AutoparError:  # a batch that cannot be cut, such as that of a BatchNorm
            return None
        if made.estimated_peak_bytes <= budget:
            return made
    return None


def _megatron(plan: ParallelPlan, cluster: ClusterSpec, budget: float, make: Make) -> ParallelPlan:
    per_host = cluster.devices_per_host
    sizes = [size for size in range(2, per_host + 1) if per_host % size == 0]
    if not sizes:
        raise MeshError("hosts have one device each, and Megatron's tensor axis stays in a host")
    plans: list[ParallelPlan] = []
    failures: list[AutoparError] = []
    for size in sizes:
        try:
            plans.append(_tensor_parallel(plan, (cluster.num_devices // size, size), budget, make))
        except AutoparError as error:
            failures.append(error)
    if not plans:
        raise failures[-1]  # of the largest tensor axis, which needs the least memory
    return min(plans, key=lambda made: made.estimated_step_s)


def _tensor_parallel(
    plan: ParallelPlan, shape: tuple[int, int], budget: float, make: Make
) -> ParallelPlan:
    """The fewest micro-batches that fit on a mesh of data × tensor."""
    state = [tensor for tensor in plan.inputs if tensor.role == "state"]
    state_bytes = sum(tensor_bytes(tensor) or 0 for tensor in state) / shape[1]
    if state_bytes > budget:
        raise MemoryBudgetError(
            f"split over {shape[1]} devices, the state takes {format_bytes(state_bytes)} of each, "
            f"and the budget is {format_bytes(budget)}"
        )
    arguments = [(path, _ARGUMENT.match(path)) for path in (tensor.path for tensor in state)]
    patterns = {path if m is None or not m[1] else m[0] + "*" for path, m in arguments}
    options = ShardingOptions(
        batch_axis="x",
        forbid_axes={pattern: "x" for pattern in patterns},
        allow_replicated_parameters=False,
        memory_budget_bytes=budget if plan.memory_budget_bytes == budget else None,
        host_memory="never",
    )
    numbers = _more_micro_batches(plan, shape[0])
    number: int | None = 1
    while True:
        try:
            return make(ShardParallel(shape, number, options))
        except MemoryBudgetError:
            number = next(numbers, None)
            if number is None:
                raise


def _held_bytes(plan: ParallelPlan) -> float:
    """Of the state, on each device of one mesh."""

    def parts(tensor: Tensor) -> int:
        axes = zip(plan.mesh_shape, tensor.layout, strict=True)
        return prod(size for size, dim in axes if dim >= 0)

    state = (tensor for tensor in plan.inputs if tensor.role == "state")
    return sum((tensor_bytes(tensor) or 0) / parts(tensor) for tensor in state)


def _more_micro_batches(plan: ParallelPlan, data: int) -> Iterator[int]:
    """2, 4, 8 …, as long as each of `data` devices has rows of every micro-batch."""
    rows = [t.shape[0] for t in plan.inputs if t.role == "batch" and t.shape]
    number = 2
    while rows and all(count % (number * data) == 0 for count in rows):
        yield number
        number *= 2
