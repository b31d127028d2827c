"""Every bad input a user can make, and what autopar says to it.

A message names the argument (by its path, where it is inside of one), what was given and what was
needed or is to be done; the type is autopar's own. What the user's function raises is the user's.
What the constructors of methods refuse is in `test_methods.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import (
    ArgumentError,
    AutoparError,
    CompileError,
    MeshError,
    PlanError,
    SolverError,
    SpecError,
    TraceError,
    shortened,
)
from autopar.methods import DataParallel, ManualParallel, ShardingOptions, ShardParallel


def step(state, batch):
    def loss_of(params):
        return ((batch["x"] @ params["w"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def double(x):
    return 2 * x


STATE, BATCH = {"w": array(8, 16)}, {"x": array(32, 8)}


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    yield
    autopar.shutdown()


def plan_with(
    method: Any = None, fn: Callable[..., Any] = step, args: Any = (STATE, BATCH), **options: Any
) -> autopar.ParallelPlan:
    return autopar.parallelize(fn, method=method, **options).plan(*args)


def check(error: type[AutoparError], parts: tuple[str, ...], call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert message.endswith((".", ")")), message


def cases(*rows: tuple[Any, ...]) -> Any:
    return pytest.mark.parametrize(
        ("error", "parts", "call"),
        [pytest.param(error, parts, call, id=name) for name, error, parts, call in rows],
    )


# -- meshes and methods


@cases(
    (
        "larger than the devices",
        MeshError,
        ("mesh_shape=(4, 4)", "needs 16 devices", "has 8", "smaller mesh"),
        lambda: plan_with(ShardParallel((4, 4))),
    ),
    (
        "larger than the devices, with links",
        MeshError,
        ("mesh_shape=(4, 4)", "needs 16 devices", "there are 8", "smaller mesh"),
        lambda: plan_with(ShardParallel(autopar.LogicalMesh((4, 4)))),
    ),
    (
        "manual, larger than the devices",
        MeshError,
        ("mesh_shape=(16,)", "needs 16 devices", "has 8"),
        lambda: plan_with(ManualParallel((16,), ("x",), None)),
    ),
    (
        "an axis that nothing divides",
        MeshError,
        ("mesh_shape=(7,)", "'x' of size 7", "divides no dimension", "pad"),
        lambda: plan_with(ShardParallel((7,))),
    ),
    (
        "one axis of two that nothing divides",
        MeshError,
        ("mesh_shape=(2, 3)", "'y' of size 3", "divides no dimension"),
        lambda: plan_with(ShardParallel((2, 3))),
    ),
    (
        "data parallel, uneven batch",
        MeshError,
        ("batch['x']", "batch dimension of 30", "8 devices", "multiple of 8"),
        lambda: plan_with(DataParallel(), args=(STATE, {"x": array(30, 8)})),
    ),
    (
        "data parallel, no rows",
        MeshError,
        ("batch['x']", "batch dimension of 0 has no rows for", "8 devices", "multiple of 8"),
        lambda: plan_with(DataParallel(), args=(STATE, {"x": array(0, 8)})),
    ),
    (
        "data parallel, nothing that the devices divide",
        MeshError,
        ("batch['x']", "batch dimension of 9", "6 devices of Zero3Parallel", "multiple of 6"),
        lambda: autopar.plan(
            *(step, {"w": array(8, 16)}, {"x": array(9, 8)}),
            cluster=autopar.ClusterSpec(1, 6),
            method=autopar.Zero3Parallel(),
        ),
    ),
    (
        "data parallel, no batch",
        ArgumentError,
        ("DataParallel", "double", "batch_argnums"),
        lambda: plan_with(DataParallel(), double, (array(8),)),
    ),
)
def test_mesh_that_does_not_fit(error, parts, call) -> None:
    check(error, parts, call)


@pytest.mark.parametrize("method", [b"zero", 3, dict, autopar.LogicalMesh((8,)), {}])
def test_method_of_a_wrong_type(method: Any) -> None:
    parts = (f"parallelize(method={shortened(method)})", "ShardParallel", "ParallelPlan")
    check(ArgumentError, parts, lambda: autopar.parallelize(step, method=method))
    parts = (f"method={shortened(method)}", "ShardParallel", "ParallelPlan")
    cluster = autopar.ClusterSpec(1, 8, "cpu")
    if not isinstance(method, autopar.LogicalMesh):
        check(
            ArgumentError,
            parts,
            lambda: autopar.plan(step, STATE, BATCH, cluster=cluster, method=method),
        )


@cases(
    (
        "unknown solver",
        ArgumentError,
        ("solver='magic'", "no such solver", "'highs'"),
        lambda: plan_with(ShardParallel((8,), options=ShardingOptions(solver="magic"))),
    ),
    (
        "solver that is not installed",
        SolverError,
        ("solver='CHOCO_CMD'", "not installed", "'highs'"),
        lambda: plan_with(ShardParallel((8,), options=ShardingOptions(solver="CHOCO_CMD"))),
    ),
    (
        "options of solve_sharding of a wrong type",
        ArgumentError,
        ("solve_sharding(options={})", "ShardingOptions"),
        lambda: autopar.solve_sharding(
            step,
            STATE,
            BATCH,
            mesh=autopar.LogicalMesh((8,)),
            options={},  # type: ignore[arg-type]
        ),
    ),
    (
        "mesh of solve_sharding of a wrong type",
        ArgumentError,
        ("solve_sharding(mesh=(2, 4))", "LogicalMesh"),
        lambda: autopar.solve_sharding(step, STATE, BATCH, mesh=(2, 4)),  # type: ignore[arg-type]
    ),
    (
        "cluster of a wrong type",
        ArgumentError,
        ("plan(cluster='h100-sxm')", "ClusterSpec"),
        lambda: autopar.plan(step, STATE, BATCH, cluster="h100-sxm"),  # type: ignore[arg-type]
    ),
    (
        "unknown preset",
        ArgumentError,
        ("device='h900'", "not a preset", "'h100-sxm'", "DeviceSpec"),
        lambda: autopar.ClusterSpec(1, 8, "h900"),
    ),
    (
        "cluster without hosts",
        ArgumentError,
        ("num_hosts=0", "≥ 1"),
        lambda: autopar.ClusterSpec(0, 8),
    ),
)
def test_options(error, parts, call) -> None:
    check(error, parts, call)


# -- specs


def manual(in_specs: Any, out_specs: Any = None, **shapes: Any) -> Callable[[], Any]:
    method = ManualParallel((2, 4), ("data", "model"), in_specs, out_specs)
    state = {"w": shapes.get("w", array(8, 16))}
    batch = {"x": shapes.get("x", array(32, 8))}
    return lambda: plan_with(method, args=(state, batch))


def a_sharding() -> NamedSharding:
    return NamedSharding(jax.sharding.Mesh(jax.devices(), ("data",)), P())


@cases(
    (
        "unknown axis",
        SpecError,
        ("state['w']", "'rows'", "('data', 'model')"),
        manual(({"w": P("rows")}, None)),
    ),
    (
        "unknown axis, for a whole argument",
        SpecError,
        ("batch['x']", "'rows'", "('data', 'model')"),
        manual((None, P("rows"))),
    ),
    (
        "axis used twice",
        SpecError,
        ("state['w']", "'data' twice"),
        manual(({"w": P("data", "data")}, None)),
    ),
    (
        "axis used twice on one dimension",
        SpecError,
        ("state['w']", "'data' twice"),
        manual(({"w": P(("data", "data"))}, None)),
    ),
    (
        "axes out of order",
        SpecError,
        ("state['w']", "('model', 'data')", "mesh order ('data', 'model')", "Reorder"),
        manual(({"w": P(("model", "data"))}, None)),
    ),
    (
        "too many entries",
        SpecError,
        ("state['w']", "3 entries", "2 dimensions (8, 16)"),
        manual(({"w": P("data", None, "model")}, None)),
    ),
    (
        "does not divide",
        SpecError,
        ("state['w']", "(8, 18)", "'model': 4", "pad"),
        manual(({"w": P(None, "model")}, None), w=array(8, 18)),
    ),
    (
        "does not divide by two axes",
        SpecError,
        ("batch['x']", "(12, 8)", "'data': 2, 'model': 4"),
        manual((None, {"x": P(("data", "model"))}), x=array(12, 8)),
    ),
    (
        "other keys",
        SpecError,
        ("in_specs[0]", "arguments", "'v'", "'w'", "prefix"),
        manual(({"v": P()}, None)),
    ),
    ("too few arguments", SpecError, ("in_specs does not match", "2 != 1"), manual((P(),))),
    ("too many arguments", SpecError, ("in_specs does not", "2 != 3"), manual((None,) * 3)),
    (
        "a name for a spec",
        SpecError,
        ("in_specs[0]['w'] is 'data', of type str", "PartitionSpec"),
        manual(({"w": "data"}, None)),
    ),
    (
        "a tuple for a spec",
        SpecError,
        ("in_specs[0]['w'] is ('data', None), of type tuple", "PartitionSpec"),
        manual(({"w": ("data", None)}, None)),
    ),
    (
        "a sharding for a spec",
        SpecError,
        ("in_specs[1] is NamedSharding", "PartitionSpec", "None"),
        lambda: manual((None, a_sharding()))(),
    ),
    (
        "out: unknown axis",
        SpecError,
        ("result[0]['w']", "'rows'"),
        manual(None, ({"w": P("rows")}, None)),
    ),
    (
        "out: a scalar that is to be split",
        SpecError,
        ("result[1]", "1 entries", "0 dimensions"),
        manual(None, (None, P("data"))),
    ),
    (
        "out: other structure",
        SpecError,
        ("out_specs does not match", "result", "2 != 1"),
        manual(None, ({"w": P()},)),
    ),
    (
        "out: no spec",
        SpecError,
        ("out_specs[1] is 0, of type int", "PartitionSpec"),
        manual(None, (None, 0)),
    ),
)
def test_specs(error, parts, call) -> None:
    check(error, parts, call)


# -- the function and its arguments


def returns(result: Any) -> Callable[..., Any]:
    def fn(state, batch):
        return result

    return fn


def texts(*words: str) -> np.ndarray:
    return np.array(words)


class Unknown:
    def __repr__(self) -> str:
        return "<" + 100 * "?" + ">"


@cases(
    (
        "text for the batch",
        TraceError,
        ("batch:", "no array", "str: 'text'", "leading batch dimension", "static_argnums"),
        lambda: plan_with(args=(STATE, "text")),
    ),
    (
        "text in the batch",
        TraceError,
        ("batch:", "no array", "str: 'text'"),
        lambda: plan_with(args=(STATE, {"x": "text"})),
    ),
    (
        "an object for the batch",
        TraceError,
        ("batch:", "Unknown: <???", "..."),
        lambda: plan_with(args=(STATE, Unknown())),
    ),
    (
        "text for the batch, by name",
        TraceError,
        ("batch:", "no array", "'text'"),
        lambda: autopar.parallelize(step).plan(STATE, batch="text"),
    ),
    (
        "text for a batch elsewhere",
        TraceError,
        ("mode:", "no array", "'train'", "batch_argnums"),
        lambda: autopar.parallelize(
            lambda mode, state, batch: step(state, batch), batch_argnums=0
        ).plan("train", STATE, BATCH),
    ),
    (
        "an array of texts",
        TraceError,
        ("batch['x']", "ndarray", "<U3", "numbers"),
        lambda: plan_with(args=(STATE, {"x": texts("one", "two")})),
    ),
    (
        "an array of objects",
        TraceError,
        ("state['w']", "object", "numbers"),
        lambda: plan_with(args=({"w": np.array([object()])}, BATCH)),
    ),
    (
        "no arrays at all",
        TraceError,
        ("fn:", "none of its arguments holds an array", "Pass the train state"),
        lambda: plan_with(fn=returns(1), args=("state", len)),
    ),
    (
        "no arguments",
        TraceError,
        ("none of its arguments", "closing over"),
        lambda: plan_with(fn=lambda: jnp.ones(8), args=()),
    ),
    ("returns nothing", TraceError, ("fn:", "no array"), lambda: plan_with(fn=returns(None))),
    ("returns text", TraceError, ("fn:", "no array"), lambda: plan_with(fn=returns("done"))),
    (
        "parallelize nothing",
        ArgumentError,
        ("parallelize(3)", "needs a function", "keyword"),
        lambda: autopar.parallelize(3),  # type: ignore[arg-type]
    ),
    (
        "method in place of the function",
        ArgumentError,
        ("parallelize(DataParallel", "needs a function", "method="),
        lambda: autopar.parallelize(DataParallel()),  # type: ignore[arg-type]
    ),
    (
        "plan nothing",
        ArgumentError,
        ("first argument must be the train step", "first argument"),
        lambda: autopar.plan(3, STATE, cluster=autopar.ClusterSpec(1, 8)),  # type: ignore[arg-type]
    ),
    (
        "solve nothing",
        ArgumentError,
        ("first argument must be the train step", "first argument"),
        lambda: autopar.solve_sharding({}, mesh=autopar.LogicalMesh((8,))),  # type: ignore[arg-type]
    ),
)
def test_function_and_arguments(error, parts, call) -> None:
    check(error, parts, call)


def test_what_is_no_batch_is_let_through() -> None:
    """Text and optimizers beside a batch, and an optimizer where the batch usually is."""
    plan_with(fn=lambda state, mode, batch: step(state, batch), args=(STATE, "train", BATCH))
    plan_with(fn=lambda state, update: (update(state["w"]), 1.0), args=(STATE, jnp.tanh))
    plan_with(fn=lambda state, batch: (state["w"] + 1, 1.0), args=(STATE, None))


@cases(
    (
        "static, out of range",
        ArgumentError,
        ("static_argnums=(5,)", "argument 5", "2 positional", "0 to 1"),
        lambda: plan_with(static_argnums=5),
    ),
    (
        "static, unhashable",
        ArgumentError,
        ("static_argnums=(2,)", "argument 2 is a list", "hashable"),
        lambda: plan_with(
            fn=lambda state, batch, sizes: step(state, batch),
            args=(STATE, BATCH, [1, 2]),
            static_argnums=2,
        ),
    ),
    (
        "donated, out of range",
        ArgumentError,
        ("donate_argnums=(5,)", "argument 5", "2 positional"),
        lambda: plan_with(donate_argnums=(5,)),
    ),
    (
        "donated, by a word",
        ArgumentError,
        ("donate_argnums='all'", "'auto' or argument positions"),
        lambda: autopar.parallelize(step, donate_argnums="all"),
    ),
    (
        "batch, out of range",
        TraceError,
        ("batch_argnums=(5,)", "step", "not given", "set batch_argnums"),
        lambda: plan_with(batch_argnums=5),
    ),
)
def test_positions(error, parts, call) -> None:
    check(error, parts, call)


@pytest.mark.parametrize(
    "call",
    [
        lambda state: autopar.ShardingOptions(pins=state),
        lambda state: autopar.ShardParallel(mesh_shape=state),
        lambda state: autopar.PipeshardParallel(2, stages=state),
        lambda state: autopar.parallelize(state),
        lambda state: autopar.parallelize(lambda s, b: s, batch_argnums=state),
    ],
    ids=["pins", "mesh", "stages", "function", "positions"],
)
def test_a_state_in_the_wrong_place_does_not_fill_pages(call: Any) -> None:
    state = {f"layer_{i}": jnp.zeros((16, 16)) for i in range(100)}
    texts = []
    for given in (state, {"w": 0}):
        with pytest.raises(autopar.ArgumentError) as caught:
            call(given)
        texts.append(str(caught.value))
    long, short = texts
    assert "{'layer_0': Array(" in long and len(long) < 1500
    assert long.endswith(short.partition("{'w': 0}")[2])  # what is needed


@pytest.mark.parametrize("given", [-1, (0, -1), 1.5, None, "state", (True,), [[0]]])
@pytest.mark.parametrize("name", ["static_argnums", "donate_argnums", "batch_argnums"])
def test_positions_of_a_wrong_type(name: str, given: Any) -> None:
    parts = (f"{name}={given!r}", "positions, whole numbers ≥ 0")
    check(ArgumentError, parts, lambda: autopar.parallelize(step, **{name: given}))


def test_state_that_was_donated_is_named() -> None:
    parallel = autopar.parallelize(step, method=ShardParallel((8,)))
    state, batch = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((32, 8))}
    new_state, _ = parallel(state, batch)
    parts = ("state['w']", "deleted", "the state that the step returned", "donate_argnums=()")
    for _ in range(2):
        check(ArgumentError, parts, lambda: parallel(state, batch))
    again = autopar.parallelize(step, method=ShardParallel((8,)))
    check(ArgumentError, parts, lambda: again(state, batch))
    parallel(new_state, batch)


# -- devices


@cases(
    (
        "unknown cluster",
        ArgumentError,
        ("init(cluster='slurm')", "'local' or 'ray'"),
        lambda: autopar.init("slurm"),
    ),
    (
        "no devices",
        ArgumentError,
        ("init(devices=[])", "one or more JAX devices", "jax.devices()"),
        lambda: autopar.init(devices=[]),
    ),
    (
        "a count for devices",
        ArgumentError,
        ("init(devices=4)", "jax.devices()[:4]"),
        lambda: autopar.init(devices=4),  # type: ignore[arg-type]
    ),
    (
        "names for devices",
        ArgumentError,
        ("init(devices=['cpu:0'])", "JAX devices"),
        lambda: autopar.init(devices=["cpu:0"]),
    ),
    (
        "a device twice",
        ArgumentError,
        ("init(devices=…)", str(jax.devices()[0]), "twice"),
        lambda: autopar.init(devices=[*jax.devices(), jax.devices()[0]]),
    ),
)
def test_init(error, parts, call) -> None:
    check(error, parts, call)
    assert len(autopar.api.local_devices()) == 8  # nothing was changed


def test_too_few_devices_for_a_plan() -> None:
    plan = plan_with(ShardParallel((2, 4)))
    few = jax.devices()[:4]
    parts = ("compile(devices=…)", "(2, 4)", "needs 8 devices", "got 4", "smaller mesh")
    call = lambda: autopar.compile(step, STATE, BATCH, plan=plan, devices=few)  # noqa: E731
    check(MeshError, parts, call)
    autopar.init(devices=few)
    state, batch = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((32, 8))}
    parts = ("(2, 4)", "needs 8 devices", "got 4", "smaller mesh")
    check(MeshError, parts, lambda: autopar.parallelize(step, method=plan)(state, batch))


@cases(
    (
        "devices",
        ArgumentError,
        ("compile(devices=8)", "JAX devices"),
        lambda: autopar.compile(
            step,
            STATE,
            BATCH,
            plan=plan_with(ShardParallel((8,))),
            devices=8,  # type: ignore[arg-type]
        ),
    ),
    (
        "plan",
        ArgumentError,
        ("compile(plan='p.json')", "ParallelPlan.load"),
        lambda: autopar.compile(step, STATE, BATCH, plan="p.json"),  # type: ignore[arg-type]
    ),
)
def test_compile_arguments_of_a_wrong_type(error, parts, call) -> None:
    check(error, parts, call)


def test_a_folder_for_debug_info_that_is_a_file(tmp_path: Path) -> None:
    parallel = autopar.parallelize(lambda x: x * 2, method=ShardParallel((8,)))
    parallel(jnp.ones(8))
    path = tmp_path / "taken"
    path.write_text("")
    parts = ("dump_debug_info", "taken", "this is a file")
    check(ArgumentError, parts, lambda: parallel.last_executable.dump_debug_info(path))


# -- plans


def test_plan_for_other_shapes() -> None:
    plan = plan_with(ShardParallel((8,)))
    parts = ("batch['x']", "float32[32, 8]", "float32[64, 8]", "Plan again")
    check(PlanError, parts, lambda: plan_with(plan, args=(STATE, {"x": array(64, 8)})))
    parts = ("state['w']", "float32[8, 16]", "bfloat16[8, 16]")
    other = {"w": jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)}
    check(PlanError, parts, lambda: plan_with(plan, args=(other, BATCH)))


def test_plan_for_another_function_of_the_same_shapes() -> None:
    def other_step(state, batch):
        state, loss = step(state, batch)
        return state, loss * 2

    plan = plan_with(ShardParallel((8,)))
    parts = ("plan for step", "does not fit other_step", "shapes agree", "Plan again")
    check(PlanError, parts, lambda: plan_with(plan, other_step))


def test_plan_for_other_arguments() -> None:
    plan = plan_with(ShardParallel((8,)))
    parts = ("plan for step", "2 input arrays", "has 3", "Plan again")
    check(PlanError, parts, lambda: plan_with(plan, args=(STATE, {**BATCH, "y": array(32)})))


def test_plan_file_that_was_tampered_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_with(ShardParallel((8,))).save(path)
    document = json.loads(path.read_text())
    document["plan"]["estimated_step_s"] *= 2
    path.write_text(json.dumps(document))
    parts = ("plan.json", "checksum", "altered", "Plan again")
    check(PlanError, parts, lambda: autopar.ParallelPlan.load(path))


def test_plan_file_that_is_not_there(tmp_path: Path) -> None:
    parts = ("load", "none.json", "cannot be read")
    path = str(tmp_path / "none.json")
    with pytest.raises(PlanError) as caught:
        autopar.ParallelPlan.load(path)
    assert all(part in str(caught.value) for part in parts)  # and ends with what the system says


# -- the user's own errors


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError("mine"), TypeError("mine"), ValueError("mine")])
def test_exceptions_of_the_function_are_the_users(error: Exception) -> None:
    def failing(state, batch):
        raise error

    parallel = autopar.parallelize(failing)
    for call in (parallel, parallel.plan):
        with pytest.raises(type(error)) as caught:
            call({"w": jnp.ones((8, 16))}, {"x": jnp.ones((32, 8))})
        assert caught.value is error
        assert not [note for note in getattr(error, "__notes__", []) if "autopar" in note]
        assert error.__cause__ is None


def test_errors_of_jax_name_the_users_path() -> None:
    def branching(state, batch):
        return state if batch["x"].sum() > 0 else batch

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        plan_with(fn=branching)
    assert "the argument batch['x']" in str(caught.value)


def test_a_wrong_call_fails_as_it_does_without_autopar() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        plan_with(args=(STATE,))
    with pytest.raises(TypeError, match="contracting dimensions"):
        plan_with(args=(STATE, {"x": array(32, 9)}))


# -- the types themselves


def test_error_types() -> None:
    """Each is of autopar and of the built-in kind that callers may already catch."""
    kinds = {
        ArgumentError: ValueError,
        TraceError: TypeError,
        MeshError: ValueError,
        SpecError: ValueError,
        SolverError: RuntimeError,
        PlanError: ValueError,
        CompileError: RuntimeError,
    }
    for error, builtin in kinds.items():
        assert issubclass(error, AutoparError) and issubclass(error, builtin)
        assert getattr(autopar, error.__name__) is error
