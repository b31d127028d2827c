"""From strategies to layouts on the program: where operands are moved, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import _jax
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.program_sharding import Chain, EquationSharding, ProgramSharding
from autopar.ir.spec import PARTIAL, WHOLE, Layout
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.lower.assign import assign_layouts
from autopar.sharding.solve import solve_graph
from autopar.sharding.strategies import Strategy, enumerate_strategies
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from examples.models import build

MESH = LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))
NONE, ROWS, COLUMNS = (WHOLE, WHOLE), (0, WHOLE), (WHOLE, 1)
X = np.ones((8, 16), np.float32)
W = np.ones((16, 8), np.float32)
SQUARE = np.ones((16, 16), np.float32)

Choice = Callable[[Graph, Node, list[Strategy]], Strategy]


def whole(graph: Graph, node: Node, strategies: list[Strategy]) -> Strategy:
    del graph, node
    return next(s for s in strategies if max(s.factors, default=-1) < 0)


def choosing(**layouts: tuple[list[Layout], list[Layout]]) -> Choice:
    """The strategy of given (operand, result) layouts for nodes of a name, else everything whole;
    `input_<path>` names an input."""

    def choose(graph: Graph, node: Node, strategies: list[Strategy]) -> Strategy:
        name = node.name
        if node.kind is NodeKind.INPUT:
            name = f"input_{graph.values[node.results[0]].path}"
        if name not in layouts:
            return whole(graph, node, strategies)
        operands, results = layouts[name]
        return next(s for s in strategies if [*s.operands] == operands and [*s.results] == results)

    return choose


def assign(fn: Any, args: Any, choose: Choice) -> tuple[TracedStep, ProgramSharding]:
    step = trace_step(fn, args)
    graph = build_graph(step)
    layouts = []
    for node in graph.nodes:
        strategy = choose(graph, node, list(enumerate_strategies(node.rule, MESH.shape)))
        layouts.append((strategy.operands, strategy.results))
    return step, assign_layouts(step.program, graph, layouts, MESH)


def find(step: TracedStep, sharding: ProgramSharding, name: str) -> EquationSharding:
    names = [e.name for e in step.program.equations]
    return sharding.equations[names.index(name)]


def all_layouts(sharding: ProgramSharding) -> Iterator[Layout]:
    yield from (layout for layout in sharding.inputs if layout is not None)
    for chain in sharding.outputs:
        yield from chain
    for equation in sharding.equations:
        for chain in (*equation.operands, *equation.results):
            yield from chain
        for body in equation.bodies:
            yield from all_layouts(body)


def test_nothing_moves_where_layouts_agree() -> None:
    step, sharding = assign(lambda a, b: jnp.sin(a) @ b, (X, W), whole)
    assert sharding.inputs == (NONE, NONE)
    for equation in sharding.equations:
        assert all(chain == () for chain in equation.operands)
        assert equation.results == ((NONE,),)
    assert sharding.outputs == ((),)
    del step


def test_operands_are_taken_where_the_strategy_wants_them() -> None:
    split = choosing(dot_general=([ROWS, COLUMNS], [(0, 1)]), input_b=([], [(0, WHOLE)]))
    step, sharding = assign(lambda a, b: a @ b, (X, W), split)
    product = find(step, sharding, "dot_general")
    assert sharding.inputs == (NONE, (0, WHOLE))
    assert product.operands[0] == (ROWS,), "a slice"
    assert product.operands[1][-1] == COLUMNS, "a gather along x and a slice along y"
    assert len(product.operands[1]) == 2
    # The product leaves its result as it lies; the node that finishes it gathers.
    assert product.results[0][-1] == NONE


def test_partial_sums_are_finished_in_steps_that_can_be_written_down() -> None:
    # Both axes on the contracted dimension: an all-reduce, or a reduce-scatter to a split result.
    contracted = [(1, 1), (0, 0)]
    for target, last in ((NONE, NONE), ((0, 1), (0, 1)), ((0, 0), (0, 0))):
        choose = choosing(
            dot_general=(contracted, [(PARTIAL, PARTIAL)]), finish=([target], [target])
        )
        step, sharding = assign(lambda a, b: a @ b, (X, W), choose)
        product = find(step, sharding, "dot_general")
        assert product.operands == (((1, 1),), ((0, 0),))
        assert product.results[0][-1] == last
        assert all(PARTIAL not in layout for layout in all_layouts(sharding))


@pytest.mark.parametrize(
    ("target", "chain"),
    [
        ((1, 1), ((1, WHOLE), (1, 1))),  # the features get a second axis: only after the gather
        ((1, WHOLE), ((1, WHOLE),)),
        ((1, 0), ((1, 0),)),
    ],
)
def test_a_gather_makes_its_own_layout_first(target: Layout, chain: Chain) -> None:
    """With the last layout alone, XLA of JAX 0.11 aborts the process."""
    table, ids = np.arange(128.0, dtype=np.float32).reshape(16, 8), np.arange(8)[:, None] * 3

    def lookup(table: Any, ids: Any) -> Any:
        numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
        return lax.gather(table, ids, numbers, (1, 8), mode=lax.GatherScatterMode.CLIP)

    split = [(1, 0), (WHOLE, WHOLE)]  # features along x, rows along y
    choose = choosing(gather=(split, [(1, PARTIAL)]), finish=([target], [target]))
    step, sharding = assign(lookup, (table, ids), choose)
    assert find(step, sharding, "gather").results == (chain,)
    devices = _jax.fresh_mesh(np.array(jax.devices()).reshape(2, 4), MESH.axis_names)
    (got,) = jax.jit(annotated_function(step.program, sharding, devices))(table, ids)
    np.testing.assert_array_equal(got, lookup(table, ids))


def test_state_leaves_as_it_came() -> None:
    def train(params: Any, batch: Any) -> Any:
        loss = lambda p: jnp.sum(jnp.tanh(batch @ p))  # noqa: E731
        return params - jax.grad(loss)(params)

    split = choosing(input_params=([], [(WHOLE, 0)]))
    step, sharding = assign(train, (SQUARE, X), split)
    assert step.state
    assert sharding.inputs[0] == (WHOLE, 0)
    assert sharding.outputs[0][-1] == (WHOLE, 0)


def test_parameters_pass_through_their_shared_use() -> None:
    def train(params: Any, batch: Any) -> Any:
        loss = lambda p: jnp.sum(jnp.tanh(batch @ p) @ p)  # noqa: E731
        return params - jax.grad(loss)(params)

    split = choosing(input_params=([], [(WHOLE, 0)]))
    step, sharding = assign(train, (SQUARE, X), split)
    parameter = step.program.inputs[0]
    chains = [
        chain
        for equation, own in zip(step.program.equations, sharding.equations, strict=True)
        for operand, chain in zip(equation.operands, own.operands, strict=True)
        if operand == parameter
    ]
    assert len(chains) >= 4, "two products, twice differentiated, and the update"
    assert set(chains) == {(NONE,)}, "all of them through the same gathered copy"


# -- loops


def scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)


def test_what_a_loop_reads_is_moved_in_front_of_it() -> None:
    # The kernel lies split by rows and is used whole.
    split = choosing(input_w=([], [(0, WHOLE)]))
    step, sharding = assign(scan, (SQUARE, SQUARE), split)
    loop = find(step, sharding, "scan")
    assert loop.operands[0] == (NONE,)
    (body,) = loop.bodies
    assert body.inputs[0] == NONE
    for equation in body.equations:
        assert all(chain == () for chain in equation.operands)


def test_carries_enter_and_leave_in_one_layout() -> None:
    split = choosing(carry=([ROWS, ROWS], [ROWS]))
    step, sharding = assign(scan, (X, SQUARE), split)
    loop = find(step, sharding, "scan")
    (body,) = loop.bodies
    assert loop.operands[1] == (ROWS,)
    assert body.inputs[1] == ROWS
    assert body.outputs[0] == (ROWS,)
    assert loop.results[0] == (ROWS,)
    # Inside, the product wants it whole.
    assert body.equations[0].operands[0] == (NONE,)


def test_stacks_are_laid_out_outside_and_sliced_inside() -> None:
    def run(xs: Any, w: Any) -> Any:
        return lax.scan(lambda c, x: (c, x @ w), 0.0, xs)[1]

    stacked = np.ones((3, 8, 16), np.float32)
    taken = ([(1, WHOLE)], [(0, WHOLE)])
    split = choosing(scan_slice=taken, scan_stack=([(WHOLE, 1)], [(WHOLE, 2)]))
    step, sharding = assign(run, (stacked, SQUARE), split)
    loop = find(step, sharding, "scan")
    (body,) = loop.bodies
    position = step.program.equations[-1].operands.index(step.program.inputs[0])
    assert loop.operands[position] == ((1, WHOLE),)
    assert body.inputs[position] == (0, WHOLE)
    assert body.outputs[-1] == ((WHOLE, 1),)
    assert loop.results[-1] == ((WHOLE, 2),)


def test_while_loop_carries() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))

    def choose(graph: Graph, node: Node, strategies: list[Strategy]) -> Strategy:
        if node.name == "carry" and graph.values[node.results[0]].shape:
            return next(s for s in strategies if s.results == (ROWS,))
        return whole(graph, node, strategies)

    step, sharding = assign(run, (X, SQUARE), choose)
    loop = find(step, sharding, "while")
    condition, body = loop.bodies
    assert condition.inputs == (ROWS, NONE)
    assert body.outputs == ((ROWS,), ())
    assert loop.results == ((ROWS,), (NONE,))


def test_only_the_branch_that_runs_pays() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.sin(x))

    split = choosing(input_w=([], [(0, WHOLE)]), branch=([ROWS, ROWS], [ROWS]))
    step, sharding = assign(run, (X, SQUARE), split)
    branch = find(step, sharding, "cond")
    assert set(branch.operands) == {()}
    assert branch.results == ((ROWS,),)
    for body in branch.bodies:
        assert body.outputs == ((ROWS,),)
    product = next(
        own
        for body, program in zip(branch.bodies, step.program.equations[-1].bodies, strict=True)
        for own, equation in zip(body.equations, program.equations, strict=True)
        if equation.name == "dot_general"
    )
    assert product.operands[1] == (NONE,)


# -- models


@pytest.mark.representatives("mlp-tiny")
@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny-scan"])
def test_solved_models_have_layouts_that_can_be_written_down(name: str) -> None:
    example = build(name)
    step = trace_step(example.train_step, (example.abstract_state(), example.abstract_batch()))
    graph = build_graph(step)
    sharding = assign_layouts(step.program, graph, solve_graph(graph, MESH).layouts, MESH)

    def check(program: Any, own: ProgramSharding) -> None:
        assert len(own.inputs) == len(program.inputs)
        assert len(own.outputs) == len(program.outputs)
        for equation, part in zip(program.equations, own.equations, strict=True):
            assert len(part.operands) == len(equation.operands)
            assert len(part.results) == len(equation.results)
            for body, inside in zip(equation.bodies, part.bodies, strict=True):
                check(body, inside)

    check(step.program, sharding)
    assert all(PARTIAL not in layout and len(layout) == 2 for layout in all_layouts(sharding))
    for i, o in step.state:
        value = step.program.outputs[o]
        made = sharding.outputs[o]
        assert made == () or made[-1] == sharding.inputs[i], value
