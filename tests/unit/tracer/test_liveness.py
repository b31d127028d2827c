"""How long values are in memory, on small programs whose XLA buffers are known."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Life, NodeKind
from autopar.tracer.costs import MAX_TILE_ROW
from tests.unit.tracer.memory_graphs import array, graph_of, lives_by_op, train


def test_an_elementwise_result_takes_over_the_buffer_it_is_last_to_read() -> None:
    graph = graph_of(lambda x: jnp.cumsum(jnp.exp(jnp.sort(x))), array(64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, _),) = lives["sort"], lives["exp"]
    assert end < start


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_kernel_that_also_sums_its_result_takes_over_nothing(is_summed: bool) -> None:
    """As that of an activation's gradient does for the bias."""

    def fn(x):
        made = jnp.exp(jnp.sort(x))
        return jnp.cumsum(made, 0), jnp.sum(made if is_summed else x, 0)

    lives = lives_by_op(graph_of(fn, array(64, 64)))
    ((_, end, _),), ((start, _, _),) = lives["sort"], lives["exp"]
    assert (end == start) == is_summed


def test_what_one_kernel_alone_reads_stays_inside_it() -> None:
    """However dear it is, and however often that kernel reads it."""

    def fn(x):
        slope = jnp.tanh(jnp.sort(x)) * jnp.cumsum(x) * jnp.cumprod(x) * jax.lax.cummax(x)
        made = slope * slope + jnp.exp(slope) + 3 * slope
        return jnp.sort(made), jnp.sum(made)

    lives = lives_by_op(graph_of(fn, array(64)))
    assert "mul" not in lives
    assert len(lives["add"]) == 1


def test_nothing_takes_over_the_buffer_of_a_product() -> None:
    """cuBLAS returns it with a workspace, and XLA lets no kernel have a part of such a pair."""
    graph = graph_of(lambda w, x: jnp.sort(jnp.exp(x @ w)), array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, _),) = lives["dot_general"], lives["exp"]
    assert end == start


def test_nothing_takes_over_a_product_that_a_bias_was_added_to() -> None:
    """cuBLAS adds the bias, and returns the sum with a workspace too."""

    def loss_of(w, x):
        return jnp.sum(jnp.exp(x @ w["a"] + w["b"]) @ w["c"])

    graph = graph_of(
        train(loss_of), {"a": array(8, 64), "b": array(64), "c": array(64, 8)}, array(32, 8)
    )
    lives = lives_by_op(graph)
    (sum_,) = [one for one in lives["add"] if one[2] == (32, 64)]
    (made,) = [one for one in lives["exp"] if one[2] == (32, 64)]
    assert sum_[1] == made[0]


def test_an_elementwise_kernel_and_the_one_that_reads_it_are_one() -> None:
    """What the first reads is in memory beside both results."""

    def fn(w, x):
        outer = x @ w
        inner = jnp.tanh(jnp.sort(x) @ w)
        slope = (outer * (1 - inner**2)) @ w
        return slope, inner @ w

    graph = graph_of(fn, array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    ((tanh, _, _),), ((mul, _, _),) = lives["tanh"], lives["mul"]
    assert tanh == mul
    assert sum(end == mul for _, end, _ in lives["dot_general"]) == 2


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gradient_is_not_made_in_place_of_logits(with_bias: bool) -> None:
    """Logits are a product, with or without a bias."""
    classes = 2**15  # no Triton kernel takes such a row as a whole

    def loss_of(w, x):
        logits = x @ w["w"] + (w["b"] if with_bias else 0.0)
        is_target = jnp.arange(classes) == 3
        target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - target)

    weights = {"w": array(32, classes), "b": array(classes)}
    graph = graph_of(train(loss_of), weights, array(128, 32))
    logits, gradient = sorted(
        (life.start, life.end)
        for life in graph.liveness.lives
        if graph.values[life.value].shape == (128, classes)
    )
    assert logits[1] >= gradient[0]


def test_a_scatter_changes_its_array_in_place() -> None:
    graph = graph_of(lambda w, x: jnp.sort((x @ w).at[3].add(1.0)), array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, _),) = lives["dot_general"], lives["scatter-add"]
    assert end < start


