"""What is in memory when, on small programs whose XLA buffers are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Graph, NodeKind
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(fn, *args, overlaps: bool = False, **options) -> Graph:
    return build_graph(trace_step(fn, args, **options), overlaps=overlaps)


def lives_by_op(graph: Graph) -> dict[str, list[tuple[int, int, tuple[int, ...]]]]:
    """Name of the op that made it -> (start, end, shape) of what is in memory, inputs left out."""
    found: dict[str, list] = {}
    for life in graph.liveness.lives:
        node = graph.nodes[graph.producer[life.value][0]]
        if node.kind is NodeKind.INPUT:
            continue
        if node.kind is NodeKind.FINISH:
            node = graph.nodes[graph.producer[node.operands[0]][0]]
        shape = graph.values[life.value].shape
        found.setdefault(node.name, []).append((life.start, life.end, shape))
    return found


def train(loss_of):
    def step(w, x):
        return jax.tree.map(lambda p, g: p - g, w, jax.grad(lambda w: loss_of(w, x))(w))

    return step


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


def test_a_dear_activation_that_both_passes_need_is_kept_where_it_is_small() -> None:
    """In bfloat16, writing a tanh moves less than computing it again costs; in float32 not."""

    def loss_of(w, x):
        h = x @ w
        return jnp.sum((h * (1 + jnp.tanh(h + h**3))) @ w).astype(jnp.float32)

    def kept(dtype) -> bool:
        args = (array(64, 64, dtype=dtype), array(64, 64, dtype=dtype))
        return "tanh" in lives_by_op(graph_of(train(loss_of), *args))

    assert kept(jnp.bfloat16) and not kept(jnp.float32)


def test_an_elementwise_result_takes_over_the_buffer_it_is_last_to_read() -> None:
    graph = graph_of(lambda x: jnp.cumsum(jnp.exp(jnp.sort(x))), array(64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, _),) = lives["sort"], lives["exp"]
    assert end < start


def test_nothing_takes_over_the_buffer_of_a_product() -> None:
    """cuBLAS returns it with a workspace, and XLA lets no kernel have a part of such a pair."""
    graph = graph_of(lambda w, x: jnp.sort(jnp.exp(x @ w)), array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, _),) = lives["dot_general"], lives["exp"]
    assert end == start


@pytest.mark.parametrize("epilogue", ["add", "mul"])
def test_cublas_adds_to_a_product_and_multiplies_it_itself(epilogue: str) -> None:
    def fn(w, x, y):
        product = x @ w
        return jnp.sort(product + jnp.sort(y) if epilogue == "add" else 3 * product)

    graph = graph_of(fn, array(64, 32), array(32, 64), array(32, 32))
    lives = lives_by_op(graph)
    assert "dot_general" not in lives and len(lives[epilogue]) == 1
    if epilogue == "add":  # in place of the other addend
        assert all(end < lives["add"][0][0] for _, end, _ in lives["sort"][:1])


def test_what_else_reads_a_product_keeps_it_apart_from_its_sum() -> None:
    def fn(w, x, y):
        product = x @ w
        return jnp.sort(product + jnp.sort(y)), jnp.sort(product)

    graph = graph_of(fn, array(64, 32), array(32, 64), array(32, 32))
    lives = lives_by_op(graph)
    assert len(lives["dot_general"]) == len(lives["add"]) == 1


def test_of_two_products_that_are_added_the_first_waits_for_the_second() -> None:
    """So its operands are kept until then."""

    def fn(w, x):
        first, second = jnp.sort(x), jnp.sort(w)
        early = first @ second
        return jnp.sort(early.T + (jnp.sort(second) @ jnp.sort(first)).T)

    graph = graph_of(fn, array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    (add,) = [i for i, n in enumerate(graph.nodes) if n.name == "add"]
    assert [end >= add for _, end, _ in lives["sort"][:2]] == [True, True]
    assert len(lives["dot_general"]) == 1 and "transpose" not in lives


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


def test_a_gradient_is_not_made_in_place_of_logits_that_its_kernel_also_sums() -> None:
    """Picking the target's logit waits for nothing, so XLA puts it into the kernel that makes the
    gradient. A bias's gradient, if there is one, is there instead, and the buffer is shared."""

    classes = 2**15  # no Triton kernel takes such a row as a whole

    def overlap(with_bias: bool) -> bool:
        def loss_of(w, x):
            logits = x @ w["w"] + (w["b"] if with_bias else 0.0)
            is_target = jnp.arange(classes) == 3
            target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - target)

        weights = {"w": array(32, classes), "b": array(classes)}
        graph = graph_of(train(loss_of), weights, array(128, 32))
        found = sorted(
            (life.start, life.end)
            for life in graph.liveness.lives
            if graph.values[life.value].shape == (128, classes)
        )
        assert len(found) == 2
        return found[0][1] >= found[1][0]

    assert overlap(with_bias=False) and not overlap(with_bias=True)


def test_a_scatter_changes_its_array_in_place() -> None:
    graph = graph_of(lambda w, x: jnp.sort((x @ w).at[3].add(1.0)), array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    ((_, end, _),), ((start, _, _),) = lives["dot_general"], lives["scatter-add"]
    assert end < start


def test_a_scatter_into_zeros_is_made_in_what_it_is_added_to() -> None:
    """The gradient of picking the target's logits: XLA scatters into the gradient of the softmax,
    so that neither the zeros nor their sum with the picks take memory."""
    classes = 2**15

    def loss_of(w, x):
        logits = x @ w
        target = jnp.take_along_axis(logits, jnp.full((128, 1), 3), axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - target)

    graph = graph_of(train(loss_of), array(32, classes), array(128, 32))
    assert any(n.name == "scatter-add" for n in graph.nodes)
    large = {
        name
        for name, lives in lives_by_op(graph).items()
        for _, _, shape in lives
        if shape == (128, classes)
    }
    assert large == {"dot_general", "add_any"}


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
    # One for the scatter, whose result takes it over, and one for the update.
    made = [*lives["broadcast_in_dim"], *lives.get("convert_element_type", [])]
    assert sum(shape == (4096, 64) for _, _, shape in made) == (2 if other == 0 else 1)


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
