from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autopar.cost.memory import memory_profile
from autopar.cost.reordered_copies import reordered_copies
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def peak(graph: Graph, mesh: LogicalMesh, layouts: list) -> float:
    return memory_profile(graph, mesh, layouts).peak_bytes


KIB = 1024


def layouts_by(graph: Graph, layout_of) -> list:
    """One layout per value, the same wherever it is read."""
    shapes = [v.shape for v in graph.values]
    return [
        tuple(tuple(layout_of(shapes[v]) for v in values) for values in (n.operands, n.results))
        for n in graph.nodes
    ]


def test_peak_is_what_lives_at_once() -> None:
    """Inputs stay; the product lives until it is sorted, with what it is sorted into."""
    graph = build_graph(
        trace_step(lambda a, b: jnp.sort(a @ b)[:, :1], (array(64, 8), array(8, 64)))
    )
    mesh = LogicalMesh((2,))
    whole = layouts_by(graph, lambda shape: (WHOLE,))
    assert peak(graph, mesh, whole) == (2 + 2 + 16 + 16) * KIB
    by_rows = layouts_by(graph, lambda shape: (0,) if shape[0] == 64 else (WHOLE,))
    assert peak(graph, mesh, by_rows) == (1 + 2 + 8 + 8) * KIB


def test_state_is_updated_in_place() -> None:
    """16 KiB of state, 16 KiB of batch, and of results only the sum's four bytes, as long as the
    state is donated."""

    def of(**options) -> float:
        args = (array(64, 64), array(64, 64))
        graph = build_graph(trace_step(lambda w, x: (w + x, x.sum()), args, **options))
        whole = layouts_by(graph, lambda shape: (WHOLE,))
        return peak(graph, LogicalMesh((2,)), whole)

    assert of(donate_argnums=(0,)) == pytest.approx(32 * KIB, abs=8)
    assert of(donate_argnums=()) == pytest.approx(48 * KIB, abs=8)


def test_a_gathered_parameter_takes_room_beside_its_shard() -> None:
    graph = build_graph(trace_step(lambda w, x: (w + 1, x @ w), (array(64, 64), array(64, 64))))
    mesh = LogicalMesh((2,))
    split = layouts_by(graph, lambda shape: (0,))
    use = next(i for i, n in enumerate(graph.nodes) if n.kind is NodeKind.USE)
    gathered = [(((WHOLE,),), ((WHOLE,),)) if i == use else own for i, own in enumerate(split)]
    extra = peak(graph, mesh, gathered) - peak(graph, mesh, split)
    assert extra == 16 * KIB


def train(w, x):
    """Two layers, so that the second's parameter is needed late forward and early backward."""

    def loss_of(w):
        return (jnp.tanh(x @ w["a"]) @ w["b"]).sum()

    return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss_of)(w))


def test_what_the_backward_pass_fetches_again_is_not_kept_between() -> None:
    state = {"a": array(512, 512), "b": array(512, 512)}
    graph = build_graph(trace_step(train, (state, array(8, 512))))
    mesh = LogicalMesh((4,))
    # Parameters are kept split and used whole; a copy is made for each reader.
    layouts = []
    for node in graph.nodes:
        shapes = [graph.values[v].shape for v in node.results]
        parameter = node.kind in (NodeKind.INPUT, NodeKind.USE) and shapes == [(512, 512)]
        own = (0,) if parameter else (WHOLE,)
        layouts.append(((own,) * len(node.operands), (own,) * len(node.results)))
    kept = memory_profile(graph, mesh, layouts)
    again = memory_profile(graph, mesh, layouts, refetch=True)
    copies = [h for h in kept.holdings if h.is_copy and h.num_bytes == 1024 * KIB]
    assert copies and max(h.end - h.start for h in copies) > 0
    assert again.peak_bytes <= kept.peak_bytes
    spans = [h.end - h.start for h in again.holdings if h.is_copy]
    assert max(spans) < max(h.end - h.start for h in copies)


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_a_collective_sends_is_written_first(is_fused: bool) -> None:
    """An elementwise value that a product reads split in another way. What is in memory anyway is
    sent from there."""

    def fn(x, w):
        made = jnp.sort(x)
        return jnp.sum(made) if not is_fused else None, (2 * made if is_fused else made) * w

    graph = build_graph(trace_step(fn, (array(64, 64), array(64, 64))))
    mesh = LogicalMesh((2,))
    layouts = layouts_by(graph, lambda shape: (0,) if len(shape) == 2 else (WHOLE,))
    last = max(i for i, n in enumerate(graph.nodes) if n.name == "mul")
    layouts[last] = (((1,), (0,)), ((0,),))
    sent = graph.nodes[last].operands[0]
    found = [h for h in memory_profile(graph, mesh, layouts).holdings if h.is_copy]
    assert [(h.value, h.num_bytes) for h in found] == [(sent, 8 * KIB)] * (1 + is_fused)