def test_a_kernel_does_not_run_with_one_that_reads_what_a_scatter_changed() -> None:
    """The gradient of a picked logit is scattered into that of the softmax before it is cast: the
    logits are no longer needed then."""

    def loss_of(w, x):
        logits = (x @ w).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, jnp.zeros((4096, 1), int), axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)

    bf16 = jnp.bfloat16
    graph = graph_of(train(loss_of), array(64, 1024, dtype=bf16), array(4096, 64, dtype=bf16))
    lives = lives_by_op(graph)
    (logits,) = [one for one in lives["dot_general"] if one[2] == (4096, 1024)]
    (gradient,) = [one for one in lives["add_any"] if one[2] == (4096, 1024)]
    (cast,) = [one for one in lives["convert_element_type"] if one[2] == (4096, 1024)]
    assert logits[1] == gradient[0] < cast[0] == gradient[1]


@pytest.mark.parametrize("columns", [1024, 2**15])
def test_a_softmax_of_short_rows_has_a_buffer_of_its_own(columns: int) -> None:
    """One Triton kernel takes whole rows, and writes elsewhere than it reads."""
    graph = graph_of(lambda x: jnp.cumsum(jax.nn.softmax(jnp.sort(x)), axis=0), array(64, columns))
    lives = lives_by_op(graph)
    ((_, end, _),) = lives["sort"]
    ((start, _, _),) = [life for life in lives["div"] if life[2] == (64, columns)]
    assert (end >= start) == (columns == 1024)


def test_what_a_loop_reads_and_stacks_lives_through_all_of_it() -> None:
    def fn(w, x):
        shared = jnp.sort(w)

        def body(h, _):
            h = h @ shared
            return h, h

        return jax.lax.scan(body, x, None, length=4)

    graph = graph_of(fn, array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, shape),) = lives["sort"], lives["scan_stack"]
    inside = [i for i, n in enumerate(graph.nodes) if n.weight == 4]
    assert shape == (4, 64, 64)
    assert start <= min(inside) and end >= max(inside)


def test_state_takes_its_own_place_only_if_it_is_donated() -> None:
    def loss_of(w, x):
        return jnp.sum(x @ w)

    donated = graph_of(train(loss_of), array(64, 64), array(64, 64))
    kept = graph_of(train(loss_of), array(64, 64), array(64, 64), donate_argnums=())
    assert "sub" not in lives_by_op(donated)
    assert lives_by_op(kept)["sub"]


def test_an_update_in_another_order_of_dimensions_is_not_in_place() -> None:
    """The gradient of a batched product comes out transposed, and is reduced like that. On one
    device the product writes it as it should be."""

    def loss_of(w, x):
        return jnp.sum(jnp.einsum("bij,bjk->bik", x, w) ** 2)

    for overlaps in (False, True):
        arguments = array(4, 64, 32), array(4, 16, 64)
        graph = graph_of(train(loss_of), *arguments, overlaps=overlaps)
        assert any(n.name == "transpose" and n.region == "backward" for n in graph.nodes)
        assert ("sub" in lives_by_op(graph)) == overlaps


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_kernel_is_turned_once_for_both_passes(dtype) -> None:
    """In float32 it is a copy of the parameter; in bfloat16 the cast is that already."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w.astype(dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss_of(w, x):
        x = conv(jnp.sin(x.astype(dtype)), w["a"])
        return jnp.sum(jnp.sin(conv(jnp.sin(x), w["b"])).astype(jnp.float32))

    weights = {"a": array(3, 3, 16, 32), "b": array(3, 3, 32, 8)}
    graph = graph_of(train(loss_of), weights, array(4, 8, 8, 16))
    backward = [i for i, n in enumerate(graph.nodes) if n.region == "backward"]
    across = [
        graph.values[life.value]
        for life in graph.liveness.lives
        if graph.nodes[graph.producer[life.value][0]].kind is not NodeKind.INPUT
        and graph.values[life.value].shape == (3, 3, 32, 8)
        and life.start < min(backward) <= life.end
    ]
    assert [value.dtype for value in across] == [jnp.dtype(dtype).name]


def test_a_transposed_convolution_reads_a_dilated_copy() -> None:
    """Not so the gradient of a strided one, which the library dilates."""

    def upsampled(w, x):
        return jnp.sum(
            jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )

    def downsampled(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(
            jnp.sin(jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers))
        )

    def copies(loss_of) -> list[int]:
        graph = graph_of(train(loss_of), array(4, 4, 16, 16), array(8, 32, 32, 16))
        return [life.count for life in graph.liveness.lives if life.count > 1]

    assert copies(upsampled) == [4]
    assert copies(downsampled) == []


@pytest.mark.parametrize("num_dims", [2, 3])
def test_a_convolution_in_three_dimensions_has_copies_in_its_workspace(num_dims: int) -> None:
    """cuDNN's kernels want channels last, XLA has them first."""

    def fn(kernel, x):
        return jax.lax.conv_general_dilated(jnp.exp(x), kernel, (1,) * num_dims, "SAME")

    graph = graph_of(fn, array(8, 4, *(3,) * num_dims), array(2, 4, *(6,) * num_dims))
    (index,) = [i for i, n in enumerate(graph.nodes) if n.name == "conv_general_dilated"]
    node, time = graph.nodes[index], graph.liveness.times[index]
    result = graph.nodes[index + 1].results[0]
    lives = [(life.value, life.start, life.end) for life in graph.liveness.lives]
    for value in (node.operands[0], result):
        others = [one for one in lives if one[0] == value and one != (value, time, time)]
        assert others
        assert ((value, time, time) in lives) == (num_dims == 3)


