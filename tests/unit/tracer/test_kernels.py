"""Which ops are one kernel, and what it moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.ffts import PASS, SCALED, SMOOTH
from autopar.ir.graph import Graph, Node
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

X = np.zeros((512, 1024), np.float32)
W = np.zeros((1024, 1024), np.float32)


def graph_of(fn, *args) -> Graph:
    return build_graph(trace_step(fn, args, {}, batch_argnums=()))


def moved(graph: Graph, name: str | None = None) -> float:
    nodes = [n for n in graph.nodes if n.traffic is not None and name in (None, n.name)]
    return sum(sum(n.traffic.num_bytes) for n in nodes if n.traffic is not None)


def num_kernels(graph: Graph) -> float:
    return sum(n.traffic.num_kernels for n in graph.nodes if n.traffic is not None)


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if n.name == name)


def test_an_elementwise_chain_is_one_kernel_that_reads_once() -> None:
    graph = graph_of(lambda x: jnp.tanh(x * x + x) * x, X)
    assert num_kernels(graph) == 1
    assert moved(graph) == 2 * X.nbytes


def test_products_have_no_traffic_and_part_kernels() -> None:
    graph = graph_of(lambda x, w: jnp.sin(jnp.cos(x) @ w), X, W)
    assert node(graph, "dot_general").traffic is None
    assert num_kernels(graph) == 2
    assert moved(graph) == 4 * X.nbytes


def test_sums_of_the_same_values_are_one_kernel() -> None:
    graph = graph_of(lambda x: (x.sum(1), (x * x).sum(1)), X)
    assert num_kernels(graph) == 1
    assert moved(graph) == X.nbytes + 2 * 512 * 4
    assert node(graph, "reduce_sum").traffic.stream == "reduce-last"  # type: ignore[union-attr]


def test_what_waits_for_a_sum_is_another_kernel() -> None:
    graph = graph_of(lambda x: x - x.sum(1, keepdims=True), X)
    assert num_kernels(graph) == 2
    assert moved(graph) == 3 * X.nbytes + 2 * 512 * 4


def test_a_softmax_of_short_rows_is_one_kernel() -> None:
    def softmax(x):
        powers = jnp.exp(x - x.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    graph = graph_of(softmax, X)
    assert num_kernels(graph) == 1
    assert moved(graph) == 2 * X.nbytes
    long = np.zeros((4, 2**15), np.float32)
    graph = graph_of(softmax, long)
    assert num_kernels(graph) == 3, "long rows are summed in parts"
    assert moved(graph) >= 4 * long.nbytes


def softmax_with_gradient(scores, gradient):
    """In 32 bits, as attention computes it."""

    def softmax(x):
        return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)

    weights, pull_back = jax.vjp(softmax, scores)
    return weights, pull_back(gradient)[0]


@pytest.mark.parametrize(
    ("length", "passes"),
    [
        (1024, 6),  # maximum and sum; the result; and one kernel for the gradient
        (1000, 6),  # padded to 1024
        (768, 15),  # exponentials are written in 32 bits, and read four times
    ],
)
def test_the_softmax_of_padded_rows_writes_its_exponentials(length: int, passes: int) -> None:
    """Passes over the 16-bit scores, as in XLA's programs for an H200 (softmaxes of these rows
    alone, in which the result and the gradient of the padded ones are one kernel: 13)."""
    scores = jax.ShapeDtypeStruct((2**17, length), jnp.bfloat16)
    graph = graph_of(softmax_with_gradient, scores, scores)
    assert moved(graph) / (2**17 * length * 2) == pytest.approx(passes, rel=0.03)


def test_rows_of_odd_length_in_16_bits_are_loaded_one_by_one() -> None:
    def moved_by(length: int) -> float:
        scores = jax.ShapeDtypeStruct((2**17, length), jnp.bfloat16)
        graph = graph_of(lambda x, g: jax.vjp(jax.nn.softmax, x)[1](g)[0], scores, scores)
        return moved(graph) / (2**17 * length * 2)

    assert moved_by(255) == pytest.approx(2 * moved_by(256), rel=0.05)


def test_a_product_writes_its_matrices_in_either_order() -> None:
    def stream(graph: Graph) -> str:
        return node(graph, "sin").traffic.stream  # type: ignore[union-attr]

    assert stream(graph_of(lambda x, w: jnp.sin((x @ w).T), X, W)) == "elementwise"
    assert stream(graph_of(lambda x: jnp.sin(jnp.sort(x).T), X)) == "transpose"
    many = np.zeros((4, 256, 256), np.float32)

    def batched(*order: int) -> Graph:
        product = "bij,bjk->bik"
        return graph_of(lambda x: jnp.sin(jnp.einsum(product, x, x).transpose(order)), many)

    assert stream(batched(0, 2, 1)) == "elementwise"
    assert stream(batched(1, 2, 0)) == "transpose", "the batch has to come first"


def test_products_of_vectors_are_sums() -> None:
    vector = np.zeros((64, 256), np.float32)
    matrix = np.zeros((64, 256, 256), np.float32)
    graph = graph_of(lambda x, w: jnp.einsum("bi,bij->bj", x, w), vector, matrix)
    product = node(graph, "dot_general")
    assert product.work is None
    assert moved(graph) == matrix.nbytes + 2 * vector.nbytes
    outer = graph_of(lambda x, y: jnp.sin(jnp.einsum("bi,bj->bij", x, y)), vector, vector)
    assert node(outer, "dot_general").work is None
    large = np.zeros((4096, 4096), np.float32)
    assert node(graph_of(lambda x, w: x @ w, large[0], large), "dot_general").work is not None


def test_a_slice_that_several_kernels_read_is_copied() -> None:
    def fn(x, w, *, twice: bool):
        def trip(carry, row):
            carry = jnp.tanh(carry @ w) + row
            return (carry @ w) * row if twice else carry, None

        return jax.lax.scan(trip, x[0], x)[0]

    rows = np.zeros((8, 64, 1024), np.float32)

    def copied(twice: bool) -> bool:
        graph = graph_of(lambda x, w: fn(x, w, twice=twice), rows, W)
        return node(graph, "scan_slice").traffic is not None

    assert copied(True) and not copied(False)


def test_sums_of_16_bits_take_as_long_as_their_updates() -> None:
    """Or as those of a row, which wait for each other."""

    def written(dtype, num_targets: int) -> float:
        rows = np.zeros((4096, 256), dtype)
        index = np.zeros(4096, np.int32)
        graph = graph_of(lambda x, i: jax.ops.segment_sum(x, i, num_targets), rows, index)
        return node(graph, "scatter-add").traffic.num_bytes[-1]  # type: ignore[union-attr]

    assert written(jnp.bfloat16, 4096) == 4096 * 256 * 2
    assert written(jnp.bfloat16, 16) == 5e6 * (4096 / 16 - 1)
    assert written(np.float32, 16) == 16 * 256 * 4


def test_a_transposed_convolution_s_kernel_gradient_knows_the_zeros_of_its_input() -> None:
    def apart(stride: int, rank: int) -> set[int]:
        kernel = np.zeros((4,) * rank + (16, 8), np.float32)
        image = np.zeros((2, *(16,) * rank, 16), np.float32)
        letters = "HW"[:rank]
        names = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

        def loss(w, x):
            made = jax.lax.conv_transpose(x, w, (stride,) * rank, "SAME", dimension_numbers=names)
            return (made**2).sum()

        works = [n.work for n in graph_of(jax.grad(loss), kernel, image).nodes if n.work]
        return {work.apart for work in works if work.kind == "kernel-gradient"}

    assert apart(2, 2) == {4} and apart(2, 1) == {1}, "along one dimension they are written out"
    assert apart(1, 2) == {0}


def test_what_is_stacked_is_made_there() -> None:
    graph = graph_of(lambda x: jnp.concatenate([jnp.sin(x), jnp.cos(x)], 1), X)
    assert num_kernels(graph) == 1
    assert moved(graph) <= 4 * X.nbytes


def test_sorted_rows_take_longer_than_their_traffic() -> None:
    graph = graph_of(lambda x: jnp.sort(x, -1), X)
    assert node(graph, "sort").traffic.exposed > 10 * X.nbytes  # type: ignore[union-attr]


def test_a_sum_over_rows_joins_the_kernel_that_makes_them() -> None:
    def fn(x, w):
        y = jnp.tanh(x)
        return y @ w, y.sum(0)

    graph = graph_of(fn, X, W)
    assert num_kernels(graph) == 1
    assert moved(graph) == 2 * X.nbytes + 1024 * 4, "x is read once, y written, its sum too"
    assert node(graph, "reduce_sum").traffic.stream == "reduce-first"  # type: ignore[union-attr]


def test_what_is_kept_beside_a_result_is_written_by_the_same_kernel() -> None:
    graph = graph_of(lambda x: (jnp.tanh(x), jnp.tanh(x) * x), X)
    assert num_kernels(graph) == 1
    assert moved(graph) == 3 * X.nbytes


def test_an_update_is_one_kernel() -> None:
    """The parameter and its moment: gradient, both read, both written."""

    def step(state, batch):
        w, m = state

        def loss(w):
            return ((batch @ w) ** 2).sum()

        grad = jax.grad(loss)(w)
        m = 0.9 * m + grad
        return (w - 0.1 * m, m), batch.sum()

    graph = build_graph(trace_step(step, ((W, W), X), {}, batch_argnums=(1,)))
    updates = [n for n in graph.nodes if graph.values[n.results[0]].shape == W.shape]
    assert sum(n.traffic.num_kernels for n in updates if n.traffic) == 1
    assert sum(sum(n.traffic.num_bytes) for n in updates if n.traffic) == 5 * W.nbytes


def test_rows_that_are_scattered_are_moved_and_not_the_table() -> None:
    table, rows = np.zeros((100_000, 64), np.float32), np.zeros((128, 64), np.float32)
    chosen = np.zeros((128,), np.int32)
    graph = graph_of(lambda t, r, i: t.at[i].add(r), table, rows, chosen)
    traffic = node(graph, "scatter-add").traffic
    assert traffic is not None and traffic.stream == "scatter"
    assert max(traffic.num_bytes) <= rows.nbytes


def test_updates_share_zeros_and_join_the_kernel_of_their_own_gradient() -> None:
    """Scatters fill zeros of their own; those of `where` are one array for all parameters."""
    rows, chosen = np.zeros((128, 1024), np.float32), np.zeros((128,), np.int32)

    def step(state, rows):
        updated = []
        for weight, total in state:
            gradient = jnp.zeros_like(weight).at[chosen].add(rows)
            total = total + gradient * gradient
            scale = jnp.where(total > 0, jax.lax.rsqrt(total + 1e-7), 0.0)
            updated.append((weight + gradient * scale, total))
        return updated

    state = [(W, W) for _ in range(4)]
    graph = build_graph(trace_step(step, (state, rows), {}, batch_argnums=(1,)))
    made = [n.traffic for n in graph.nodes if n.name == "broadcast_in_dim" and n.traffic]
    assert sum(t.num_bytes[-1] == W.nbytes for t in made) == len(state) + 1
    traffic = [n.traffic for n in graph.nodes if n.region == "update" and n.traffic is not None]
    per_table = 6  # its weight and total twice each, the gradient and the zeros once
    assert sum(sum(t.num_bytes) for t in traffic) <= (4 * per_table + 1) * W.nbytes


def exposed(f, *args) -> float:
    """Arithmetic beyond the traffic, over the traffic."""
    traffic = [n.traffic for n in graph_of(f, *args).nodes if n.traffic is not None]
    return sum(t.exposed for t in traffic) / sum(sum(t.num_bytes) for t in traffic)


def test_arithmetic_counts_where_traffic_does_not_hide_it() -> None:
    assert exposed(lambda x: x + 1.0, X) < 0.01
    assert exposed(lambda x: x / 3.0, X) < 0.01  # a product
    half = X.astype(jnp.bfloat16)
    assert exposed(jnp.tanh, X) < 0.3 * exposed(jnp.tanh, half) < 0.3
    assert exposed(lambda x: jnp.tanh(x) + jnp.tanh(2 * x), half) > 1.5 * exposed(jnp.tanh, half)


def test_a_tile_that_holds_rows_between_two_sums_computes_and_moves_in_turn() -> None:
    """Per number: a load for the maximum and one for the difference, that, both sums, an
    exponential (6) and a quotient (8)."""
    per_number = (2 + 1 + 2 + 6 + 8) / 5.0  # instructions in the time of moving a byte
    softmax = exposed(lambda x: jax.nn.softmax(x), X)
    assert softmax == pytest.approx(per_number / 8, rel=0.05)
    assert exposed(lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True), X) < softmax / 5


def test_rows_of_odd_length_are_held_number_by_number() -> None:
    """26 instructions for each of the scores and of the result, padded to a power of two."""

    def seconds_as_bytes(length: int) -> float:
        scores = jax.ShapeDtypeStruct((2**14, length), jnp.bfloat16)
        traffic = [n.traffic for n in graph_of(jax.nn.softmax, scores).nodes if n.traffic]
        return sum(t.exposed for t in traffic) / (2**14 * length)

    held = seconds_as_bytes(197) - seconds_as_bytes(198)
    assert held == pytest.approx(2 * 26 * (256 / 197) / 5.0, rel=0.05)


def test_a_value_is_computed_again_for_every_other_index() -> None:
    once = exposed(lambda x: jnp.tanh(x)[:, 1:], X)
    shifted = exposed(lambda x: jnp.tanh(x)[:, 1:] + jnp.tanh(x)[:, :-1], X)
    assert shifted > 1.5 * once


@pytest.mark.parametrize("length", [64, 75])
def test_a_fourier_transform_passes_over_its_arrays_several_times(length: int) -> None:
    """Real numbers of odd length are packed and unpacked; the way back copies and scales."""
    pairs_bytes, real_bytes = 8 * 100 * (length // 2 + 1), 4 * 100 * length
    there = graph_of(jnp.fft.rfft, jnp.ones((100, length)))
    passes = 1 if length == 64 else 2 + SMOOTH
    assert moved(there, "fft") == pytest.approx(passes * PASS * (pairs_bytes + real_bytes))
    back = graph_of(lambda x: jnp.fft.irfft(x, length), jnp.ones((100, length // 2 + 1), "c8"))
    added = 2 * pairs_bytes + SCALED["IRFFT"] * 2 * real_bytes
    assert moved(back, "fft") - moved(there, "fft") == pytest.approx(added)


def test_a_ragged_product_copies_its_rows_for_every_group() -> None:
    """As compiled for an H100: a masked copy of each array of rows, read once and written for every
    group; in training another of it, transposed; and the matrices, transposed for the gradient."""
    groups = 4
    x, w = np.zeros((256, 64), np.float32), np.zeros((groups, 64, 128), np.float32)
    y, sizes = np.zeros((256, 128), np.float32), np.zeros(groups, np.int32)

    def pull(x, w, sizes, y):
        return jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)[1](y)

    alone = graph_of(jax.lax.ragged_dot, x, w, sizes)
    assert moved(alone, "ragged_dot_general") == (1 + groups) * x.nbytes
    assert sizes_of_products(alone) == {(1, 256, 128, groups * 64)}

    graph = graph_of(lambda *a: (jax.lax.ragged_dot(*a[:3]), pull(*a)), x, w, sizes, y)
    masked, turned = (1 + groups) * (x.nbytes + y.nbytes), 2 * groups * (x.nbytes + y.nbytes)
    assert moved(graph, "ragged_dot_general") == masked + turned + 2 * w.nbytes
    assert sizes_of_products(graph) == {
        (1, 256, 128, groups * 64),
        (1, 256, 64, groups * 128),
        (groups, 64, 128, 256),
    }


def sizes_of_products(graph: Graph) -> set[tuple]:
    return {sizes(graph, n)[1:] for n in graph.nodes if n.name == "ragged_dot_general"}


def test_small_constants_are_folded() -> None:
    def angles(x):
        return x * jnp.power(1e4, -jnp.arange(X.shape[-1]) / X.shape[-1]).astype(x.dtype)

    assert exposed(angles, X) < 0.01


def test_convolutions_in_groups_run_on_lanes() -> None:
    x, w = np.zeros((8, 32, 32, 64), np.float32), np.zeros((7, 7, 1, 64), np.float32)

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=64
        )

    assert exposed(conv, x, w) > 2.0


def test_a_trip_reads_its_part_of_a_stack() -> None:
    xs = np.zeros((64, 256, 256), np.float32)

    def scanned(xs):
        return jax.lax.scan(lambda carry, x: (jnp.tanh(carry + x), None), xs[0], xs)[0]

    moved = sum(
        n.weight * sum(n.traffic.num_bytes)
        for n in graph_of(scanned, xs).nodes
        if n.traffic is not None
    )
    assert moved < 4.5 * xs.nbytes  # the stack, the carry twice, and the first slice


def test_work_of_products_convolutions_and_their_gradients() -> None:
    graph = graph_of(
        lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
        np.zeros((4, 8, 16), np.float32),
        np.zeros((4, 16, 32), np.float32),
    )
    assert sizes(graph, node(graph, "dot_general")) == ("product", 4, 8, 32, 16)

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    images, patch = np.zeros((2, 8, 8, 4), np.float32), np.zeros((8, 8, 4, 16), np.float32)
    strided = graph_of(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (8, 8), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        images,
        patch,
    )  # a window larger than its result
    found = sizes(strided, node(strided, "conv_general_dilated"))
    assert found == ("forward", 2, 1, 4, 16, 64)

    x, w = np.zeros((2, 16, 16, 4), np.float32), np.zeros((3, 3, 4, 8), np.float32)
    graph = graph_of(jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1)), x, w)
    found = {sizes(graph, n) for n in graph.nodes if n.name == "conv_general_dilated"}
    assert found == {
        (kind, 2, 64, 4, 8, 9) for kind in ("forward", "input-gradient", "kernel-gradient")
    }


def sizes(graph: Graph, node: Node) -> tuple:
    work, values = node.work, (*node.operands, *node.results)
    assert work is not None
    found = []
    for dims in work.sizes:
        size = 1
        for position, dim in dims:
            size *= graph.values[values[position]].shape[dim]
        found.append(size)
    return work.kind, *found
