"""What the tests of constructs share: a step is run sharded and compared with `jax.jit`, and its
plan is asked whether an equation was split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import autopar
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.plan import ParallelPlan
from autopar.ir.program_sharding import EquationSharding, ProgramSharding
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

MESH = autopar.LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))
_RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype(np.float32)


def integers(limit: int, *shape: int) -> np.ndarray:
    return _RNG.integers(0, limit, size=shape, dtype=np.int32)


def definite(*shape: int) -> np.ndarray:
    """Symmetric positive definite matrices."""
    a = floats(*shape)
    return a @ np.swapaxes(a, -1, -2) + shape[-1] * np.eye(shape[-1], dtype=np.float32)


def assert_same(got: Any, want: Any, tolerance: float = 5e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if jnp.issubdtype(theirs.dtype, jnp.inexact):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(ours, theirs)


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> autopar.ParallelFunction:
    """The step, run on the mesh of eight devices and found equal to `jax.jit`."""
    step = autopar.parallelize(fn, method=autopar.ShardParallel(MESH), **options)
    assert_same(step(*args), jax.jit(fn)(*args))
    return step


def run_by_batch(fn: Callable[..., Any], *args: Any) -> autopar.ParallelFunction:
    """The same, with arguments of eight rows given in eight parts."""
    rows = PartitionSpec(("x", "y"))
    specs = tuple(rows if np.shape(a)[:1] == (8,) else None for a in args)
    method = autopar.ManualParallel((2, 4), ("x", "y"), in_specs=specs)
    step = autopar.parallelize(fn, method=method, batch_argnums=())
    assert_same(step(*args), jax.jit(fn)(*args))
    return step


def gathers(step: autopar.ParallelFunction) -> list[str]:
    """The collectives, sums apart, of the program that was run last."""
    ops = step.last_executable.collectives()
    return [op.kind for op in ops if op.kind not in ("all-reduce", "reduce-scatter")]


def equations(plan: ParallelPlan) -> Iterator[EquationSharding]:
    def visit(program: ProgramSharding) -> Iterator[EquationSharding]:
        for equation in program.equations:
            yield equation
            for body in equation.bodies:
                yield from visit(body)

    return visit(plan.program)


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    return build_graph(trace_step(fn, args))


def ops_named(graph: Graph, *names: str) -> list[Node]:
    return [n for n in graph.nodes if n.kind is NodeKind.OP and n.name in names]


def free_sizes(node: Node) -> list[int]:
    """The sizes of the factors of a node that may be split."""
    return [n for f, n in enumerate(node.rule.sizes) if f not in node.rule.fixed]


def split_ways(step: autopar.ParallelFunction) -> Any:
    """For each operator of the step that was run last, over how many devices it was split: (name,
    ways), operators in the bodies of loops included."""
    found: list[tuple[str, int]] = []

    def visit(program: Any, sharding: ProgramSharding) -> None:
        for equation, own in zip(program.equations, sharding.equations, strict=True):
            for body, inner in zip(equation.bodies, own.bodies, strict=True):
                visit(body, inner)
            layouts = [chain[0] for chain in own.results if chain]
            ways = 1
            for axis, size in enumerate(MESH.shape):
                if any(layout[axis] >= 0 for layout in layouts):
                    ways *= size
            found.append((equation.name, ways))

    assert step.last_planned is not None
    visit(step.last_planned.traced.program, step.last_executable.plan.program)
    return found
