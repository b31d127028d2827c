"""Which leaves are arrays, what they are called, what is state, batch and donated."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

from autopar.errors import ArgumentError, TraceError
from autopar.ir.traced_step import TracedStep
from autopar.tracer.flat_call import flatten_call
from autopar.tracer.trace_step import trace_step

BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}
PARAMS = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}


def loss_of(params: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def state_paths(step: TracedStep) -> set[str]:
    for index, out in step.state:
        assert step.avals[index].shape == step.out_avals[out].shape
    return {step.call.paths[i] for i, _ in step.state}


def batch_paths(step: TracedStep) -> set[str]:
    return {step.call.paths[i] for i in step.batch}


def donated_paths(step: TracedStep) -> set[str]:
    return {step.call.paths[i] for i in step.donated}


# -- pytrees


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))


@pytest.mark.ci
def test_linen_train_state() -> None:
    model = Net()
    params = model.init(jax.random.key(0), BATCH["x"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    step = trace_step(train_step, (state, BATCH))
    assert "state.params['Dense_0']['kernel']" in step.call.paths
    assert "state.opt_state[0].mu['Dense_1']['bias']" in step.call.paths
    everything = {p for p in step.call.paths if p.startswith("state")}
    assert state_paths(step) == donated_paths(step) == everything
    assert batch_paths(step) == {"batch['x']", "batch['y']"}
    assert "result[0].params['Dense_0']['kernel']" in step.out_paths
    assert step.out_paths[-1] == "result[1]"
    assert step.name == "train_step"
    new_state, _ = step.rebuild_output([np.zeros(a.shape) for a in step.out_avals])
    assert type(new_state) is type(state)
    assert new_state.apply_fn == model.apply


def test_nnx_state() -> None:
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)

    def train_step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    step = trace_step(train_step, (params, BATCH))
    assert len(step.state) == 2
    assert any("kernel" in path and path.startswith("params") for path in state_paths(step))
    assert donated_paths(step) == state_paths(step)


def test_nnx_graphdef_in_the_state_is_static() -> None:
    state = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    step = trace_step(lambda state, x: nnx.merge(*state)(x), (state, BATCH["x"]))
    assert step.out_avals[0].shape == (8, 2)


def test_equinox_module_with_functions_as_leaves() -> None:
    model = eqx.nn.MLP(4, 2, 8, 1, activation=jax.nn.gelu, key=jax.random.key(0))

    def train_step(model: Any, batch: Any) -> Any:
        @eqx.filter_value_and_grad
        def loss_fn(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = loss_fn(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    step = trace_step(train_step, (model, BATCH))
    assert step.call.static, "the activation functions"
    assert step.out_static
    assert "model.layers[0].weight" in state_paths(step)
    assert donated_paths(step) == {p for p in step.call.paths if p.startswith("model")}
    (rebuilt, batch), kwargs = step.call.rebuild(step.call.leaves)
    assert rebuilt.activation is model.activation
    assert batch is not BATCH
    assert kwargs == {}
    updated, _ = step.rebuild_output([np.zeros(a.shape) for a in step.out_avals])
    assert updated.activation is model.activation


def test_none_leaves_are_no_arrays() -> None:
    step = trace_step(
        lambda state, batch: ({"w": state["w"] + batch.sum(), "none": None}, None),
        ({"w": PARAMS["w"], "none": None}, BATCH["x"]),
    )
    assert step.call.paths == ("state['w']", "batch")
    result = step.rebuild_output([1.0])
    assert result == ({"w": 1.0, "none": None}, None)


def test_prng_keys() -> None:
    def step(key: Any, x: Any) -> Any:
        key, own = jax.random.split(key)
        return key, x * jax.random.normal(own, x.shape)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        traced = trace_step(step, (key, BATCH["x"]))
        assert traced.avals[0].dtype == key.dtype
        assert traced.donated == ()


def test_python_scalars_are_weak_and_numpy_scalars_are_not() -> None:
    args = (BATCH["x"], 2, 0.5, True, np.float32(1), np.float64(1))
    step = trace_step(lambda x, *scalars: [x * s for s in scalars], args)
    assert [a.weak_type for a in step.avals[1:]] == [True, True, False, False, False]
    assert [str(a.dtype) for a in step.avals[1:]] == [
        "int32",
        "float32",
        "bool",
        "float32",
        "float32",
    ]
    assert step.call.paths == ("x", *(f"args[{i}]" for i in range(1, 6)))


def test_keyword_arguments() -> None:
    def step(x: Any, *, scale: Any, mode: str = "no") -> Any:
        return x * scale["by"] if mode == "yes" else x

    traced = trace_step(step, (BATCH["x"],), {"scale": {"by": 2.0}, "mode": "yes"})
    assert traced.call.paths == ("x", "scale['by']")
    assert traced.program.equations[-1].name == "mul"
    args, kwargs = traced.call.rebuild(["a", "b"])
    assert args == ("a",)
    assert kwargs == {"scale": {"by": "b"}, "mode": "yes"}


def test_static_arguments() -> None:
    def step(n: int, x: Any, mode: str) -> Any:
        return x * n if mode == "yes" else x

    traced = trace_step(step, (3, BATCH["x"], "yes"), static_argnums=(0, 2))
    assert traced.call.paths == ("x",)
    args, _ = traced.call.rebuild(["x"])
    assert args == (3, "x", "yes")


def test_shapes_alone_will_do() -> None:
    struct = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    step = trace_step(lambda x: x * 2, (struct,))
    assert step.out_avals[0].dtype == jnp.bfloat16


def test_names_where_the_function_tells_none() -> None:
    call = flatten_call(max, (np.ones(2), {"a": np.ones(3)}), {})
    assert call.paths == ("args[0]", "args[1]['a']")


@pytest.mark.parametrize(
    ("kwargs", "args", "words"),
    [
        ({"static_argnums": (3,)}, (BATCH["x"],), "names argument 3, but the call gave 1"),
        ({"static_argnums": (1,)}, (BATCH["x"], []), "argument 1 is a list, which cannot be hash"),
        ({"donate_argnums": (2,)}, (BATCH["x"], 1), "names argument 2, but the call gave 2"),
        ({"donate_argnums": "all"}, (BATCH["x"], 1), "needs 'auto' or a tuple"),
        ({"batch_argnums": (2,)}, (BATCH["x"], 1), "args[2] (batch_argnums=(2,))"),
    ],
)
def test_impossible_positions(kwargs: Any, args: Any, words: str) -> None:
    with pytest.raises((ArgumentError, TraceError)) as error:
        trace_step(lambda x, *rest: x * 2, args, **kwargs)
    assert words in str(error.value)


def test_a_function_without_arrays() -> None:
    with pytest.raises(TraceError, match="none of its arguments holds an array"):
        trace_step(lambda x: jnp.ones(3), ("text",))
    with pytest.raises(TraceError, match="returns no array"):
        trace_step(lambda x: None, (BATCH["x"],))


def test_mutable_arrays_are_refused_by_their_line() -> None:
    def step(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros(8))
        total[...] += x.sum(1)
        return total[...]

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"test_trace_step.py:{line}.*jax.new_ref"):
        trace_step(step, (BATCH["x"],))


# -- state


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_state_and_loss() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        return {"params": sgd(state["params"], grads), "step": state["step"] + 1}, {"loss": loss}

    traced = trace_step(step, ({"params": PARAMS, "step": 0}, BATCH))
    expected = {"state['params']['w']", "state['params']['b']", "state['step']"}
    assert state_paths(traced) == donated_paths(traced) == expected
    assert batch_paths(traced) == {"batch['x']", "batch['y']"}


def test_params_and_optimizer_state_as_arguments_of_their_own() -> None:
    optimizer = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any, rng: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        noise = jax.random.normal(rng, ())
        return optax.apply_updates(params, updates), opt_state, loss + 0 * noise

    rng = jax.random.PRNGKey(0)
    traced = trace_step(step, (PARAMS, optimizer.init(PARAMS), BATCH, rng))
    paths = {p for p in traced.call.paths if not p.startswith(("batch", "rng"))}
    assert state_paths(traced) == donated_paths(traced) == paths
    assert batch_paths(traced) == {"batch['x']", "batch['y']"}, "the key is no batch"


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gradients_alone_are_no_state(decay: float) -> None:
    # With a penalty the gradient is made from the parameters elementwise, like an update.
    def loss_fn(params: Any, batch: Any) -> Any:
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return loss_of(params, batch) + decay * penalty

    traced = trace_step(jax.grad(loss_fn), (PARAMS, BATCH))
    assert traced.state == ()
    assert traced.donated == ()
    assert batch_paths(traced) == {"batch['x']", "batch['y']"}


def test_accumulated_gradients_are_no_state() -> None:
    def step(params: Any, batch: Any) -> Any:
        def add(total: Any, rows: Any) -> Any:
            grads = jax.grad(loss_of)(params, rows)
            return jax.tree.map(jnp.add, total, grads), None

        parts = jax.tree.map(lambda x: x.reshape(2, 4, -1), batch)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]

    traced = trace_step(step, (PARAMS, BATCH))
    assert traced.state == ()
    assert traced.donated == ()


def test_state_is_followed_through_loops_and_branches() -> None:
    def step(params: Any, batch: Any) -> Any:
        def once(params: Any, _: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params, batch)
            fine = jnp.isfinite(loss)
            return jax.lax.cond(fine, lambda: sgd(params, grads), lambda: params), loss

        return jax.lax.scan(once, params, None, length=2)

    traced = trace_step(step, (PARAMS, BATCH))
    assert state_paths(traced) == donated_paths(traced) == {"params['w']", "params['b']"}


def test_state_that_comes_back_untouched_is_not_donated() -> None:
    def evaluate(state: Any, batch: Any) -> Any:
        return state, loss_of(state, batch)

    traced = trace_step(evaluate, (PARAMS, BATCH))
    assert traced.donated == ()

    def train_bias(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda b: loss_of({**state, "b": b}, batch))(state["b"])
        return {"w": state["w"], "b": state["b"] - grads}

    traced = trace_step(train_bias, (PARAMS, BATCH))
    assert state_paths(traced) == {"state['w']", "state['b']"}
    assert donated_paths(traced) == {"state['b']"}


def test_without_a_gradient_nothing_is_donated() -> None:
    traced = trace_step(lambda x, y: x + y, (BATCH["x"], BATCH["x"]))
    assert traced.donated == ()


def test_donation_can_be_asked_for_and_refused() -> None:
    def step(params: Any, batch: Any) -> Any:
        return sgd(params, jax.grad(loss_of)(params, batch))

    assert trace_step(step, (PARAMS, BATCH), donate_argnums=()).donated == ()
    both = trace_step(step, (PARAMS, BATCH), donate_argnums=(0, 1))
    assert donated_paths(both) == set(both.call.paths)


def test_state_of_another_type_is_matched_by_its_paths() -> None:
    class State(NamedTuple):
        w: Any
        b: Any

    def step(state: State, batch: Any) -> Any:
        grads = jax.grad(lambda s: loss_of(s._asdict(), batch))(state)
        return {"new": sgd(state, grads), "extra": jnp.zeros((4, 2))}

    traced = trace_step(step, (State(**PARAMS), BATCH))
    assert state_paths(traced) == {"state.w", "state.b"}
    assert {traced.out_paths[o] for _, o in traced.state} == {"result['new'].w", "result['new'].b"}


# -- batch


def test_batch_by_position_name_and_default() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss_of)(params, {"x": x, "y": y})
        return sgd(params, grads)

    x, y = BATCH["x"], BATCH["y"]
    assert batch_paths(trace_step(step, (PARAMS, x, y))) == {"x", "y"}
    assert batch_paths(trace_step(step, (PARAMS, x, y), batch_argnums=(1,))) == {"x"}
    assert batch_paths(trace_step(step, (PARAMS, x, y), batch_argnums=(1, 2))) == {"x", "y"}
    assert batch_paths(trace_step(step, (PARAMS,), {"x": x, "y": y})) == {"x", "y"}
    by_name = trace_step(step, (PARAMS,), {"x": x, "y": y}, batch_argnums=(1, 2))
    assert batch_paths(by_name) == {"x", "y"}
    assert batch_paths(trace_step(lambda x: x * 2, (x,))) == set()


def test_batch_of_rows_alone() -> None:
    def step(params: Any, opt: Any, x: Any, y: Any, scale: Any) -> Any:
        grads = jax.grad(loss_of)(params, {"x": x, "y": y})
        return sgd(params, grads), jax.tree.map(lambda o: o * 0.9, opt), scale.sum()

    args = (PARAMS, PARAMS, BATCH["x"], BATCH["y"], np.ones(3, np.float32))
    assert batch_paths(trace_step(step, args)) == {"x", "y"}


def test_batch_argument_without_arrays() -> None:
    with pytest.raises(TraceError, match=r"text \(batch_argnums=\(2,\)\)"):
        trace_step(
            lambda params, batch, text: loss_of(params, batch),
            (PARAMS, BATCH, "text"),
            batch_argnums=(2,),
        )


def test_what_is_donated_and_comes_back_is_state_however_it_is_updated() -> None:
    def decode(cache, params, token):
        rows = {name: rows.at[token].set(params[name]) for name, rows in cache.items()}
        return rows, sum(r.sum() for r in rows.values())

    cache = {"k": jnp.zeros((4, 3)), "v": jnp.zeros((4, 3))}
    args = (cache, {"k": jnp.ones(3), "v": jnp.ones(3)}, jnp.int32(2))
    found = trace_step(decode, args, donate_argnums=(0,), batch_argnums=())
    assert state_paths(found) == donated_paths(found) == {"cache['k']", "cache['v']"}
    assert trace_step(decode, args, donate_argnums=(), batch_argnums=()).state == ()
    # What does not come back leaf for leaf is no state, donated or not.
    half = trace_step(
        lambda *own: decode(*own)[0]["k"], args, donate_argnums=(0,), batch_argnums=()
    )
    assert half.state == ()


def test_errors_of_jax_name_the_arguments() -> None:
    def branching(state, batch):
        return state if batch["x"].sum() > 0 else batch["y"]

    batch = {"x": jnp.ones(4), "y": jnp.ones(4)}
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        trace_step(branching, (jnp.ones(4), batch))
    text = str(caught.value)
    assert "the value of the argument batch['x']." in text and "batch['y']" not in text
    assert "leaves" not in text and "autopar/tracer" not in text
    line = branching.__code__.co_firstlineno
    assert f"branching at {__file__}:{line}" in text
