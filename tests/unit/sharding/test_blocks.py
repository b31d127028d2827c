"""Blocks of real train steps: what they promise, and where repeated layers become segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.blocks import Block, Blocks, Occurrence, check_blocks
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.spec import PARTIAL, WHOLE, Layout
from autopar.sharding.blocks import find_blocks, is_entry
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.problem import ShardingProblem, problem_on_mesh
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from examples.models import build

MODELS = [
    "moe-tiny",
    "llama-tiny-scan",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-tiny", "wresnet-tiny")),
]


def graph_of(name: str, **config) -> Graph:
    example = build(name, **config)
    arguments = (example.abstract_state(), example.abstract_batch(8))
    return build_graph(trace_step(example.train_step, arguments))


def problem_of(graph: Graph, shape: tuple[int, ...] = (2, 4)) -> ShardingProblem:
    mesh = mesh_of_cluster(ClusterSpec(1, 8, "h100-sxm"), shape)
    return problem_on_mesh(fold_graph(graph), mesh, {})


@pytest.fixture(scope="module", params=MODELS)
def found(request) -> tuple[ShardingProblem, Blocks]:
    problem = problem_of(graph_of(request.param))
    return problem, find_blocks(problem)


def finished(layout: Layout) -> Layout:
    return tuple(WHOLE if entry == PARTIAL else entry for entry in layout)


@pytest.mark.ci
def test_every_node_is_in_one_block_and_every_block_in_one_segment(found) -> None:
    problem, blocks = found
    check_blocks(blocks)
    assert blocks.num_nodes == len(problem.graph.nodes)
    graph = problem.graph
    for node, of in enumerate(graph.nodes):
        if is_entry(of):
            assert blocks.sequence[blocks.block_of_node[node]].entry == node


@pytest.mark.ci
def test_nothing_is_resharded_inside_a_block(found) -> None:
    """Whatever its strategy: each node reads what the block makes in the layout it is made in,
    but for the sums that a FINISH node adds up."""
    problem, blocks = found
    num_inner = 0
    for at, block in enumerate(blocks.blocks):
        for own in (one for one in blocks.sequence if one.block == at):
            num_inner += check_flow(problem, block, own)
    assert num_inner > len(problem.graph.nodes) / 2  # most edges are inside of blocks


def check_flow(problem: ShardingProblem, block: Block, own: Occurrence) -> int:
    graph = problem.graph
    place = {n: i for i, n in enumerate(own.nodes)}
    num_edges = 0
    for strategy in block.strategies:
        taken = [
            problem.strategies[problem.classes[n]][j]
            for n, j in zip(own.nodes, strategy.nodes, strict=True)
        ]
        num_edges = 0
        for n, reads in zip(own.nodes, taken, strict=True):
            for position, value in enumerate(graph.nodes[n].operands):
                maker, result = graph.producer[value]
                if maker not in place or (graph.nodes[n].kind is NodeKind.MERGE and maker > n):
                    continue
                num_edges += 1
                made, read = taken[place[maker]].results[result], reads.operands[position]
                summed = graph.nodes[n].kind is NodeKind.FINISH and read == finished(made)
                assert made == read or summed, (block.name, graph.nodes[n].name)
    return num_edges


def test_strategies_are_those_of_the_entry_and_most_of_them(found) -> None:
    problem, blocks = found
    for block in blocks.blocks:
        every = problem.strategies[block.owner]
        assert problem.classes[block.entry] == block.owner
        indices = [s.index for s in block.strategies]
        assert indices == sorted(set(indices)) and indices[-1] < len(every)
        assert [s.nodes[0] for s in block.strategies] == indices
        assert 0.6 * len(every) <= block.num_strategies <= len(every)


def test_occurrences_of_a_block_correspond_node_by_node(found) -> None:
    problem, blocks = found
    graph = problem.graph
    for own in blocks.sequence:
        first = blocks.blocks[own.block]
        assert [problem.classes[n] for n in own.nodes] == [problem.classes[n] for n in first.nodes]
        assert [graph.nodes[n].name for n in own.nodes] == [
            graph.nodes[n].name for n in first.nodes
        ]


@pytest.mark.ci
def test_a_layer_of_gpt_is_its_products() -> None:
    """Norms, activations, residuals, casts and biases follow from products."""
    problem = problem_of(graph_of("gpt-tiny", num_layers=5))
    blocks = find_blocks(problem)
    forward = max(
        blocks.segments, key=lambda s: s.count * len(s.blocks) * _is(blocks, s, "forward")
    )
    modules = [blocks.blocks[b].module.split("/", 2)[-1] for b in forward.blocks]
    assert forward.count == 5
    assert [m.rpartition("/")[2] for m in modules] == [
        "qkv", "bqnd,bknd->bnqk", "bnqk,bknd->bqnd", "out", "up", "down",
    ]  # fmt: skip
    backward = max(blocks.segments, key=lambda s: s.count * _is(blocks, s, "backward"))
    assert (backward.count, len(backward.blocks)) == (4, 12)
    entries = [blocks.blocks[b].operator for s in (forward, backward) for b in s.blocks]
    assert set(entries) == {"dot_general"}
    # The optimizer's update of a kernel follows from the product that makes its gradient.
    names = {problem.graph.nodes[n].region for n in blocks.blocks[backward.blocks[0]].nodes}
    assert "update" in names
    for number, own in enumerate(blocks.occurrences(forward)):
        assert all(f"layer_{number}" in problem.graph.nodes[one.entry].module for one in own)


def _is(blocks: Blocks, segment, region: str) -> bool:
    return all(blocks.blocks[b].region == region for b in segment.blocks)


@pytest.mark.slow
def test_blocks_of_twelve_layers_are_those_of_five() -> None:
    """Arguments are sorted by name, layer_10 before layer_2: that changes nothing."""
    few, many = (find_blocks(problem_of(graph_of("gpt-tiny", num_layers=n))) for n in (5, 12))
    assert len(few.blocks) == len(many.blocks)
    counts = [[s.count for s in own.segments] for own in (few, many)]
    assert counts[0] == [1, 5, 1, 4, 1]
    assert counts[1] == [1, 12, 1, 11, 1]


def test_an_operator_that_few_strategies_reach_begins_a_block() -> None:
    """A product's rows and columns are merged: only the rows' split goes through."""

    def step(w, x):
        y = jnp.tanh(x @ w)
        return jnp.tanh(y.reshape(-1)) * 2.0

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (64, 16))]
    problem = problem_of(build_graph(trace_step(step, tuple(args))))
    blocks = find_blocks(problem)
    assert [b.operator for b in blocks.blocks] == ["dot_general", "reshape"]
    assert [problem.graph.nodes[n].name for n in blocks.blocks[1].nodes].count("tanh") == 1


@pytest.mark.ci
def test_equal_layers_that_are_not_folded_are_one_segment() -> None:
    """Two layers are two decisions, yet alike."""
    graph = graph_of("gpt-tiny")
    problem = problem_of(graph)
    assert len(set(problem.classes)) == len(graph.nodes)
    blocks = find_blocks(problem)
    assert all(block.count == 1 for block in blocks.blocks)
    repeated = [s for s in blocks.segments if s.count == 2]
    assert [len(s.blocks) for s in repeated] == [6]
