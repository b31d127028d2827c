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
from autopar.cli import arguments
from autopar.errors import ArgumentError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.schedule import SCHEDULES
from autopar.methods import (
    METHOD_NAMES,
    AutoLayers,
    AutoParallel,
    AutoStages,
    CreateStateParallel,
    DataParallel,
    FollowParallel,
    ManualLayers,
    ManualParallel,
    ManualStages,
    ParallelMethod,
    PipeshardParallel,
    ShardingOptions,
    ShardParallel,
    UniformStages,
    Zero2Parallel,
    Zero3Parallel,
    as_method,
)

METHODS: dict[str, Callable[..., Any]] = {
    "ShardParallel": ShardParallel,
    "DataParallel": DataParallel,
    "ManualParallel": lambda **options: ManualParallel((8,), ("x",), None, **options),
}
# Methods whose number of micro-batches may be searched.
PIPELINES: dict[str, Callable[..., Any]] = {
    "PipeshardParallel": lambda num_micro_batches=4, **options: PipeshardParallel(
        num_micro_batches, **options
    ),
    "AutoParallel": AutoParallel,
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
    assert {method.__name__ for method in get_args(ParallelMethod)} == {
        *METHODS,
        *PIPELINES,
        *FOLLOWING,
    }


def test_defaults() -> None:
    assert ShardParallel() == ShardParallel("auto", 1, ShardingOptions())
    assert ShardingOptions() == ShardingOptions("highs", 60.0, True)
    assert DataParallel() == DataParallel(num_micro_batches=1)
    assert ManualParallel((8,), ("x",), P()).out_specs is None
    assert AutoParallel() == AutoParallel("auto", ShardingOptions())
    pipeline = PipeshardParallel(4)
    assert pipeline == PipeshardParallel(
        4, AutoLayers("auto"), AutoStages("tiling"), "1f1b", ShardingOptions()
    )
    assert ManualStages([[0]], [(1, 4)]).mesh_shapes == (None,)


def test_methods_that_follow_are_frozen() -> None:
    for make in FOLLOWING.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            make().train_step = None


@pytest.mark.parametrize("make", [*METHODS.values(), *PIPELINES.values()])
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


@pytest.mark.parametrize("count", [0, -1, 1.0, "many", None, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_micro_batches_that_are_neither_a_count_nor_auto(name: str, count: Any) -> None:
    parts = (name, f"num_micro_batches={count!r}", "whole number ≥ 1, or 'auto'")
    refused(lambda: PIPELINES[name](num_micro_batches=count), *parts)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("count", [1, 16, "auto"])
def test_micro_batches_that_may_be_searched(name: str, count: Any) -> None:
    assert PIPELINES[name](num_micro_batches=count).num_micro_batches == count


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


@pytest.mark.parametrize("remat", ["auto", True, None])
def test_data_parallelism_recomputes_all_layers_or_none(remat: Any) -> None:
    refused(
        lambda: Zero3Parallel(remat=remat), f"Zero3Parallel(remat={remat!r})", "'none' or 'all'"
    )
    assert Zero2Parallel(2, "all") != Zero2Parallel(2)


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


# -- pipelines


def test_stages_given_as_lists_become_tuples_that_can_be_compared() -> None:
    given = ManualStages([[0, 1], [2]], [[1, 4], (1, 4)], [[2, 2], None])
    assert given == ManualStages(((0, 1), (2,)), ((1, 4), (1, 4)), ((2, 2), None))
    assert given.layer_ids == ((0, 1), (2,))
    assert given.submeshes == ((1, 4), (1, 4))
    assert given.mesh_shapes == ((2, 2), None)
    methods = {PipeshardParallel(2, ManualLayers(), given, "gpipe") for _ in range(2)}
    assert len(methods) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_taken(schedule: str) -> None:
    assert PipeshardParallel(2, AutoLayers(4), UniformStages(2), schedule).schedule == schedule


@pytest.mark.parametrize("given", ["2f2b", None, 1])
def test_a_schedule_that_is_unknown_lists_the_known(given: Any) -> None:
    refused(
        lambda: PipeshardParallel(2, schedule=given),
        f"PipeshardParallel(schedule={given!r})",
        *map(repr, SCHEDULES),
    )


@pytest.mark.parametrize(
    ("part", "name", "value", "needed"),
    [
        (AutoLayers, "num_layers", 0, "a whole number ≥ 1, or 'auto'"),
        (AutoLayers, "num_layers", "some", "a whole number ≥ 1, or 'auto'"),
        (AutoLayers, "num_layers", 2.0, "a whole number ≥ 1, or 'auto'"),
        (AutoStages, "submeshes", "any", "'tiling' or 'all'"),
        (UniformStages, "num_stages", 0, "a whole number ≥ 1"),
        (UniformStages, "num_stages", "auto", "a whole number ≥ 1"),
    ],
)
def test_parts_of_a_pipeline_that_are_none(part: Any, name: str, value: Any, needed: str) -> None:
    refused(lambda: part(value), f"{part.__name__}({name}={value!r})", needed)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("layers", 4, "AutoLayers(…) or ManualLayers()"),
        ("layers", AutoLayers, "AutoLayers(…) or ManualLayers()"),
        ("stages", 4, "AutoStages(…), UniformStages(…) or ManualStages(…)"),
        ("stages", "auto", "AutoStages(…), UniformStages(…) or ManualStages(…)"),
        ("options", None, "autopar.ShardingOptions"),
    ],
)
def test_a_pipeline_of_wrong_parts(name: str, value: Any, needed: str) -> None:
    refused(
        lambda: PipeshardParallel(2, **{name: value}),
        f"PipeshardParallel({name}={value!r})",
        needed,
    )


@pytest.mark.parametrize(
    ("given", "name", "needed"),
    [
        (([], []), "layer_ids", "the layers of each stage"),
        (([0, 1], [(1, 4)]), "layer_ids", "such as [[0, 1], [2, 3]]"),
        (([[0], []], [(1, 4), (1, 4)]), "layer_ids", "the layers of each stage"),
        (([[0, -1]], [(1, 4)]), "layer_ids", "the layers of each stage"),
        (([[1, 2]], [(1, 4)]), "layer_ids", "in order, none left out"),
        (([[0], [2]], [(1, 4), (1, 4)]), "layer_ids", "none left out"),
        (([[0, 1], [1, 2]], [(1, 4), (1, 4)]), "layer_ids", "none given twice"),
        (([[1], [0]], [(1, 4), (1, 4)]), "layer_ids", "in order"),
        (([[0]], [4]), "submeshes", "(hosts, devices per host)"),
        (([[0]], [(1, 2, 2)]), "submeshes", "(hosts, devices per host)"),
        (([[0]], [(0, 4)]), "submeshes", "(hosts, devices per host)"),
        (([[0], [1]], [(1, 4)]), "submeshes", "each of the 2 stages"),
        (([[0]], [(1, 4)], [4]), "mesh_shapes", "one or two axes"),
        (([[0]], [(1, 8)], [(2, 2, 2)]), "mesh_shapes", "one or two axes"),
        (([[0]], [(1, 4)], [(2, 2), (4,)]), "mesh_shapes", "each of the 1 stages"),
        (([[0]], [(1, 4)], [(2, 4)]), "mesh_shapes", "4 devices in the mesh of stage 0"),
    ],
)
def test_manual_stages_that_are_none(given: Any, name: str, needed: str) -> None:
    refused(lambda: ManualStages(*given), f"ManualStages({name}=", needed)


@pytest.mark.parametrize("seconds", [None, float("inf"), 0.5, 60])
def test_planning_time(seconds: float | None) -> None:
    assert ShardingOptions(planning_time_s=seconds).planning_time_s == seconds


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), True, "60"])
def test_planning_time_that_is_none(seconds: Any) -> None:
    with pytest.raises(ArgumentError, match=r"planning_time_s=.*seconds > 0, or None"):
        ShardingOptions(planning_time_s=seconds)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        (None, None),
        (DataParallel(2), DataParallel(2)),
        (DataParallel, DataParallel()),
        (Zero3Parallel, Zero3Parallel()),
        (AutoParallel, AutoParallel()),
        ("data", DataParallel()),
        ("zero2", Zero2Parallel()),
        ("zero3", Zero3Parallel()),
        ("shard", ShardParallel()),
        ("auto", AutoParallel()),
        ("pipeline", PipeshardParallel("auto")),
    ],
)
def test_methods_by_class_and_by_name(given, method) -> None:
    found = as_method("parallelize", given)
    assert found == method and type(found) is type(method)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("zero4", "unknown method .did you mean '"),
        ("fsdp", "choose from 'auto', 'shard', 'data'"),
        (PipeshardParallel, r"this is the class, .* autopar.PipeshardParallel\(8\)"),
        (ManualParallel, r"this is the class, .* autopar.ManualParallel\("),
        (ShardingOptions(), r"AutoParallel\(options="),
        (dict, "needs a method such as"),
        (3, r"parallelize\(method=3\): needs a method such as"),
    ],
)
def test_what_is_no_method(given, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        as_method("parallelize", given)


def test_the_command_line_has_the_same_names() -> None:
    assert tuple(METHOD_NAMES) == arguments.METHODS
