"""The work of computing a value again, against every way from it to what it is made of."""

from __future__ import annotations

import random
from math import prod

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import NodeKind
from autopar.tracer.costs import INSTRUCTIONS
from autopar.tracer.dataflow import Dataflow
from autopar.tracer.kernel_work import MOVES, work_of
from tests.unit.tracer.memory_graphs import array, graph_of, lives_by_op, train


def flow_of(fn, *args) -> Dataflow:
    graph = graph_of(fn, *args)
    return Dataflow(graph.nodes, graph.values, ())


def inputs_of(flow: Dataflow) -> set[int]:
    return {v for node in flow.nodes if node.kind is NodeKind.INPUT for v in node.results}


def by_hand(value: int, flow: Dataflow, written: set[int]) -> tuple[float, dict[int, int]]:
    """Follows each way back: an op counts once for each sequence of moves on the way to it."""
    elements = prod(flow.values[value].shape)
    found: set[tuple[int, tuple[int, ...]]] = set()
    read: set[tuple[int, int, tuple[int, ...]]] = set()

    def follow(index: int, moved: tuple[int, ...]) -> None:
        found.add((index, moved))
        node = flow.nodes[index]
        for operand in node.operands:
            if operand in written:
                if node.name in MOVES or flow.views[index]:
                    read.add((operand, index, moved))
            elif prod(flow.values[operand].shape) >= elements:
                follow(flow.producer[operand], (*moved, index) if node.name in MOVES else moved)

    follow(flow.producer[value], ())
    ops = (flow.nodes[index].name for index, _ in found if not flow.views[index])
    reads: dict[int, int] = {}
    for operand, _, _ in read:
        reads[operand] = reads.get(operand, 0) + 1
    return sum(INSTRUCTIONS.get(name, 1.0) for name in ops), reads


@pytest.mark.parametrize("seed", range(20))
def test_as_following_every_way_back_finds(seed: int) -> None:
    chosen = random.Random(seed)

    def fn(x, y):
        made = [x, y]
        for _ in range(12):
            one, other = chosen.choice(made[-4:]), chosen.choice(made[-4:])
            rows = min(one.shape[0], other.shape[0])
            made.append(
                chosen.choice(
                    [
                        lambda a, b: jnp.exp(a) + a,
                        lambda a, b: a[:-1] * a[1:],
                        lambda a, b: a[::-1] - a,
                        lambda a, b: a.reshape(-1, 2, 4).reshape(-1, 8) / 3,
                        lambda a, b, rows=rows: a[:rows] + b[-rows:],
                        lambda a, b, rows=rows: jnp.tanh(b[:rows]) * a[:rows],
                    ]
                )(one, other)
            )
        return made[-1]

    flow = flow_of(fn, array(64, 8), array(60, 8))
    written = inputs_of(flow)
    makers = [node for node in flow.nodes if node.kind is NodeKind.OP]
    chosen.shuffle(makers)
    values = [node.results[0] for node in makers]
    written.update(v for v in values[:2])
    for value in values[2:]:
        found = work_of(value, flow, written)
        instructions, reads = by_hand(value, flow, written)
        assert found.instructions == pytest.approx(instructions)
        assert found.reads == reads


def test_each_level_of_slices_doubles_the_work() -> None:
    def fn(x):
        for _ in range(5):
            x = jnp.exp(x[::2]) + x[1::2]
        return x

    flow = flow_of(fn, array(1024))
    last = max(i for i, node in enumerate(flow.nodes) if node.name == "add")
    found = work_of(flow.nodes[last].results[0], flow, inputs_of(flow))
    (read,) = found.reads.values()
    assert read == 32
    a_level = INSTRUCTIONS["exp"] + 3  # two slices and an addition
    assert found.instructions == 31 * a_level


def test_a_scan_writes_a_level_whose_work_has_doubled_twice() -> None:
    """Of decays and inputs that are small beside the states that they are spread to, as in Mamba:
    XLA writes what combines four of them, in memory until the gradient."""

    def loss_of(w, x):
        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        step = x @ w
        decay = jnp.exp(-step[..., None] * jnp.arange(1.0, 9.0))
        states = jax.lax.associative_scan(join, (decay, jnp.tanh(step)[..., None] * decay), axis=0)
        return jnp.sum(jnp.sort(states[1], 0))

    lives = lives_by_op(graph_of(train(loss_of), array(512, 512), array(1024, 512)))
    kept = {shape[0] for name in ("mul", "add") for _, _, shape in lives[name] if len(shape) == 3}
    assert 256 in kept and 512 not in {s[0] for _, _, s in lives["mul"]}
