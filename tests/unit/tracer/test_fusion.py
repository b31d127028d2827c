"""Which values XLA writes, on small programs whose buffers are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.devices import DEVICES
from autopar.ir.graph import NodeKind
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from tests.unit.tracer.memory_graphs import array, graph_of, lives_by_op, train


def test_elementwise_values_are_fused_and_what_products_read_is_written() -> None:
    graph = graph_of(lambda w, x: jnp.sort((jnp.exp(x @ w) + 1) @ w), array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    assert len(lives["dot_general"]) == 2 and len(lives["add"]) == 1
    assert "exp" not in lives


def test_the_scores_and_the_probabilities_of_a_softmax_are_kept() -> None:
    """Of bfloat16 scores: not the float32 between, which the backward pass computes again."""

    def loss_of(w, x):
        scores = (x @ w).astype(jnp.bfloat16)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.sum((weights @ x).astype(jnp.float32))

    dtype = jnp.bfloat16
    graph = graph_of(train(loss_of), array(64, 64, dtype=dtype), array(64, 64, dtype=dtype))
    backward = min(i for i, n in enumerate(graph.nodes) if n.region == "backward")
    kept = [
        graph.values[life.value].dtype
        for life in graph.liveness.lives
        if life.start < backward <= life.end
        and graph.nodes[graph.producer[life.value][0]].kind is not NodeKind.INPUT
        and graph.values[life.value].shape == (64, 64)
    ]
    assert kept and set(kept) == {"bfloat16"} and len(kept) <= 2


@pytest.mark.parametrize(("device", "kept_in_float32"), [("h100-sxm", False), ("h200-sxm", True)])
def test_a_dear_activation_that_both_passes_need_is_kept_where_it_is_small(
    device: str, kept_in_float32: bool
) -> None:
    """In bfloat16, writing a tanh moves less than computing it again costs; in float32 only where
    memory is fast: XLA decides otherwise for an H200 than for an H100."""

    def loss_of(w, x):
        h = x @ w
        return jnp.sum((h * (1 + jnp.tanh(h + h**3))) @ w).astype(jnp.float32)

    def kept(dtype) -> bool:
        args = (array(64, 64, dtype=dtype), array(64, 64, dtype=dtype))
        rate = DEVICES[device].instructions_per_byte
        graph = build_graph(
            trace_step(train(loss_of), args), overlaps=False, instructions_per_byte=rate
        )
        return "tanh" in lives_by_op(graph)

    assert kept(jnp.bfloat16) and kept(jnp.float32) == kept_in_float32


@pytest.mark.parametrize(("checkpointed", "scanned"), [(False, False), (True, False), (True, True)])
def test_a_dear_activation_is_kept_in_a_layer_that_is_computed_again(
    checkpointed: bool, scanned: bool
) -> None:
    """From there to its gradient, beside the result; the first time only what is kept for good."""

    def layer(h, w):
        y = h @ w
        return (y * (1 + jnp.tanh(y + y**3))) @ w

    def loss_of(w, x):
        once = jax.checkpoint(layer) if checkpointed else layer
        if scanned:
            return jnp.sum(jax.lax.scan(lambda h, w: (once(h, w), None), x, w)[0] ** 2)
        for one in w:
            x = once(x, one)
        return jnp.sum(x**2)

    dtype = jnp.bfloat16
    graph = graph_of(train(loss_of), array(3, 64, 64, dtype=dtype), array(64, 64, dtype=dtype))
    regions = [
        graph.nodes[graph.producer[life.value][0]].region
        for life in graph.liveness.lives
        if graph.nodes[graph.producer[life.value][0]].name == "tanh"
    ]
    assert set(regions) == {"backward" if checkpointed else "forward"}


def test_statistics_are_not_computed_again_for_every_element() -> None:
    """XLA writes what a norm makes of its sums, so that little is left to compute where the
    backward pass computes the activation after it again."""

    def loss_of(w, x):
        y = (x @ w).astype(jnp.float32).reshape(64, 8, 8, 4, 16)
        mean = jnp.mean(y, (1, 2, 4), keepdims=True)
        variance = jnp.mean(y**2, (1, 2, 4), keepdims=True) - mean**2
        y = (y - mean) * jax.lax.rsqrt(variance + 1e-6)
        return jnp.sum((jax.nn.silu(y.astype(jnp.bfloat16).reshape(4096, 64)) @ w) ** 2)

    dtype = jnp.bfloat16
    graph = graph_of(train(loss_of), array(64, 64, dtype=dtype), array(4096, 64, dtype=dtype))
    assert "logistic" not in lives_by_op(graph)


@pytest.mark.parametrize("reader", ["elementwise", "product"])
def test_rows_that_are_stacked_for_elementwise_readers_stay_where_they_lie(reader: str) -> None:
    """As gradients of unrolled layers do, which the update of a stack reads."""

    def step(w, x):
        rows = [(x @ w)[None], (x @ w.T)[None], (w @ x)[None]]
        stack = jnp.concatenate(rows)
        return 0.5 * stack + 1.0 if reader == "elementwise" else stack @ w

    lives = lives_by_op(graph_of(step, array(64, 64), array(64, 64)))
    assert ("concatenate" in lives) == (reader == "product")


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_zeros_that_a_scatter_adds_to_are_read_from_memory_by_others(other: float) -> None:
    """XLA merges equal constants, and does not fuse one that has to be in memory anyway (Adagrad
    updates embeddings by `where(sum > 0, …, 0)`)."""

    def step(w, ids):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(w[ids])))(w)
        return w - jnp.where(w > 0, gradient, jnp.full(w.shape, other))

    graph = graph_of(step, array(4096, 64), array(32, dtype=jnp.int32))
    lives = lives_by_op(graph)
    in_update = [n.name for n in graph.nodes if n.region == "update"]
    assert "select_n" in in_update
    # Those of the scatter are made when it runs, in the buffer of its result.
    made = [*lives.get("broadcast_in_dim", []), *lives.get("convert_element_type", [])]
    assert sum(shape == (4096, 64) for _, _, shape in made) == (1 if other == 0 else 0)
    assert sum(shape == (4096, 64) for _, _, shape in lives["scatter-add"]) == 1


def test_a_scatter_makes_its_updates_itself() -> None:
    """Messages along the edges of a graph are summed up where they arrive; none are in memory."""

    def loss_of(w, x):
        senders, receivers = jnp.arange(4096) % 7, jnp.arange(4096) % 5
        messages = jnp.exp((x @ w)[senders])
        return jnp.sum(jax.ops.segment_sum(messages, receivers, 64) ** 2)

    graph = graph_of(train(loss_of), array(16, 32), array(64, 16))
    kept = [graph.values[life.value].shape for life in graph.liveness.lives]
    assert (64, 32) in kept and (4096, 32) not in kept


def test_an_op_that_two_paths_share_is_computed_once() -> None:
    """Each step of the recurrence reads the one before twice."""

    def fn(x):
        y = jnp.exp(x)
        for _ in range(8):
            y = y + 0.5 * y
        return jnp.sum(y), jnp.max(y)

    graph = graph_of(fn, array(64, 64))
    kept = [life.value for life in graph.liveness.lives if graph.values[life.value].shape]
    assert len(kept) == 1  # the input


@pytest.mark.parametrize("picked", [16, 1024])
def test_what_a_gather_picks_many_times_is_written(picked: int) -> None:
    """Such as a node's features for all of its edges."""
    graph = graph_of(
        lambda x, i: jnp.sort(jnp.exp(x)[i]), array(64), array(picked, dtype=jnp.int32)
    )
    assert ("exp" in lives_by_op(graph)) == (picked > 64)