def test_kernels_that_read_the_same_zeros_run_apart_where_one_waits_for_the_other() -> None:
    def fn(x, i):
        first = jnp.sort(jnp.where(x > 0, x, jnp.zeros(64)))
        second = jnp.sort(jnp.where(first > 1, first, jnp.zeros(64)))
        return jnp.cumsum(jnp.zeros(64).at[i].add(second))

    graph = graph_of(fn, array(64), array(64, dtype=jnp.int32))
    times = graph.liveness.times
    for index, node in enumerate(graph.nodes):
        assert all(times[graph.producer[v][0]] <= times[index] for v in node.operands)


def test_updates_that_read_the_same_zeros_are_one_kernel() -> None:
    """As Adagrad's are, of tables of one size: the zeros that scatters need in memory are read by
    all updates, so that all gradients are there at once."""
    shape = (1024, 64)

    def step(state, rows):
        tables, sums = state

        def loss_of(tables):
            return sum(jnp.sum(table[rows] ** 3) for table in tables)

        grads = jax.grad(loss_of)(tables)
        sums = [s + g * g for s, g in zip(sums, grads, strict=True)]
        scales = [jnp.where(s > 0, jax.lax.rsqrt(s), 0.0) for s in sums]
        tables = [t - a * g for t, a, g in zip(tables, scales, grads, strict=True)]
        return tables, sums

    tables = [array(*shape) for _ in range(4)]
    graph = graph_of(step, (tables, tables), array(16, dtype=jnp.int32))
    lives = lives_by_op(graph)
    ends = {end for _, end, _ in lives["scatter-add"]}
    assert len(lives["scatter-add"]) == 4 and len(ends) == 1
    (last,) = ends
    zeros = [one for one in lives["broadcast_in_dim"] if one[2] == shape and one[1] == last]
    assert len(zeros) == 1


def attention(query, key, value):
    """A softmax over keys, of grouped queries: (batch, queries, heads, groups, width)."""
    scores = jnp.einsum("bqngd,bknd->bngqk", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
    return jnp.einsum("bngqk,bknd->bqngd", weights, value)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_kernel_with_another_order_of_dimensions_copies_a_product(overlaps: bool) -> None:
    """Grouped queries: scores are made as (keys, queries, groups) and read as (groups, queries,
    keys). XLA computes softmax and its gradient in the first order. It writes the product of the
    backward pass in that order, as float32, and the gradient once for each of its two products."""
    groups, length = 4, 128

    def step(w, x):
        def loss_of(w):
            query, key, value = (x @ w[name].astype(jnp.bfloat16) for name in "qkv")
            query = query.reshape(2, length, 2, groups, 16)
            key, value = (one.reshape(2, length, 2, groups * 16)[..., :16] for one in (key, value))
            return jnp.sum(attention(query, key, value).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss_of)(w))

    w = {name: array(128, 2 * groups * 16) for name in "qkv"}
    x = array(2, length, 128, dtype=jnp.bfloat16)
    graph = graph_of(step, w, x, overlaps=overlaps)
    size = 2 * 2 * groups * length * length
    large: dict[tuple[str, str], list[Life]] = {}
    for life in graph.liveness.lives:
        value, node = graph.values[life.value], graph.nodes[graph.producer[life.value][0]]
        if prod(value.shape) == size:
            large.setdefault((node.name, value.dtype), []).append(life)
    (wide,) = large["convert_element_type", "float32"]
    gradient, *copies = large["transpose", "bfloat16"]
    assert sum(life.count for life in (gradient, *copies)) == 2 and wide.end == gradient.start
    assert [life.start > gradient.start for life in copies] == [True] * overlaps
    # The weights are made once for both passes on several devices, and twice on one.
    assert len(large["convert_element_type", "bfloat16"]) == (1 if overlaps else 2)


def pooled(w, x):
    """The gradient of a max pooling is scattered into zeros."""
    images = jax.nn.relu(x * w["scale"])
    largest = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")
    return jnp.sum(largest**2)