@pytest.mark.parametrize("sends", [False, True])
def test_nothing_is_late_in_a_stage_whose_backward_pass_sends_nothing(sends: bool) -> None:
    graph = build_graph(trace_step(train, ({"a": array(64, 64), "b": array(64, 64)}, array(8, 64))))
    nothing = replace(graph.liveness, lives=())
    graph = replace(graph, liveness=replace(graph.liveness, unhidden=nothing))
    layouts = layouts_by(graph, lambda shape: (0,) if len(shape) == 2 else (WHOLE,))
    if sends:
        index = next(i for i, n in enumerate(graph.nodes) if n.region == "backward" and n.operands)
        operands, results = layouts[index]
        layouts[index] = (tuple((1,) for _ in operands), results)
    assert bool(memory_profile(graph, LogicalMesh((2,)), layouts).peak_bytes) == sends


@pytest.mark.parametrize("sent", ["operand in a trip", "sum of a trip", "operand after all"])
@pytest.mark.parametrize("runs_alone", [False, True])
def test_a_trip_hides_what_it_sends_itself(sent: str, runs_alone: bool) -> None:
    """Not what is sent after the loop, as are sums that it only adds up: XLA reduces them there, if
    the trips are one program."""

    def step(w, batch):
        made, pull = jax.vjp(lambda w: w @ w, w)

        def body(total, rows):
            return total + jax.grad(lambda m: jnp.sum(jnp.tanh(rows @ m)))(made), None

        total, _ = jax.lax.scan(body, jnp.zeros_like(w), batch)
        return w - pull(total)[0]

    graph = build_graph(trace_step(step, (array(64, 64), array(4, 8, 64))))
    liveness = replace(graph.liveness, runs_alone=runs_alone, unhidden=None)
    nothing = replace(liveness, lives=())
    graph = replace(graph, liveness=replace(liveness, unhidden=nothing))
    layouts = layouts_by(graph, lambda shape: (0,) if shape else (WHOLE,))
    products = [
        i for i, n in enumerate(graph.nodes) if n.region == "backward" and n.name == "dot_general"
    ]
    inside = [i for i in products if graph.nodes[i].weight == 4]
    assert inside and max(products) not in inside
    index = max(products) if sent == "operand after all" else inside[-1]
    if sent == "sum of a trip":
        (index,) = [
            i
            for i, n in enumerate(graph.nodes)
            if n.kind is NodeKind.FINISH and n.operands[0] == graph.nodes[index].results[0]
        ]
    operands, results = layouts[index]
    layouts[index] = (((WHOLE,), *operands[1:]), results)
    found = memory_profile(graph, LogicalMesh((2,)), layouts).holdings
    is_hidden = sent == "operand in a trip" or (sent == "sum of a trip" and runs_alone)
    assert any(not h.is_copy for h in found) == is_hidden


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_reduction_that_splits_an_inner_dimension_reorders_what_is_combined_with_it(dim) -> None:
    """As a norm's gradient combines the gradient of its result with what it normalized."""

    def step(w, x):
        def loss_of(w):
            scaled = x * w["scale"]
            centered = scaled - jnp.mean(scaled, axis=-1, keepdims=True)
            normal = centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True))
            return jnp.sum((normal @ w["a"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss_of)(w))

    state = {"a": array(64, 64), "scale": array(64)}
    graph = build_graph(trace_step(step, (state, array(4, 16, 64))))
    mesh = LogicalMesh((2,))
    layouts = layouts_by(graph, lambda shape: (WHOLE,))

    def split(index: int) -> list:
        made = graph.producer[graph.nodes[index].operands[0]][0]
        changed = list(layouts)
        changed[made] = (layouts[made][0], ((PARTIAL,),))
        changed[index] = (((dim,),), ((dim,),))
        return changed

    products = {i for i, n in enumerate(graph.nodes) if n.name == "dot_general"}
    finishes = [
        i
        for i, n in enumerate(graph.nodes)
        if n.kind is NodeKind.FINISH
        and graph.producer[n.operands[0]][0] in products
        and len(graph.values[n.operands[0]].shape) == 3
    ]
    found = [list(reordered_copies(graph, mesh, split(index))) for index in finishes]
    assert any(found) == (dim > 0)
