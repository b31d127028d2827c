"""Steps whose scans stack less equal `jax.jit` of the steps as they are, over three steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.ir.graph import check_graph
from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.accumulate import accumulate, micro_batch_leaves
from autopar.rewrite.scan_residuals import thin_scans
from autopar.tracer.build import build_graph
from autopar.tracer.costs import aval_bytes
from autopar.tracer.trace_step import trace_step
from tests.equivalence.test_unroll import function_of

RNG = np.random.default_rng(0)
NUM_LAYERS, WIDTH, ROWS, TIME = 4, 8, 4, 6


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


PARAMS = {
    "scale": 1.0 + array(NUM_LAYERS, WIDTH),
    "qkv": array(NUM_LAYERS, WIDTH, 3 * WIDTH),
    "up": array(NUM_LAYERS, WIDTH, 4 * WIDTH),
    "bias": array(NUM_LAYERS, 4 * WIDTH),
    "down": array(NUM_LAYERS, 4 * WIDTH, WIDTH),
}
X = array(ROWS, TIME, WIDTH)
KEYS = jax.random.split(jax.random.key(0), NUM_LAYERS)


def norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def block(x: Any, w: Any) -> Any:
    """A transformer's block of one head, with a causal mask."""
    q, k, v = jnp.split(norm(x, w["scale"]) @ w["qkv"], 3, axis=-1)
    mask = jnp.tril(jnp.ones((TIME, TIME), bool))
    scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)
    return x + jax.nn.gelu(norm(x, w["scale"]) @ w["up"] + w["bias"]) @ w["down"]


def plain(p: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (block(x, w), None), x, p)[0]


def dropout(p: Any, x: Any) -> Any:
    def layer(x: Any, slices: Any) -> Any:
        w, key = slices
        keep = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.where(keep, block(x, w) / 0.7, 0.0), None

    return lax.scan(layer, x, (p, KEYS))[0]


def stacks_read_elsewhere(p: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        hidden = jnp.tanh(x * w["scale"])
        return block(hidden, w), hidden

    x, hidden = lax.scan(layer, x, p)
    return x + hidden.mean(0) + lax.scan(lambda c, h: (c * 0.5 + jnp.sin(h), None), x, hidden)[0]


def checkpointed(p: Any, x: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None)), x, p)[0]


def policy(p: Any, x: Any) -> Any:
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None), policy=keep), x, p)[0]


def named(p: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
        return block(x + hidden @ w["down"], w), None

    keep = jax.checkpoint_policies.save_only_these_names("hidden")
    return lax.scan(jax.checkpoint(layer, policy=keep), x, p)[0]


def of_scans(p: Any, x: Any) -> Any:
    groups = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), p)

    def group(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, w: (block(jnp.sin(x), w), None), jnp.cos(x), w)[0], None

    return lax.scan(group, x, groups)[0]


def of_scans_of_scans(p: Any, x: Any) -> Any:
    """Three deep; the inner ones read a constant of the outer one and a value made in it."""
    groups = jax.tree.map(lambda a: a.reshape(2, 1, 2, *a.shape[1:]), p)
    shift = jnp.tanh(x)

    def outer(x: Any, w: Any) -> Any:
        gate = jax.nn.sigmoid(x)

        def group(x: Any, w: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return block(jnp.sin(x) * gate + shift, w), None

            return lax.scan(layer, x, w, reverse=True)[0], None

        return lax.scan(group, jnp.cos(x), w)[0], None

    return lax.scan(outer, x, groups)[0]


def groups_of_two_kinds(p: Any, x: Any) -> Any:
    groups = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), p)

    def group(x: Any, w: Any) -> Any:
        one, two = (jax.tree.map(lambda a, i=i: a[i], w) for i in range(2))
        return jax.nn.silu(x @ two["up"]) @ two["down"] + block(x, one), None

    return lax.scan(group, x, groups)[0]


