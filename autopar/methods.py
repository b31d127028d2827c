"""Parallel methods: what the user may ask for. Data only; the compiler reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.errors import ArgumentError
from autopar.ir.mesh import LogicalMesh


@dataclass(frozen=True)
class ShardingOptions:
    """Options of the sharding solver.

    solver:                 "highs", or the name of any solver that PuLP finds installed.
    solver_time_limit_s:    after this the best sharding so far is used, with its proven gap.
    fold_layers:            treat equal layers alike (the solve time then does not grow with depth).
    """

    solver: str = "highs"
    solver_time_limit_s: float = 60.0
    fold_layers: bool = True

    def __post_init__(self) -> None:
        if not self.solver_time_limit_s > 0:
            raise ArgumentError(
                f"ShardingOptions(solver_time_limit_s={self.solver_time_limit_s!r}): needs a "
                "number of seconds > 0."
            )


def _check_micro_batches(method: Any) -> None:
    given = method.num_micro_batches
    if not isinstance(given, int) or given < 1:
        raise ArgumentError(
            f"{type(method).__name__}(num_micro_batches={given!r}): needs a whole number ≥ 1."
        )
    if given > 1:
        raise ArgumentError(
            f"{type(method).__name__}(num_micro_batches={given}): gradient accumulation is not in "
            "this version of autopar; use 1, or split the batch in your train step."
        )


def _check_mesh_shape(method: Any) -> None:
    shape = method.mesh_shape
    if shape == "auto" or isinstance(shape, LogicalMesh):
        return
    valid = isinstance(shape, (tuple, list)) and 1 <= len(shape) <= 2
    if not valid or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise ArgumentError(
            f"{type(method).__name__}(mesh_shape={shape!r}): needs one or two whole numbers ≥ 1 "
            "such as (8,) or (2, 4), or 'auto'."
        )


@dataclass(frozen=True)
class ShardParallel:
    """Intra-operator parallelism: every operator sharded on one mesh by the solver.

    mesh_shape: devices along one or two axes; "auto" tries every factorisation of the devices and
    takes the best predicted; a `LogicalMesh` gives shape and link costs together.
    """

    mesh_shape: tuple[int, ...] | str | LogicalMesh = "auto"
    num_micro_batches: int = 1
    options: ShardingOptions = field(default_factory=ShardingOptions)

    def __post_init__(self) -> None:
        _check_mesh_shape(self)
        _check_micro_batches(self)


@dataclass(frozen=True)
class DataParallel:
    """The batch split over all devices, everything else replicated, gradients all-reduced."""

    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        _check_micro_batches(self)


@dataclass(frozen=True, eq=False)
class ManualParallel:
    """Inputs (and outputs) lie as the user says; the solver shards everything between.

    in_specs, out_specs: pytrees of `PartitionSpec` like the arguments and the result, or prefixes
    of them; `None` where the solver may choose.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    in_specs: Any
    out_specs: Any = None
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        _check_mesh_shape(self)
        _check_micro_batches(self)
        if isinstance(self.mesh_shape, str) or len(self.axis_names) != len(self.mesh_shape):
            raise ArgumentError(
                f"ManualParallel(mesh_shape={self.mesh_shape!r}, axis_names={self.axis_names!r}): "
                "needs a shape and one name per axis."
            )


ParallelMethod = ShardParallel | DataParallel | ManualParallel