@pytest.mark.parametrize("averages", [False, True])
def test_an_activation_that_a_condition_s_gradient_sums_is_kept(averages: bool) -> None:
    """On an H100, which computes it again otherwise: the sum would do so once more. What is also
    averaged is written itself, with no other array beside it."""

    def loss_of(w, x):
        h = x @ w["up"]
        active = h * (1 + jnp.tanh(h + h**3))
        condition = active.mean(1) if averages else x[:, 0] @ w["up"]
        return jnp.sum(((active * (1 + condition[:, None])) @ w["down"]) ** 2)

    weights = {"up": array(64, 256), "down": array(256, 64)}
    graph = graph_of(train(loss_of), weights, array(8, 64, 64))
    backward = min(i for i, n in enumerate(graph.nodes) if n.region == "backward")
    kept = [
        name
        for name, lives in lives_by_op(graph).items()
        for start, end, size in lives
        if size == (8, 64, 256) and start < backward <= end
    ]
    conditioned = "mul"  # what the product reads
    assert sorted(kept) == sorted(["dot_general", conditioned, "mul" if averages else "tanh"])


@pytest.mark.parametrize("length", [64, 1024])
def test_of_a_long_array_a_kernel_reads_what_it_makes_of_it(length: int) -> None:
    """Two readers of a cast of the first rows move less than writing it, however many rows follow:
    as of the second half of a convolution by Fourier transforms, which is padding."""

    def fn(x, y):
        part = jnp.sort(x)[:64].astype(jnp.bfloat16)
        return jnp.sort(part * y), jnp.sort(part + y)

    lives = lives_by_op(graph_of(fn, array(length), array(64, dtype=jnp.bfloat16)))
    assert "convert_element_type" not in lives


def test_a_stack_of_parts_makes_them_itself() -> None:
    """What an elementwise op makes for a concatenation is in no memory of its own."""

    def fn(x, y):
        return jnp.sort(jnp.concatenate([jnp.sort(x) * 2, jnp.exp(jnp.sort(y))]))

    lives = lives_by_op(graph_of(fn, array(64), array(64)))
    assert "mul" not in lives and "exp" not in lives
    assert len(lives["sort"]) == 3 and len(lives["concatenate"]) == 1
    (made, _, _) = lives["concatenate"][0]
    assert sum(end >= made for _, end, _ in lives["sort"]) >= 2
