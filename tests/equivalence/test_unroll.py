"""Steps with their scans over layers written out equal `jax.jit` of the steps as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from autopar import _jax
from autopar.ir.graph import check_graph
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.accumulate import accumulate, micro_batch_leaves
from autopar.rewrite.layers import find_layers, worth_recomputing
from autopar.rewrite.remat import with_remat
from autopar.rewrite.unroll_scans import unroll_scans
from autopar.sharding.assemble import unsharded
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from examples.models import build
from tests.equivalence.test_models import WITHOUT_GRADIENT

pytestmark = (
    pytest.mark.slow
)  # Minutes of compiling; scans in pipelines are in other tests of the default line.

LEARNING_RATE = 3e-4


def written_out(step: Callable[..., Any], state: Any, batch: Any, num: int, remat: bool) -> Any:
    """The step, its scans over layers written out, as a loop over `num` micro-batches."""
    full = unroll_scans(trace_step(step, (state, batch)))
    micro = None
    if num > 1:
        args, _ = full.call.rebuild(micro_batch_leaves(full, num))
        micro = unroll_scans(trace_step(step, args))
    layers = worth_recomputing(find_layers(full.program, batch=full.batch)) if remat else ()
    return with_remat(full, layers) if micro is None else accumulate(full, micro, num, layers)


def function_of(traced: TracedStep) -> Callable[..., Any]:
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    run = jax.jit(annotated_function(traced.program, unsharded(traced.program), mesh))
    return lambda state, batch: traced.rebuild_output(run(*jax.tree.leaves((state, batch))))


def check(
    step: Callable[..., Any], state: Any, batch: Any, num: int = 1, remat: bool = False
) -> TracedStep:
    traced = written_out(step, state, batch, num, remat)
    check_graph(build_graph(traced))
    ours, reference = function_of(traced), jax.jit(step)
    got = want = state
    for _ in range(2):
        got, result = ours(got, batch)
        want, expected = reference(want, batch)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    for (path, other), one in zip(tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        by_noise = keystr(path).endswith(WITHOUT_GRADIENT)
        atol = LEARNING_RATE if by_noise else 1e-5
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol, err_msg=keystr(path))
    return traced


def num_scans(traced: TracedStep) -> int:
    return sum(e.name == "scan" for e in traced.program.equations)


SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_len": 8, "vocab_size": 32}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-tiny-scan", SMALL),
        pytest.param(
            "gpt-tiny-scan", SMALL | {"dropout": 0.2, "remat": True}, marks=pytest.mark.slow
        ),
        pytest.param("llama-tiny-scan", {"num_layers": 2, "remat": True}, marks=pytest.mark.slow),
        pytest.param("llama-tiny-scan", {}, marks=pytest.mark.slow),
        pytest.param("moe-tiny", {"scan_layers": True, "num_layers": 4}, marks=pytest.mark.slow),
    ],
)
def test_models(name: str, options: dict[str, Any]) -> None:
    model = build(name, **options)
    traced = check(model.train_step, model.create_state(), model.make_batch())
    assert num_scans(traced) == 0


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_micro_batches_and_recomputation_come_after(remat: bool) -> None:
    model = build("gpt-tiny-scan", **SMALL)
    state, batch = model.create_state(), model.make_batch()
    traced = check(model.train_step, state, batch, num=2, remat=remat)
    assert num_scans(traced) == 1, "the one over micro-batches"


RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


PARAMS = {"up": array(4, 8, 16), "down": array(4, 16, 8), "head": array(8, 3)}
X = array(8, 8)


def block(x: Any, w: Any) -> tuple[Any, Any]:
    x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return x, (x**2).mean()


def scanned(params: Any, x: Any, block: Any = block, reverse: bool = False) -> Any:
    weights = {name: params[name] for name in ("up", "down")}
    x, sizes = lax.scan(block, x, weights, reverse=reverse)
    # What the trips stack is read outside too.
    return ((x @ params["head"]) ** 2).mean() + 0.1 * (sizes * jnp.arange(4.0)).sum()


def train_step(forward: Any) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(forward)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


@pytest.mark.parametrize("reverse", [False, True])
def test_plain_jax(reverse: bool) -> None:
    step = train_step(lambda p, x: scanned(p, x, reverse=reverse))
    assert num_scans(check(step, PARAMS, X)) == 0


def test_weights_that_the_step_stacks_itself() -> None:
    apart = {"head": PARAMS["head"]} | {n: list(PARAMS[n]) for n in ("up", "down")}

    def forward(params: Any, x: Any) -> Any:
        stacked = {n: jnp.stack(params[n]) for n in ("up", "down")}
        return scanned(stacked | {"head": params["head"]}, x)

    assert num_scans(check(train_step(forward), apart, X)) == 0


def test_a_body_with_checkpoint() -> None:
    step = train_step(lambda p, x: scanned(p, x, jax.checkpoint(block, prevent_cse=False)))
    traced = check(step, PARAMS, X)
    assert num_scans(traced) == 0
    barriers = [e for e in traced.program.equations if e.name == "optimization_barrier"]
    assert len(barriers) == 4, "one for each trip of the backward pass"


def test_scans_in_scans() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.tanh(nn.Dense(8)(x))

    model = nn.remat_scan(Block, lengths=(2, 3))()
    params = model.init(jax.random.key(0), X)
    step = train_step(lambda p, x: (model.apply(p, x) ** 2).mean())
    traced = check(step, params, X)
    assert num_scans(traced) == 0
    assert len(find_layers(traced.program, batch=traced.batch)) == 2
    layers = find_layers(traced.program, 6, batch=traced.batch)
    products = [[traced.program.equations[i].name for i in x.equations] for x in layers]
    assert [names.count("dot_general") for names in products] == [1] * 6


def test_a_loop_over_time_in_each_layer_stays_a_loop() -> None:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        def cell(h: Any, row: Any) -> tuple[Any, Any]:
            h = jnp.tanh(row @ w["up"] + h)
            return h, h @ w["down"]

        _, out = lax.scan(cell, jnp.zeros((16,)), x)
        return x + out, None

    def forward(params: Any, x: Any) -> Any:
        x, _ = lax.scan(layer, x, {name: params[name] for name in ("up", "down")})
        return ((x @ params["head"]) ** 2).mean()

    traced = check(train_step(forward), PARAMS, X)
    assert num_scans(traced) == 8, "one over time for each layer, forward and backward"