def mixed_precision(p: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
        return block(x, w), None

    return lax.scan(layer, x.astype(jnp.bfloat16), p)[0].astype(jnp.float32)


def cache(p: Any, x: Any) -> Any:
    """Every layer reads and returns a cache of its own."""
    old = jnp.ones((NUM_LAYERS, *x.shape))

    def layer(x: Any, slices: Any) -> Any:
        w, kept = slices
        kept = 0.9 * kept + jnp.tanh(x)
        return block(x + jax.nn.sigmoid(kept), w), kept

    x, new = lax.scan(layer, x, (p, old))
    return x + new.sum(0) * 0.1


def gru(p: Any, x: Any) -> Any:
    """Over time: weights are constants, residuals mostly elementwise."""
    w = {name: p[name][0] for name in ("up", "down", "qkv")}

    def cell(h: Any, x: Any) -> Any:
        reset, update, new = jnp.split(x @ w["qkv"], 3, axis=-1)
        update = jax.nn.sigmoid(update + h)
        new = jnp.tanh(new + jax.nn.sigmoid(reset) * (jnp.tanh(h @ w["up"]) @ w["down"]))
        h = (1 - update) * new + update * h
        return h, h

    last, every = lax.scan(cell, jnp.zeros((ROWS, WIDTH)), x.swapaxes(0, 1))
    return every.swapaxes(0, 1) + last[:, None]


def backwards(p: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (block(x, w), None), x, p, reverse=True)[0]


def twice(p: Any, x: Any) -> Any:
    return plain(p, jnp.tanh(backwards(p, x)))


def unrolled(p: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (block(x, w), None), x, p, unroll=2)[0]


MODELS: dict[str, Callable[[Any, Any], Any]] = {
    f.__name__: f
    for f in (
        *(plain, dropout, stacks_read_elsewhere, checkpointed, policy, named, of_scans),
        of_scans_of_scans,
        *(groups_of_two_kinds, mixed_precision, cache, gru, backwards, twice, unrolled),
    )
}


def train_step(model: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (model(params, x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def stacked_bytes(program: Program) -> int:
    """Bytes that scans stack, at the top level."""
    return sum(
        aval_bytes(program.avals[r])
        for e in program.equations
        if e.name == "scan"
        for r in e.results[len(e.bodies[0].outputs) - len(e.results) :]
        if len(program.avals[r].shape) > 0
    )


def check(step: Callable[..., Any], run: Callable[..., Any], rtol: float = 2e-5) -> None:
    reference = jax.jit(step)
    got = want = PARAMS
    for _ in range(3):
        got, result = run(got, X)
        want, expected = reference(want, X)
        np.testing.assert_allclose(result, expected, rtol=rtol)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=10 * rtol, atol=rtol, err_msg=name)


def tolerance(name: str) -> float:
    return 2e-2 if name == "mixed_precision" else 2e-5


@pytest.mark.representatives("plain", "policy", "of_scans", "gru")
@pytest.mark.parametrize("name", MODELS)
def test_thinner_scans_compute_the_same(name: str) -> None:
    step = train_step(MODELS[name])
    traced = trace_step(step, (PARAMS, X))
    thin = thin_scans(traced)
    check_graph(build_graph(thin))
    assert stacked_bytes(thin.program) <= stacked_bytes(traced.program)
    check(step, function_of(thin), tolerance(name))


def as_loop(step: Callable[..., Any], num: int) -> TracedStep:
    full = trace_step(step, (PARAMS, X))
    args, _ = full.call.rebuild(micro_batch_leaves(full, num))
    return accumulate(full, trace_step(step, args), num)


@pytest.mark.representatives("plain")
@pytest.mark.parametrize("name", ["plain", "of_scans", "policy", "cache", "twice"])
def test_in_a_loop_over_micro_batches(name: str) -> None:
    step = train_step(MODELS[name])
    thin = thin_scans(as_loop(step, 2))
    check_graph(build_graph(thin))
    check(step, function_of(thin))


@pytest.fixture
def one_session() -> Iterator[None]:
    yield
    autopar.shutdown()


@pytest.mark.usefixtures("one_session")
@pytest.mark.representatives(
    "plain-1",
    "plain-4",
    slow=[f"{name}-4" for name in MODELS if name not in ("plain", "policy", "of_scans", "twice")],
)
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_planned(name: str, num_devices: int) -> None:
    autopar.init(devices=jax.devices()[:num_devices])
    step = train_step(MODELS[name])
    check(step, autopar.parallelize(step, method=autopar.ShardParallel()), tolerance(name))


KEPT = {"checkpointed", "policy", "named"}


@pytest.mark.parametrize("name", sorted(KEPT))
def test_what_the_user_chose_to_save_stays(name: str) -> None:
    traced = trace_step(train_step(MODELS[name]), (PARAMS, X))
    before, after = (stacked_bytes(s.program) for s in (traced, thin_scans(traced)))
    assert after == before


@pytest.mark.parametrize(
    "name", ["plain", "dropout", "mixed_precision", "gru", "of_scans", "of_scans_of_scans"]
)
def test_stacks_shrink(name: str) -> None:
    traced = trace_step(train_step(MODELS[name]), (PARAMS, X))
    before, after = (stacked_bytes(s.program) for s in (traced, thin_scans(traced)))
    assert after < 0.8 * before


@pytest.mark.representatives("plain")
@pytest.mark.parametrize("name", ["plain", "dropout", "cache", "twice"])
def test_xla_takes_less_memory(name: str) -> None:
    step = train_step(MODELS[name])
    rows = np.tile(X, (64, 1, 1))
    thin = function_of(thin_scans(trace_step(step, (PARAMS, rows))))

    def temporary_bytes(run: Callable[..., Any]) -> int:
        stats = jax.jit(run).lower(PARAMS, rows).compile().memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    assert temporary_bytes(thin) < temporary_bytes(step)
