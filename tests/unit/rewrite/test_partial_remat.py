"""Layers recomputed in part: attention's scores are made again, large products are not."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import _jax
from autopar.ir.graph import check_graph
from autopar.ir.program import Equation
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.layers import Layer, find_layers, layers_by_name, worth_recomputing
from autopar.rewrite.partial_remat import with_parts
from autopar.rewrite.remat import rematerialise, with_remat
from autopar.sharding.assemble import unsharded
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

NUM_LAYERS, ROWS, LENGTH, WIDTH, HEADS = 3, 2, 128, 512, 32
SCORES = (ROWS, HEADS, LENGTH, LENGTH)
RNG = np.random.default_rng(0)


def params_of() -> list[dict[str, np.ndarray]]:
    def weights() -> np.ndarray:
        return (RNG.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)

    return [{name: weights() for name in ("q", "k", "v", "o", "up")} for _ in range(NUM_LAYERS)]


def mlp(x: Any, own: Any) -> Any:
    return x + jnp.tanh(x @ own["up"]) @ own["o"]


def attention(x: Any, own: Any) -> Any:
    q, k, v = (
        (x @ own[name]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for name in ("q", "k", "v")
    )
    seen = jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH)
    scores = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k) / 4, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return mlp(x + mixed.reshape(x.shape) @ own["o"], own)


def traced(layer: Any, num_rows: int = ROWS) -> tuple[TracedStep, Any]:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for own in params:
                y = layer(y, own)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x = RNG.normal(size=(num_rows, LENGTH, WIDTH)).astype(np.float32)
    params = params_of()
    return trace_step(step, (params, x)), jax.jit(step)(params, x)


def layers_of(step: TracedStep) -> tuple[Layer, ...]:
    return with_parts(step.program, find_layers(step.program, batch=step.batch), step.batch)


def parts_of(step: TracedStep) -> list[Layer]:
    return [layer.part for layer in worth_recomputing(layers_of(step)) if layer.part is not None]


def copies(step: TracedStep, name: str) -> list[Equation]:
    return [e for e in step.program.equations if e.name == name and "rematted" in e.scope]


def test_scores_are_made_again_and_nothing_else() -> None:
    before, want = traced(attention)
    parts = parts_of(before)
    assert [part.name for part in parts] == ["layer 0 in part", "layer 1 in part"]
    after = with_remat(before, parts)
    assert after.remat == ("layer 0 in part", "layer 1 in part")
    products = copies(after, "dot_general")
    shapes = [after.program.avals[e.results[0]].shape for e in products]
    assert shapes == [SCORES] * 2  # of eight products in each layer
    # The barrier holds what scores are made from, with a cotangent: no scores, no mask.
    for barrier in copies(after, "optimization_barrier"):
        held = [after.program.avals[v].shape for v in barrier.inputs]
        assert SCORES not in held and (LENGTH, LENGTH) not in held
        assert held.count((ROWS, LENGTH, HEADS, WIDTH // HEADS)) == 2  # queries, keys
    check_graph(build_graph(after))
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    run = annotated_function(after.program, unsharded(after.program), mesh)
    for ours, theirs in zip(jax.jit(run)(*before.call.leaves), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_part_costs_less_for_what_it_frees() -> None:
    step, _ = traced(attention)
    for layer in worth_recomputing(layers_of(step)):
        part = layer.part
        assert part is not None and part.part is None
        assert part.flops == 2 * prod(SCORES) * WIDTH / HEADS
        assert 0 < part.freed_bytes < layer.freed_bytes
        assert part.flops / part.freed_bytes < layer.flops / layer.freed_bytes


def test_layers_without_large_cheap_products_have_no_parts() -> None:
    step, _ = traced(mlp)
    assert not parts_of(step)


def test_a_layer_and_its_part_are_found_by_name() -> None:
    layers = layers_of(traced(attention)[0])
    chosen = layers_by_name(layers, ["layer 0", "layer 1 in part"])
    assert [layer.name for layer in chosen] == ["layer 0", "layer 1 in part"]
    assert not chosen[0].kept and chosen[1].kept


def test_a_micro_batch_recomputes_the_same_parts() -> None:
    """Parts are chosen in the whole batch, by bytes; programs of other sizes change alike."""
    whole, _ = traced(attention)
    other, _ = traced(attention, num_rows=2 * ROWS)
    parts = parts_of(whole)
    ours, theirs = (rematerialise(step.program, parts) for step in (whole, other))
    assert [e.name for e in ours.equations] == [e.name for e in theirs.equations]
    assert [e.inputs for e in ours.equations] == [e.inputs for e in theirs.equations]
