"""Methods are data: what they hold, how they compare, and what they refuse to hold."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.errors import ArgumentError
from autopar.ir.mesh import LogicalMesh
from autopar.methods import (
    CreateStateParallel,
    DataParallel,
    FollowParallel,
    ManualParallel,
    ParallelMethod,
    ShardingOptions,
    ShardParallel,
)

METHODS: dict[str, Callable[..., Any]] = {
    "ShardParallel": ShardParallel,
    "DataParallel": DataParallel,
    "ManualParallel": lambda **options: ManualParallel((8,), ("x",), None, **options),
}
TRAIN_STEP = parallelize(lambda state, batch: (state + batch.mean(), batch.sum()))
# Methods that take over what another function was planned with.
FOLLOWING: dict[str, Callable[[], Any]] = {
    "CreateStateParallel": lambda: CreateStateParallel(TRAIN_STEP, 1.0),
    "FollowParallel": lambda: FollowParallel(TRAIN_STEP),
}


def refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_every_method_is_tested_here() -> None:
    assert {method.__name__ for method in get_args(ParallelMethod)} == {*METHODS, *FOLLOWING}


def test_defaults() -> None:
    assert ShardParallel() == ShardParallel("auto", 1, ShardingOptions())
    assert ShardingOptions() == ShardingOptions("highs", 60.0, True)
    assert DataParallel() == DataParallel(num_micro_batches=1)
    assert ManualParallel((8,), ("x",), P()).out_specs is None


def test_methods_that_follow_are_frozen() -> None:
    for make in FOLLOWING.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            make().train_step = None


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_methods_are_frozen(make: Callable[..., Any]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().num_micro_batches = 2


def test_methods_of_equal_contents_are_equal_and_hashable() -> None:
    assert len({ShardParallel((2, 4)), ShardParallel((2, 4)), ShardParallel((8,))}) == 2
    assert len({DataParallel(), DataParallel()}) == 1


@pytest.mark.parametrize("shape", ["auto", (8,), (2, 4), (1, 1), [2, 4], LogicalMesh((2, 4))])
def test_mesh_shape(shape: Any) -> None:
    assert ShardParallel(shape).mesh_shape == shape


@pytest.mark.parametrize(
    "shape", ["big", 8, -1, None, (), (0,), (2, -4), (2.0, 4), (2, 2, 2), (True, 8), ("2", "4")]
)
def test_mesh_shape_that_is_none(shape: Any) -> None:
    parts = (f"mesh_shape={shape!r}", "one or two whole numbers ≥ 1", "(2, 4)")
    refused(lambda: ShardParallel(shape), "ShardParallel", *parts)
    refused(lambda: ManualParallel(shape, ("x", "y"), None), "ManualParallel", *parts)


@pytest.mark.parametrize("shape", ["auto", LogicalMesh((2, 4))])
def test_manual_parallel_needs_a_plain_shape(shape: Any) -> None:
    parts = (f"mesh_shape={shape!r}", "needs a shape such as (2, 4)")
    refused(lambda: ManualParallel(shape, ("x", "y"), None), *parts)


@pytest.mark.parametrize(
    "names", ["xy", 3, None, ("x",), ("x", "x"), ("x", "y", "z"), (1, 2), ("x", ["y"])]
)
def test_axis_names_that_are_none(names: Any) -> None:
    parts = (f"axis_names={names!r}", "a different name for each axis", "('x', 'y')")
    refused(lambda: ManualParallel((2, 4), names, None), *parts)


@pytest.mark.parametrize("count", [0, -1, 1.0, "auto", None, True])
@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_that_are_no_count(name: str, count: Any) -> None:
    parts = (name, f"num_micro_batches={count!r}", "whole number ≥ 1")
    refused(lambda: METHODS[name](num_micro_batches=count), *parts)


@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_are_taken(name):
    assert METHODS[name](num_micro_batches=4).num_micro_batches == 4


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, "1 min", None, True])
def test_time_limit_that_is_none(seconds: Any) -> None:
    parts = (f"solver_time_limit_s={seconds!r}", "number of seconds > 0")
    refused(lambda: ShardingOptions(solver_time_limit_s=seconds), *parts)


@pytest.mark.parametrize(
    ("options", "needed"),
    [({"solver": 3}, "name of a solver"), ({"fold_layers": "yes"}, "True or False")],
)
def test_options_of_a_wrong_type(options: dict[str, Any], needed: str) -> None:
    ((name, value),) = options.items()
    refused(lambda: ShardingOptions(**options), f"{name}={value!r}", needed)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("pins", {"w": "x"}, "path patterns to jax.sharding.PartitionSpec"),
        ("pins", {3: P("x")}, "path patterns"),
        ("pins", {"": P("x")}, "path patterns"),
        ("pins", [("w", P("x"))], "a dict"),
        ("forbid_axes", {"w": 0}, "axis names"),
        ("forbid_axes", {"w": ()}, "axis names"),
        ("forbid_axes", {"w": ("x", "x")}, "axis names"),
        ("forbid_axes", "x", "a dict"),
        ("batch_axis", 0, "name of a mesh axis"),
        ("batch_axis", ("x", 1), "name of a mesh axis"),
        ("batch_axis", "", "name of a mesh axis"),
        ("allow_reduce_scatter", None, "True or False"),
        ("allow_all_to_all", 1, "True or False"),
        ("allow_replicated_parameters", "no", "True or False"),
        ("memory_budget_bytes", 0, "bytes > 0, or None"),
        ("memory_budget_bytes", "8 GiB", "bytes > 0, or None"),
        ("memory_budget_bytes", math.nan, "bytes > 0, or None"),
        ("remat", "some", "'none', 'auto' or 'all'"),
        ("remat", True, "'none', 'auto' or 'all'"),
    ],
)
def test_steering_that_is_none(name: str, value: Any, needed: str) -> None:
    refused(lambda: ShardingOptions(**{name: value}), f"ShardingOptions({name}={value!r})", needed)


def test_steering_is_copied_and_its_methods_can_be_compared() -> None:
    pins = {"w": P("x")}
    options = ShardingOptions(pins=pins, forbid_axes={"v": "x"}, batch_axis=["x", "y"])
    pins["v"] = P()
    assert options.pins == {"w": P("x")}
    assert options.forbid_axes == {"v": ("x",)}
    assert options.batch_axis == ("x", "y")
    same = ShardingOptions(pins={"w": P("x")}, forbid_axes={"v": ("x",)}, batch_axis=("x", "y"))
    assert len({ShardParallel(options=options), ShardParallel(options=same)}) == 1
    assert options != ShardingOptions(pins=pins)


@pytest.mark.parametrize("options", [None, "fast", {"solver": "highs"}])
def test_what_is_no_options(options: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"ShardParallel(options={options!r})")):
        ShardParallel(options=options)