def test_zeros_of_a_pooling_s_gradient_are_those_of_the_relu() -> None:
    graph = graph_of(train(pooled), {"scale": array(64)}, array(32, 64))
    lives = lives_by_op(graph)
    zeros, gradient = sorted(lives["select_and_scatter_add"])
    first = next(i for i, node in enumerate(graph.nodes) if node.name == "max")
    assert zeros[0] == graph.liveness.times[first] and zeros[1] + 1 == gradient[0]


def grid(w, x):
    """Scores of all pairs; the gradient of each is summed over the others."""
    one, other = jax.nn.relu(x @ w["one"]), jnp.sort(x) @ w["other"]
    pairs = jnp.tanh(one[:, :, None] + other[:, None])
    return jnp.sum(jax.nn.logsumexp(pairs @ w["scores"], axis=-1))


@pytest.mark.parametrize(("rows", "turns"), [(48, True), (24, False)])
def test_what_is_summed_over_an_inner_dimension_is_written_in_that_order(
    rows: int, turns: bool
) -> None:
    """With the activation that its gradient reads, in one kernel for both; not for few rows."""
    w = {"one": array(8, 8), "other": array(8, 8), "scores": array(8, 16)}
    graph = graph_of(train(grid), w, array(4, rows, 8), overlaps=True)
    lives = lives_by_op(graph)
    shape = (4, rows, rows, 8)
    activations = [one for one in lives.pop("tanh") if one[2] == shape]
    del lives["dot_general"]
    slopes = [one for name in lives for one in lives[name] if one[2] == shape]
    assert (len(activations), len(slopes)) == ((2, 1) if turns else (1, 0))
    assert len({start for start, _, _ in activations}) == 1
    assert {start for start, _, _ in slopes} <= {end for _, end, _ in activations}


@pytest.mark.parametrize("classes", [1024, 1021])
def test_what_a_product_reads_padded_is_computed_again_for_a_sum(classes: int) -> None:
    """cuBLAS wants multiples of 8 in bfloat16, so the gradient of 1,021 logits is written with
    zeros added, and the bias's gradient is a sum over the logits, not over that array."""

    def loss_of(w, x):
        h = jnp.tanh(x @ w["a"].astype(jnp.bfloat16))
        logits = h @ w["w"].astype(jnp.bfloat16) + w["b"].astype(jnp.bfloat16)
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))

    weights = {"a": array(64, 64), "w": array(64, classes), "b": array(classes)}
    x = array(4096, 64, dtype=jnp.bfloat16)
    graph = graph_of(train(loss_of), weights, x, overlaps=True)
    shape = (4096, classes)
    logits, gradient = sorted(
        (life for life in graph.liveness.lives if graph.values[life.value].shape == shape),
        key=lambda life: life.start,
    )
    bias = max(
        graph.liveness.times[i]
        for i, node in enumerate(graph.nodes)
        if node.name == "reduce_sum" and gradient.value in node.operands
    )
    assert bias > gradient.start and (logits.end == bias) == (classes == 1021)


def test_members_of_an_ensemble_are_written_once_for_both_passes() -> None:
    """A product of members, which have one stride, reads them in any order of dimensions: the
    hidden layer lives from the forward pass until its weight's gradient."""

    def member(w, x):
        return jax.nn.gelu(x @ w["first"] + w["bias"]) @ w["second"]

    def loss_of(w, x):
        return jnp.sum(jax.vmap(member, (0, None))(w, x) ** 2)

    weights = {"first": array(3, 8, 16), "bias": array(3, 16), "second": array(3, 16, 16)}
    lives = lives_by_op(graph_of(train(loss_of), weights, array(32, 8)))
    hidden, gradient = sorted(one for one in lives["mul"] if one[2] == (3, 32, 16))
    assert hidden[0] < gradient[0] < hidden[1]


def checkpointed_layers(layer):
    def loss_of(w, x):
        for one in w:
            x = jax.checkpoint(layer)(x, one)
        return jnp.sum(x**2)

    return graph_of(train(loss_of), array(2, 64, 64), array(4, 128, 64), overlaps=True)


def test_a_softmax_is_computed_again_once_it_is_needed() -> None:
    """Only the gradients of its values and of the last parameters read it, so it comes after the
    gradient of the scores: three arrays of their size are in memory at once, not four."""

    def layer(x, w):
        queries = (x @ w) / jnp.sqrt(w.shape[-1])
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", queries, x @ w.T))
        return jnp.einsum("bqk,bkd->bqd", weights, x + 1.0) @ w

    graph = checkpointed_layers(layer)
    lives = [v for v in graph.liveness.lives if graph.values[v.value].shape == (4, 128, 128)]
    at_once = [sum(v.start <= one.start <= v.end for v in lives) for one in lives]
    assert max(at_once) == 3


