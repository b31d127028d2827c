"""Steps on the devices of this process: placement, donation, caching and what users decorate."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar._jax import Primitive
from autopar.errors import CompileError
from autopar.runtime import local
from autopar.runtime.local import LocalExecutable

MESH = autopar.LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))
METHOD = autopar.ShardParallel(MESH)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype(np.float32)


def params() -> dict[str, np.ndarray]:
    return {"w": np.full((16, 32), 0.1, np.float32), "b": np.zeros(32, np.float32)}


def train(state: Any, batch: Any) -> Any:
    def loss_fn(state: Any) -> Any:
        return jnp.mean(jnp.tanh(batch @ state["w"] + state["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def parallel_train(**options: Any) -> autopar.ParallelFunction:
    return autopar.parallelize(train, method=METHOD, **options)


@pytest.fixture(autouse=True)
def forget_devices() -> Iterator[None]:
    yield
    autopar.shutdown()


COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: COMPILED.append(event) if "backend_compile" in event else None
)


def assert_planned(leaves: list[Any], planned: list[Any]) -> None:
    for leaf, sharding in zip(leaves, planned, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# -- placement


def test_outputs_stay_as_planned_and_the_next_call_moves_nothing() -> None:
    step = parallel_train()
    COMPILED.clear()
    state, loss = step(params(), X)
    executable = step.last_executable
    executable.hlo_text()
    assert len(COMPILED) == 1
    assert_planned(jax.tree.leaves((state, loss)), executable.output_shardings)
    specs = [t.layout for t in executable.plan.inputs if t.role == "state"]
    assert any(max(layout) >= 0 for layout in specs), "something is split"
    batch = jax.device_put(X, executable.input_shardings[-1])
    COMPILED.clear()
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state, loss = step(state, batch)
    assert step.last_executable is executable
    assert COMPILED == []


def test_host_arrays_are_placed_as_planned() -> None:
    step = parallel_train()
    want, _ = jax.jit(train)(params(), X)
    for _ in range(2):  # the first call and the cached one
        state, _ = step(params(), X)
        np.testing.assert_allclose(state["w"], want["w"], rtol=1e-5)
    executable = step.last_executable
    placed = executable.place([*jax.tree.leaves(params()), X])
    assert_planned(placed, executable.input_shardings)


def test_arrays_committed_elsewhere_are_moved() -> None:
    step = parallel_train()
    step(params(), X)
    other = Mesh(np.array(jax.devices()).reshape(8), ("z",))
    elsewhere = [
        jax.device_put(X, jax.devices()[3]),
        jax.device_put(X, NamedSharding(other, P(None, "z"))),
        jax.device_put(X, NamedSharding(other, P("z"))),
    ]
    want, want_loss = jax.jit(train)(params(), X)
    for batch in elsewhere:
        state, loss = step(jax.device_put(params(), jax.devices()[5]), batch)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        np.testing.assert_allclose(state["w"], want["w"], rtol=1e-5)
        assert not batch.is_deleted()
    assert len(step._entries) == 1


def test_errors_of_the_step_are_the_users() -> None:
    step = autopar.parallelize(lambda x, y: x @ y, method=METHOD)
    with pytest.raises(TypeError, match="dot_general"):
        step(X, X)


# -- donation


def test_updated_state_is_donated_and_the_batch_is_not() -> None:
    step = parallel_train()
    state, _ = step(params(), X)
    batch = jax.device_put(X, step.last_executable.input_shardings[-1])
    new_state, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not batch.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new_state))


def test_donation_can_be_refused() -> None:
    step = parallel_train(donate_argnums=())
    state, _ = step(params(), X)
    step(state, X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_gradients_and_evaluations_keep_their_inputs() -> None:
    def loss_fn(state: Any, batch: Any) -> Any:
        return jnp.mean((batch @ state["w"] + state["b"]) ** 2) + jnp.sum(state["w"] ** 2)

    for fn in (jax.grad(loss_fn), lambda state, batch: (state, loss_fn(state, batch))):
        step = autopar.parallelize(fn, method=METHOD)
        state = jax.tree.map(jnp.asarray, params())
        step(state, X)
        *placed, batch = step.last_executable.place([*jax.tree.leaves(state), X])
        step(dict(zip(("b", "w"), placed, strict=True)), batch)
        assert not any(leaf.is_deleted() for leaf in (*jax.tree.leaves(state), *placed, batch))


def averaged_train(state: Any, batch: Any) -> Any:
    new, loss = train(state["params"], batch)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], new)
    return {"params": new, "average": average}, loss


@pytest.mark.parametrize("where", ["host", "one device", "as planned"])
def test_one_array_in_two_places_of_the_state(where: str) -> None:
    """XLA would end the process if one buffer were donated twice."""
    step = autopar.parallelize(averaged_train, method=METHOD)
    first = params()
    if where == "one device":
        first = jax.tree.map(jnp.asarray, first)
    if where == "as planned":
        state, _ = step({"params": first, "average": params()}, X)
        first = state["params"]
    want, _ = jax.jit(averaged_train)(
        jax.tree.map(np.asarray, {"params": first, "average": first}), X
    )
    state, _ = step({"params": first, "average": first}, X)
    np.testing.assert_allclose(state["average"]["w"], want["average"]["w"], rtol=1e-5)
    state, _ = step(state, X)


def test_an_array_that_is_state_and_batch_is_not_lost() -> None:
    def fn(state: Any, batch: Any) -> Any:
        return state - jax.grad(lambda s: jnp.sum(jnp.sin(s) * batch))(state)

    step = autopar.parallelize(fn, method=METHOD)
    x = jax.device_put(X, jax.devices()[0])
    np.testing.assert_allclose(step(x, x), X - np.cos(X) * X, rtol=1e-5, atol=1e-6)
    placed, _ = step.last_executable.place([X, X])
    np.testing.assert_allclose(step(placed, placed), X - np.cos(X) * X, rtol=1e-5, atol=1e-6)


# -- types


def test_other_shapes_get_another_plan_and_the_first_stays_cached() -> None:
    step = parallel_train(donate_argnums=())
    state = params()
    step(state, X)
    first = step.last_executable
    step(state, np.concatenate([X, X]))
    second = step.last_executable
    assert second is not first
    assert second.plan.inputs[-1].shape == (16, 16)
    COMPILED.clear()
    for _ in range(2):
        step(state, X)
        assert step.last_executable is first
        step(state, np.concatenate([X, X]))
        assert step.last_executable is second
    assert COMPILED == []


def test_weak_types_are_types() -> None:
    step = autopar.parallelize(lambda x, s: x.astype(jnp.bfloat16) * s, method=METHOD)
    weak = step(X, 2.0)
    assert weak.dtype == jnp.bfloat16
    strong = step(X, np.float32(2.0))
    assert strong.dtype == jnp.float32
    assert step(X, 3.0).dtype == jnp.bfloat16
    assert len(next(iter(step._entries.values()))) == 2


def test_results_have_the_types_of_jit() -> None:
    def fn(x: Any, n: Any) -> Any:
        return x * n, n + 1, 1.0, 3, True, jnp.bfloat16(1), x.sum().astype(int)

    step = autopar.parallelize(fn, method=METHOD)
    for ours, theirs in zip(step(X, 2), jax.jit(fn)(X, 2), strict=True):
        assert (ours.dtype, ours.weak_type, ours.shape) == (
            theirs.dtype,
            theirs.weak_type,
            theirs.shape,
        )


@pytest.mark.ci
def test_keys_as_state() -> None:
    def fn(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        new, loss = train(state["params"], batch + jax.random.normal(own, batch.shape))
        return {"key": key, "params": new}, loss

    step = autopar.parallelize(fn, method=METHOD)
    state = {"key": jax.random.key(0), "params": params()}
    want = {"key": jax.random.key(0), "params": params()}
    for _ in range(2):
        state, loss = step(state, X)
        want, want_loss = jax.jit(fn)(want, X)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(want["key"])).all()


# -- ways to wrap and call


def test_decorators_with_and_without_arguments() -> None:
    @autopar.parallelize
    def plain(x: Any, y: Any) -> Any:
        """Adds."""
        return x + y

    @autopar.parallelize(method=METHOD)
    def with_method(x: Any, y: Any) -> Any:
        return x + y

    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Adds."
    for step in (plain, with_method):
        np.testing.assert_allclose(step(X, X), 2 * X)


def test_methods_of_a_class() -> None:
    class Trainer:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        @autopar.parallelize(method=METHOD)
        def step(self, x: Any, y: Any) -> Any:
            return x * self.rate + y

    fast, slow = Trainer(2.0), Trainer(0.5)
    for _ in range(2):
        np.testing.assert_allclose(fast.step(X, X), 3 * X)
        np.testing.assert_allclose(slow.step(X, X), 1.5 * X)
    assert fast.step.last_executable is not slow.step.last_executable
    assert isinstance(Trainer.step, autopar.ParallelFunction)


def test_partial_functions_and_callable_objects() -> None:
    def scaled(scale: float, x: Any, y: Any) -> Any:
        return x * scale + y

    class Model:
        def __call__(self, x: Any, y: Any) -> Any:
            return x * 3 + y

    step = autopar.parallelize(functools.partial(scaled, 3.0), method=METHOD)
    np.testing.assert_allclose(step(X, X), 4 * X)
    np.testing.assert_allclose(autopar.parallelize(Model(), method=METHOD)(X, X), 4 * X)


def test_keyword_and_static_arguments() -> None:
    def fn(x: Any, power: int, *, shift: Any, mode: str = "plus") -> Any:
        return x**power + shift if mode == "plus" else x**power - shift

    step = autopar.parallelize(fn, method=METHOD, static_argnums=1, batch_argnums=0)
    for power in (2, 3, 2):
        np.testing.assert_allclose(step(X, power, shift=1.0), X**power + 1, rtol=1e-5)
    first = step.last_executable
    np.testing.assert_allclose(step(X, 2, shift=1.0, mode="minus"), X**2 - 1, rtol=1e-5)
    assert step.last_executable is not first
    np.testing.assert_allclose(step(X, 2, shift=5.0), X**2 + 5, rtol=1e-5)
    assert step.last_executable is first


@pytest.mark.ci
def test_modules_with_functions_as_leaves() -> None:
    def fn(model: Any, batch: Any) -> Any:
        loss_fn = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))
        loss, grads = loss_fn(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    step = autopar.parallelize(fn, method=METHOD)
    for activation in (jax.nn.gelu, jax.nn.tanh, jax.nn.gelu):
        model = eqx.nn.MLP(16, 8, 32, 1, activation=activation, key=jax.random.key(0))
        want = jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, model)
        for _ in range(2):
            model, loss = step(model, X)
            want, want_loss = eqx.filter_jit(fn)(want, X)
            np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        assert model.activation is activation
    assert sum(len(entries) for entries in step._entries.values()) == 2


def test_one_device() -> None:
    autopar.init(devices=jax.devices()[:1])
    step = autopar.parallelize(train)
    state, loss = params(), None
    for _ in range(2):
        state, loss = step(state, X)
    assert step.last_executable.plan.num_devices == 1
    assert state["w"].sharding.device_set == {jax.devices()[0]}
    want, want_loss = jax.jit(train)(jax.jit(train)(params(), X)[0], X)
    np.testing.assert_allclose(state["w"], want["w"], rtol=1e-6)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert step.last_executable.collectives() == ()


def test_another_set_of_devices_is_another_program() -> None:
    step = autopar.parallelize(train, method=autopar.DataParallel(), donate_argnums=())
    for devices in (jax.devices()[:4], jax.devices()[4:], jax.devices()[:4]):
        autopar.init(devices=devices)
        _, loss = step(params(), X)
        assert loss.sharding.device_set == set(devices)
    assert len(step._entries) == 2


def test_a_step_inside_of_another_program() -> None:
    step = parallel_train()
    _, loss = step(params(), X)
    (_, same), half = jax.jit(lambda s, x: (step(s, x), step(s, x[:4])[1]))(params(), X)
    np.testing.assert_allclose(same, loss, rtol=1e-6)
    np.testing.assert_allclose(half, jax.jit(train)(params(), X[:4])[1], rtol=1e-5)
    assert jax.eval_shape(step, params(), X)[0]["w"].shape == (16, 32)
    slope = jax.grad(lambda x: step(params(), x)[1])(X)
    np.testing.assert_allclose(slope, jax.grad(lambda x: train(params(), x)[1])(X), rtol=1e-4)


# -- looking into it


def test_what_an_executable_tells(tmp_path: Path) -> None:
    step = parallel_train()
    step(params(), X)
    executable = step.last_executable
    assert "HloModule" in executable.hlo_text()
    assert any(c.kind == "all-reduce" for c in executable.collectives())
    assert executable.memory_bytes() > 0
    executable.dump_debug_info(tmp_path / "dump")
    figures = json.loads((tmp_path / "dump" / "figures.json").read_text())
    assert figures["memory_bytes"] == executable.memory_bytes()
    assert autopar.ParallelPlan.load(tmp_path / "dump" / "plan.json") == executable.plan
    with pytest.raises(autopar.ArgumentError, match="is a file"):
        executable.dump_debug_info(tmp_path / "dump" / "plan.txt")


def test_what_jax_cannot_lower_is_a_compile_error_with_the_users_names() -> None:
    """No platform has a lowering of this operator."""
    primitive = Primitive("unknown")
    primitive.def_abstract_eval(lambda x: x)
    step = autopar.parallelize(lambda w, x: primitive.bind(x @ w), method=METHOD)
    with pytest.raises(CompileError, match=r"could not lower <lambda>.*'unknown'") as raised:
        step(jnp.ones((8, 8)), jnp.ones((16, 8)))
    assert "leaves[" not in str(raised.value)


@pytest.mark.parametrize("kind", [TypeError, ValueError, NotImplementedError])
def test_what_fails_in_lowering_is_no_change_of_the_arguments(kind: type[Exception]) -> None:
    """Only the call itself may object to the types of arguments."""

    def refuse(ctx: Any, x: Any) -> Any:
        raise kind("no such shapes")

    primitive = Primitive("refused")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, refuse)
    step = autopar.parallelize(lambda w, x: primitive.bind(x @ w), method=METHOD)
    for _ in range(2):  # nothing is kept of the first
        with pytest.raises(CompileError, match=r"could not lower <lambda>.*no such shapes"):
            step(jnp.ones((8, 8)), jnp.ones((16, 8)))


def test_what_a_run_makes_is_found_to_have_room_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = parallel_train()
    state, _ = step(params(), X)
    executable = step.last_executable
    assert isinstance(executable, LocalExecutable)
    stats = executable.compiled.memory_analysis()
    assert stats is not None
    asked = []
    monkeypatch.setattr(local, "occupy", lambda sizes, devices: asked.append((sizes, devices)))
    leaves = jax.tree.leaves((state, X))
    placed = executable.place_with_room(leaves)
    ((sizes, devices),) = asked
    held = executable.memory_bytes() - stats.argument_size_in_bytes
    assert sum(sizes) == held > 0 and len(devices) == 8
    assert placed[0] is leaves[0] and [x.shape for x in placed] == [x.shape for x in leaves]


def test_too_little_room_is_an_error_of_jax_and_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = parallel_train()
    state, _ = step(params(), X)
    executable = step.last_executable
    assert isinstance(executable, LocalExecutable)
    monkeypatch.setattr(local, "bytes_beside_arguments", lambda program: (2**20, 2**50))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        executable.place_with_room(jax.tree.leaves((state, X)))
    step(state, X)
