"""The arrays of a plan that a path or pattern names: from text to `PlanArray`s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from autopar.errors import ArgumentError
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.sharding.layout_constraints import matching_paths


class ArrayKind(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    NAMED_VALUE = "named value"


@dataclass(frozen=True)
class PlanArray:
    """`index`: its position among the plan's arrays of its kind."""

    kind: ArrayKind
    index: int
    tensor: Tensor


def plan_arrays(plan: ParallelPlan) -> list[PlanArray]:
    kinds = (
        (ArrayKind.INPUT, plan.inputs),
        (ArrayKind.OUTPUT, plan.outputs),
        (ArrayKind.NAMED_VALUE, plan.named),
    )
    return [
        PlanArray(kind, index, tensor)
        for kind, tensors in kinds
        for index, tensor in enumerate(tensors)
    ]


def arrays_at(plan: ParallelPlan, path: str) -> list[PlanArray]:
    """The arrays with exactly this path."""
    return [array for array in plan_arrays(plan) if array.tensor.path == path]


def find_arrays(plan: ParallelPlan, path: str) -> list[PlanArray]:
    """The arrays with this path or, if there are none, one per path that matches the pattern."""
    if exact := arrays_at(plan, path):
        return exact
    arrays = plan_arrays(plan)
    matches = matching_paths([array.tensor.path for array in arrays], path)
    if not matches:
        raise ArgumentError(f"explain({path!r}): {no_match_text(plan, path)}")
    return first_of_each_path([arrays[i] for i in matches])


def first_of_each_path(arrays: Sequence[PlanArray]) -> list[PlanArray]:
    """An updated state is an input and an output of one path: the input stands for both."""
    first: dict[str, PlanArray] = {}
    for array in arrays:
        first.setdefault(array.tensor.path, array)
    return list(first.values())


def no_match_text(plan: ParallelPlan, pattern: str) -> str:
    paths = list(dict.fromkeys(array.tensor.path for array in plan_arrays(plan)))
    near = get_close_matches(pattern, paths, n=5, cutoff=0.3) or paths[:5]
    return (
        f"matches no input, output or named value of {plan.name}. Closest paths: "
        f"{', '.join(near)}. In patterns, '*' matches any text and '?' any one character."
    )
