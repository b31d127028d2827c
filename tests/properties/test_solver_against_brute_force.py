"""The solver's objective, against every combination of strategies of random tiny programs.

Costs are computed here again from the definitions: work by the roofline, communication by
`reshard_table`, which `test_reshard` tests.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost.compute import tie_break_s
from autopar.cost.reshard import reshard_table
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.spec import Layout, num_shards
from autopar.sharding.fold import fold_repeated_layers
from autopar.sharding.problem import build_problem
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.sharding.strategies import Strategy
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

MOST_COMBINATIONS = 2_000_000

# -- random programs: (operation, operands), each a new value after the inputs

OPERATIONS = {
    "dot": jnp.dot,
    "add": jnp.add,
    "mul": jnp.multiply,
    "tanh": jnp.tanh,
    "transpose": jnp.transpose,
    "sum0": lambda a: a.sum(axis=0),
    "sum": jnp.sum,
}
Program = list[tuple[str, tuple[int, ...]]]


def applicable(shapes: list[tuple[int, ...]]) -> Program:
    found: Program = []
    for a, shape in enumerate(shapes):
        if shape:
            found += [("tanh", (a,)), ("sum", (a,))]
        if len(shape) == 2:
            found += [("transpose", (a,)), ("sum0", (a,))]
        for b, other in enumerate(shapes):
            if len(shape) == len(other) == 2 and shape[1] == other[0]:
                found += [("dot", (a, b))] * 3  # the real decisions
            if shape == other and a <= b:
                found += [("add", (a, b)), ("mul", (a, b))]
    return found


@st.composite
def graphs(draw) -> Graph:
    sizes = st.sampled_from([2, 3, 4, 8])
    m, k, n = draw(sizes), draw(sizes), draw(sizes)
    inputs = [(m, k), draw(st.sampled_from([(k, n), (m, k), (k, k)]))]
    shapes, program = list(inputs), []
    for _ in range(draw(st.integers(2, 5))):
        step = draw(st.sampled_from(applicable(shapes)))
        abstract = [jax.ShapeDtypeStruct(shapes[i], jnp.float32) for i in step[1]]
        shapes.append(jax.eval_shape(OPERATIONS[step[0]], *abstract).shape)
        program.append(step)
    updates = [i for i in range(len(inputs), len(shapes)) if shapes[i] == inputs[0]]
    is_train_step = bool(updates) and draw(st.booleans())

    def function(state, batch):
        values = [state, batch]
        for name, operands in program:
            values.append(OPERATIONS[name](*(values[i] for i in operands)))
        return (state - values[updates[-1]], values[-1]) if is_train_step else values[-1]

    graph = graph_of(function, *inputs)
    assert graph.state or not is_train_step
    return graph


def graph_of(function, *shapes) -> Graph:
    args = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: type(s[0]) is int
    )
    return build_graph(trace_step(function, args))


@st.composite
def meshes(draw) -> LogicalMesh:
    shape = draw(st.sampled_from([(2,), (4,), (2, 2)]))
    if draw(st.booleans()):
        return mesh_of_cluster(ClusterSpec(2, prod(shape) // 2, "cpu"), shape)
    alpha = tuple(draw(st.sampled_from([0.0, 1.0, 50.0])) for _ in shape)
    beta = tuple(draw(st.sampled_from([0.1, 1.0, 3.0])) for _ in shape)
    return LogicalMesh(shape, alpha=alpha, beta=beta)


# -- costs from the definitions, and every combination


def node_cost(graph: Graph, mesh: LogicalMesh, node: Node, strategy: Strategy) -> float:
    layouts = (*strategy.operands, *strategy.results)
    values = [graph.values[v] for v in (*node.operands, *node.results)]
    held = sum(
        graph.values[v].num_bytes / num_shards(layout, mesh.shape)
        for v, layout in zip(node.results, strategy.results, strict=True)
    )
    seconds = tie_break_s(mesh, held)
    if mesh.device is not None and node.kind is NodeKind.OP:
        moved = sum(
            touched / num_shards(layout, mesh.shape)
            for touched, layout in zip(node.touched_bytes, layouts, strict=True)
        )
        ways = prod(n for n, f in zip(mesh.shape, strategy.factors, strict=True) if f >= 0)
        assert {v.dtype for v in values} == {"float32"}
        peak = mesh.device.flops_32bit * mesh.device.efficiency
        seconds += max(node.flops / ways / peak, moved / mesh.device.memory_bandwidth)
    return seconds


def edge_costs(
    graph: Graph, mesh: LogicalMesh, value: int, deferred: bool, sources: list, targets: list
) -> np.ndarray:
    info = graph.values[value]
    share = 0.25 if deferred and mesh.device is not None else 1.0
    table = reshard_table(mesh, info.shape, float(info.num_bytes), True, share)
    return np.array([[table.cost(s, t) for t in targets] for s in sources])


def all_edges(graph: Graph) -> list[tuple[int, int, int, int, int, bool]]:
    """(value, producer, result index, reader, operand index or −1 for the state's input, deferred)
    for every place that needs a layout."""
    found = []
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            producer, result = graph.producer[value]
            found.append((value, producer, result, index, position, graph.values[value].deferred))
    for i, o in graph.state:
        producer, result = graph.producer[graph.outputs[o]]
        reader, _ = graph.producer[graph.inputs[i]]
        if producer != reader:
            found.append((graph.outputs[o], producer, result, reader, -1, True))
    return found


def layout_read(strategy: Strategy, position: int) -> Layout:
    return strategy.results[0] if position == -1 else strategy.operands[position]


def brute_force(graph: Graph, mesh: LogicalMesh, strategies: list[list[Strategy]]) -> float:
    counts = [len(own) for own in strategies]
    total = np.zeros(counts)
    for index, node in enumerate(graph.nodes):
        own = np.array([node_cost(graph, mesh, node, s) for s in strategies[index]])
        total += own.reshape([-1 if i == index else 1 for i in range(len(counts))])
    for value, u, result, v, position, deferred in all_edges(graph):
        sources = [s.results[result] for s in strategies[u]]
        targets = [layout_read(s, position) for s in strategies[v]]
        matrix = edge_costs(graph, mesh, value, deferred, sources, targets)
        matrix = matrix if u < v else matrix.T
        total += matrix.reshape([n if i in (u, v) else 1 for i, n in enumerate(counts)])
    return float(total.min())


def objective_of(solution: GraphSharding) -> float:
    """The cost of the chosen strategies, summed here."""
    graph, mesh, chosen = solution.graph, solution.mesh, solution.strategies
    total = sum(node_cost(graph, mesh, n, s) for n, s in zip(graph.nodes, chosen, strict=True))
    for value, u, result, v, position, deferred in all_edges(graph):
        assert u != v
        source, target = chosen[u].results[result], layout_read(chosen[v], position)
        total += float(edge_costs(graph, mesh, value, deferred, [source], [target])[0, 0])
    return total


@settings(deadline=None, max_examples=150)
@given(graphs(), meshes())
def test_objective_is_the_least_of_all_combinations(graph: Graph, mesh: LogicalMesh) -> None:
    nodes = list(range(len(graph.nodes)))
    problem = build_problem(graph, mesh, nodes, {})
    strategies = [problem.strategies[n] for n in nodes]
    assume(prod(map(len, strategies)) <= MOST_COMBINATIONS)
    solution = solve_graph(graph, mesh, fold=False)
    assert solution.objective == pytest.approx(brute_force(graph, mesh, strategies), rel=1e-7)
    assert solution.objective == pytest.approx(objective_of(solution), rel=1e-7)
    assert solution.gap == 0


@settings(deadline=None, max_examples=20)
@given(graphs(), meshes())
def test_objective_is_the_cost_of_what_was_chosen(graph: Graph, mesh: LogicalMesh) -> None:
    """Also where trying all combinations would take too long, and whether folded or not."""
    for fold in (True, False):
        solution = solve_graph(graph, mesh, fold=fold)
        assert solution.objective == pytest.approx(objective_of(solution), rel=1e-7)


# -- equal layers


def stack_graph(num_layers: int, batch_size: int, width: int, hidden: int) -> Graph:
    """A train step of `num_layers` equal layers of two products each."""

    def loss(params, x):
        for first, second in params:
            x = x + jnp.dot(jnp.tanh(jnp.dot(x, first)), second)
        return (x**2).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = [((width, hidden), (hidden, width))] * num_layers
    return graph_of(step, params, (batch_size, width))


UNIFORM = {"data-parallel": (256, 8, 16), "tensor-parallel": (8, 64, 256)}
COMMUNICATION = LogicalMesh((4,))
CPU = mesh_of_cluster(ClusterSpec(1, 4, "cpu"), (4,))


@pytest.mark.parametrize("mesh", [COMMUNICATION, CPU], ids=["communication", "cpu"])
@pytest.mark.parametrize("sizes", UNIFORM.values(), ids=UNIFORM)
@pytest.mark.parametrize("num_layers", [6, 8])
def test_folding_loses_nothing_where_the_optimum_is_uniform(num_layers, sizes, mesh) -> None:
    graph = stack_graph(num_layers, *sizes)
    folded, unfolded = (solve_graph(graph, mesh, fold=f) for f in (True, False))
    assert folded.stats.num_classes < unfolded.stats.num_classes == len(graph.nodes)
    assert objective_of(folded) == pytest.approx(unfolded.objective, rel=1e-7)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(COMMUNICATION, id="communication"),
        pytest.param(
            CPU,
            id="cpu",
        ),
    ],
)
def test_folded_objective_is_that_of_all_layers(mesh) -> None:
    folded = solve_graph(stack_graph(6, *UNIFORM["data-parallel"]), mesh, fold=True)
    assert folded.objective == pytest.approx(objective_of(folded), rel=1e-7)


@pytest.mark.ci
@settings(deadline=None, max_examples=10)
@given(
    st.sampled_from([4, 8, 64]), st.sampled_from([3, 8, 32]), st.sampled_from([3, 8, 64]), meshes()
)
def test_folding_is_a_restriction(batch_size, width, hidden, mesh) -> None:
    graph = stack_graph(6, batch_size, width, hidden)
    assert len(set(fold_repeated_layers(graph))) < len(graph.nodes)
    folded, unfolded = (solve_graph(graph, mesh, fold=f) for f in (True, False))
    assert objective_of(folded) >= unfolded.objective * (1 - 1e-9)
