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
        limit = self.solver_time_limit_s
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise ArgumentError(
                f"ShardingOptions(solver_time_limit_s={limit!r}): needs a number of seconds > 0."
            )
        if not isinstance(self.solver, str):
            raise ArgumentError(
                f"ShardingOptions(solver={self.solver!r}): needs the name of a solver, "
                "such as 'highs'."
            )
        if not isinstance(self.fold_layers, bool):
            raise ArgumentError(
                f"ShardingOptions(fold_layers={self.fold_layers!r}): needs True or False."
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_micro_batches(method: Any) -> None:
    given = method.num_micro_batches
    if not _is_count(given):
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
    if not valid or not all(map(_is_count, shape)):
        raise ArgumentError(
            f"{type(method).__name__}(mesh_shape={shape!r}): needs one or two whole numbers ≥ 1 "
            "such as (8,) or (2, 4), or 'auto'."
        )


def _check_options(method: Any) -> None:
    if not isinstance(method.options, ShardingOptions):
        raise ArgumentError(
            f"{type(method).__name__}(options={method.options!r}): needs an "
            "autopar.ShardingOptions."
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
        _check_options(self)


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
        shape, names = self.mesh_shape, self.axis_names
        fits = isinstance(shape, (tuple, list)) and isinstance(names, (tuple, list))
        fits = fits and all(isinstance(name, str) for name in names)
        if not fits or not len(shape) == len(names) == len(set(names)):
            raise ArgumentError(
                f"ManualParallel(mesh_shape={shape!r}, axis_names={names!r}): needs a shape such "
                "as (2, 4) and a tuple with a different name for each axis, such as ('x', 'y')."
            )


ParallelMethod = ShardParallel | DataParallel | ManualParallel
