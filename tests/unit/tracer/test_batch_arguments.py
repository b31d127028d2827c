"""Which arguments are found to be the batch, beside others that happen to have as many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import TraceError
from autopar.tracer.trace_step import trace_step

D = 8
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {"w": floats(D, D), "b": floats(D)}


def predict(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"] + params["b"])


def distance(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((predict(params, x) - y) ** 2)


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A train step with the arguments of a loss."""

    def step(params: Any, *rest: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value

    return step


def embedded(params: Any, ids: Any, table: Any) -> Any:
    return jnp.mean(predict(params, table[ids]) ** 2)


def positions(params: Any, x: Any, table: Any, y: Any) -> Any:
    return distance(params, x + table, y)


def masked(params: Any, x: Any, mask: Any) -> Any:
    h = x @ params["w"]
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", h, h), -1e9)
    return jnp.mean(jax.nn.softmax(scores) @ h)


def distilled(params: Any, teacher: Any, x: Any) -> Any:
    return distance(params, x, predict(teacher, x))


def contrastive(params: Any, images: Any, texts: Any) -> Any:
    scores = (images @ params["w"]) @ (texts @ params["w"]).T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def noisy(params: Any, x: Any, y: Any, key: Any) -> Any:
    return distance(params, x + jax.random.normal(key, x.shape), y)


def weighted(params: Any, x: Any, labels: Any, by_class: Any) -> Any:
    scores = jax.nn.log_softmax(x @ params["w"])
    return -jnp.mean(scores * jax.nn.one_hot(labels, D) * by_class)


def recurrent(params: Any, x: Any, y: Any) -> Any:
    last, _ = jax.lax.scan(lambda h, _: (predict(params, h), None), x, None, length=3)
    return jnp.mean((last - y) ** 2)


def in_parts(params: Any, x: Any, rest: Any) -> Any:
    return distance(params, x, rest["y"]) + rest["scale"] * rest["table"].sum()


SQUARE = floats(D, D)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], set[int]]] = {
    # the loss, its arguments after the parameters, and which of them are the batch
    "labels": (distance, (floats(16, D), floats(16, D)), {1, 2}),
    "as many rows as features": (distance, (SQUARE, SQUARE), {1, 2}),
    "one row": (distance, (floats(1, D), floats(1, D)), {1, 2}),
    "a table that is indexed": (embedded, (np.arange(16), floats(16, D)), {1}),
    "positions": (positions, (floats(16, 16, D), floats(16, D), floats(16, 16, D)), {1, 3}),
    "a mask": (masked, (floats(D, D, D), np.ones((D, D), bool)), {1}),
    "a teacher": (distilled, (PARAMS, floats(16, D)), {2}),
    "a teacher, square": (distilled, (PARAMS, SQUARE), {2}),
    "pairs": (contrastive, (floats(16, D), floats(16, D)), {1, 2}),
    "a raw key": (noisy, (floats(2, D), floats(2, D), jax.random.PRNGKey(0)), {1, 2}),
    "a key": (noisy, (floats(2, D), floats(2, D), jax.random.key(0)), {1, 2}),
    "weights of classes": (weighted, (SQUARE, np.arange(D), floats(D)), {1, 2}),
    "a loop": (recurrent, (SQUARE, SQUARE), {1, 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_found(name: str) -> None:
    loss, rest, expected = CASES[name]
    traced = trace_step(step_of(loss), (PARAMS, *rest))
    assert {traced.call.argument[i] for i in traced.batch} == expected


def test_an_argument_of_uneven_rows_gives_those_that_go_along() -> None:
    rest = {"y": floats(16, D), "table": floats(5, 2), "scale": 1.0}
    traced = trace_step(step_of(in_parts), (PARAMS, floats(16, D), rest))
    assert [traced.call.paths[i] for i in traced.batch] == ["args[1]", "args[2]['y']"]


def test_without_state_the_first_argument_is_none() -> None:
    traced = trace_step(distance, (PARAMS, SQUARE, SQUARE))
    assert {traced.call.argument[i] for i in traced.batch} == {1, 2}
    assert trace_step(jnp.sin, (SQUARE,)).batch == ()


def test_positions_win() -> None:
    args = (PARAMS, SQUARE, SQUARE)
    for given in ((), (1,), (2,), (1, 2)):
        traced = trace_step(step_of(distance), args, batch_argnums=given)
        assert {traced.call.argument[i] for i in traced.batch} == set(given)


@pytest.mark.parametrize(
    "name", ["labels", "a table that is indexed", "positions", "a teacher, square"]
)
def test_micro_batches_equal_the_whole_batch(name: str) -> None:
    loss, rest, _ = CASES[name]
    check_results(step_of(loss), *rest)


def check_results(step: Callable[..., Any], *rest: Any) -> None:
    """Two micro-batches give what `jax.jit` gives."""
    method = autopar.ShardParallel((4,), num_micro_batches=2)
    got = autopar.parallelize(step, method=method, donate_argnums=())(PARAMS, *rest)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        jax.jit(step)(PARAMS, *rest),
    )


def test_the_plan_and_the_error_name_the_batch() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        return step_of(distance)(params, x, y)

    args = (PARAMS, floats(16, D), floats(16, D))
    method = autopar.ShardParallel((4,), num_micro_batches=2)
    plan = autopar.parallelize(step, method=method).plan(*args)
    assert "  batch     x, y\n" in plan.explain(detail="full")
    with pytest.raises(TraceError, match="incompatible shapes") as raised:
        autopar.parallelize(step, method=method, batch_argnums=1).plan(*args)
    text = str(raised.value)
    assert "8 of the batch's 16 rows" in text and "The batch is x;" in text
    assert "test_batch_arguments.py" in text and isinstance(raised.value.__cause__, TypeError)


def test_positions_are_taken_as_they_are() -> None:
    """Even those of the default: its signature says `(1,)`, and only the default looks further."""
    step, args = step_of(distance), (PARAMS, floats(16, D), floats(16, D))
    found = autopar.parallelize(step).plan(*args)
    given = autopar.parallelize(step, batch_argnums=(1,)).plan(*args)
    batches = [[one.path for one in plan.inputs if one.role == "batch"] for plan in (found, given)]
    assert [len(paths) for paths in batches] == [2, 1]


def test_a_batch_that_returns_as_it_came_is_no_state() -> None:
    """It may be cut into micro-batches. Arguments that are frozen stay state beside a batch."""
    train = step_of(distance)

    def step(params: Any, batch: Any) -> Any:
        params, loss = train(params, batch["x"], batch["y"])
        return params, loss, batch

    batch = {"x": floats(16, D), "y": floats(16, D)}
    check_results(step, batch)
    traced = trace_step(step, (PARAMS, batch))
    assert [traced.call.paths[i] for i in traced.batch] == ["batch['x']", "batch['y']"]
    assert not set(traced.batch).intersection(i for i, _ in traced.state)

    def frozen(params: Any, first: Any, x: Any) -> Any:
        params, loss = train(params, x @ first["w"] + first["b"], x)
        return params, first, loss

    traced = trace_step(frozen, (PARAMS, PARAMS, floats(16, D)))
    assert [traced.call.paths[i] for i in traced.batch] == ["x"]
    assert len(traced.state) == 4


def scaled(params: Any, batch: Any) -> Any:
    return jax.tree.map(lambda a: 2 * a, batch)


def adversarial(params: Any, batch: Any) -> Any:
    slope = jax.grad(lambda x: distance(params, x, batch["y"]))(batch["x"])
    return {**batch, "x": batch["x"] + 0.1 * jnp.sign(slope)}


@pytest.mark.parametrize("changed", [scaled, adversarial])
def test_a_batch_that_returns_changed_is_no_state(changed: Callable[..., Any]) -> None:
    """So it is not donated, and micro-batches find it."""

    def step(params: Any, batch: Any) -> Any:
        new, loss = step_of(distance)(params, batch["x"], batch["y"])
        return new, loss, changed(params, batch)

    batch = {"x": floats(16, D), "y": floats(16, D)}
    check_results(step, batch)
    traced = trace_step(step, (PARAMS, batch))
    arguments = [{traced.call.paths[i] for i in found} for found in (traced.batch, traced.donated)]
    assert arguments == [{"batch['x']", "batch['y']"}, {"params['w']", "params['b']"}]
    named = trace_step(step, (PARAMS, batch), batch_argnums=(1,))
    assert (named.batch, named.donated) == (traced.batch, traced.donated)
    given_up = trace_step(step, (PARAMS, batch), batch_argnums=(1,), donate_argnums=(0, 1))
    assert {*given_up.donated} == {*traced.batch, *traced.donated}


def test_moments_without_a_batch_are_state() -> None:
    """They have as many rows, which are those of the parameters."""
    data = floats(16, D)

    def step(params: Any, moments: Any) -> Any:
        loss, slopes = jax.value_and_grad(distance)(params, data, data)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, slopes)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, loss

    traced = trace_step(step, (PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)))
    assert traced.batch == () and len(traced.state) == len(traced.donated) == 4