def test_an_activation_is_computed_again_with_its_gradient() -> None:
    """By one kernel, the last to read the product; not later, where the gradient of the parameters
    reads it."""
    graph = checkpointed_layers(lambda x, w: jnp.sin(x @ w) @ w.T)
    backward = min(i for i, n in enumerate(graph.nodes) if n.region == "backward")
    lives = lives_by_op(graph)
    again = [start for start, _, _ in lives["sin"] if start > backward]
    read = [end for start, end, _ in lives["dot_general"] if start > backward]
    assert len(again) == 2 and set(again) <= {start for start, _, _ in lives["mul"]}
    assert set(again) <= set(read)


def test_a_softmax_of_long_rows_is_computed_again_with_its_gradient() -> None:
    """Its rows fit in no tile, so it is an elementwise kernel like any other: one reads the scores
    and the gradient and writes both results."""

    def layer(x, w):
        scores = x @ w
        return jax.nn.softmax(scores) @ w.T + jnp.sum(scores[:, :1])

    def loss_of(w, x):
        for one in w:
            x = jax.checkpoint(layer)(x, one)
        return jnp.sum(x**2)

    long = 2 * MAX_TILE_ROW
    graph = graph_of(train(loss_of), array(2, 64, long), array(32, 64), overlaps=True)
    backward = min(i for i, n in enumerate(graph.nodes) if n.region == "backward")
    again = [
        life
        for life in graph.liveness.lives
        if graph.values[life.value].shape == (32, long) and life.start > backward
    ]
    softmaxes = [x for x in again if graph.nodes[graph.producer[x.value][0]].name == "div"]
    gradients = {x.start for x in again if graph.nodes[graph.producer[x.value][0]].name != "div"}
    assert softmaxes and all(x.start in gradients for x in softmaxes)


def test_copies_for_ragged_products_live_from_the_first_to_the_last_of_them() -> None:
    """One with zeros for the rows of other groups, which the backward pass reads again, so that the
    rows themselves need not stay; another, turned, while products of rows read it."""
    groups, rows = 4, (256, 64)
    w = {"up": array(groups, 64, 64), "down": array(groups, 64, 64)}

    def loss_of(w, x):
        sizes = jnp.full((groups,), 64)
        inner = jnp.sin(jax.lax.ragged_dot(x, w["up"], sizes))
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(inner, w["down"], sizes)))

    graph = graph_of(train(loss_of), w, array(*rows))
    products = [i for i, n in enumerate(graph.nodes) if n.name == "ragged_dot_general"]
    times = [graph.liveness.times[i] for i in products]
    contracts = [graph.values[graph.nodes[i].results[0]].shape == w["up"].shape for i in products]
    assert sorted(contracts) == [False] * 3 + [True] * 2
    lives = [life for life in graph.liveness.lives if life.count == groups]
    assert all(graph.values[life.value].shape == rows for life in lives)
    inner = graph.nodes[products[1]].operands[0]
    last = max(t for i, t in zip(products, times, strict=True) if inner in graph.nodes[i].operands)
    assert last > times[1]  # the gradient of `down`
    spans = [(life.start, life.end) for life in lives if life.value == inner]
    assert sorted(spans) == [(times[1], times[1]), (times[1], last)]
    itself = [life for life in graph.liveness.lives if life.value == inner and life.count == 1]
    assert all(life.end <= times[1] for life in itself)
    gradients = [life for life in lives if graph.nodes[graph.producer[life.value][0]].region]
    assert len(gradients) == len(lives)


def test_one_kernel_masks_the_gradients_of_two_ragged_products_of_one_array() -> None:
    groups = 4
    w = {"gate": array(groups, 64, 128), "up": array(groups, 64, 128)}

    def loss_of(w, x):
        sizes, x = jnp.full((groups,), 64), jnp.sin(x)
        gate = jax.lax.ragged_dot(x, w["gate"], sizes)
        return jnp.sum(jnp.sin(gate) * jax.lax.ragged_dot(x, w["up"], sizes))

    graph = graph_of(train(loss_of), w, array(256, 64))
    wide = [life for life in graph.liveness.lives if graph.values[life.value].shape == (256, 128)]
    starts = [life.start for life in wide if life.count == groups]
    assert len(starts) == 2 and len(set(starts)) == 1
