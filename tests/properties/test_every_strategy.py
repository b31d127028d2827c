"""Every strategy of an operator, to every layout of its result, computes what `jax.jit` does.

The solver may pick any of them, so none may be wrong. It is XLA's partitioner that is tested here:
where it is wrong, rules or lowering must keep away from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import autopar
from autopar import _jax
from autopar.ir.graph import NodeKind
from autopar.ir.spec import PARTIAL, Layout, to_partition_spec
from autopar.lower.annotate import annotated_function
from autopar.lower.assign import assign_layouts
from autopar.sharding.strategies import enumerate_strategies
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def integers(limit: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, limit, size=shape, dtype=np.int32)


def conv(stride: int, groups: int = 1) -> Callable[[Any, Any], Any]:
    return lambda x, k: lax.conv_general_dilated(
        x,
        k,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def conv_1d(stride: int) -> Callable[[Any, Any], Any]:
    dims = ("NWC", "WIO", "NWC")
    return lambda x, k: lax.conv_general_dilated(x, k, (stride,), "SAME", dimension_numbers=dims)


# The gradient of the groups' matrices.
SUM_OF_GROUPS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

# Equations on their own; what is beyond the end of an array is part of their meaning.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "dot": (lambda a, b: a @ b, (floats(8, 16), floats(16, 8))),
    "batched dot": (
        lambda a, b: lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,)))),
        (floats(8, 8, 16), floats(8, 8, 16)),
    ),
    "vector dot": (lambda a, b: lax.dot(a, b), (floats(16), floats(16, 8))),
    "sum": (lambda a: lax.reduce_sum_p.bind(a, axes=(1,), out_sharding=None), (floats(8, 8, 8),)),
    "max": (lambda a: lax.reduce_max_p.bind(a, axes=(0,), out_sharding=None), (floats(8, 8, 8),)),
    "argmax": (lambda a: lax.argmax(a, 1, jnp.int32), (integers(5, 8, 8),)),
    "cumsum": (lambda a: lax.cumsum(a, 0), (floats(8, 8),)),
    "sort": (lambda a: lax.sort(a, dimension=1), (floats(8, 8),)),
    "top_k": (lambda a: lax.top_k(a, 3), (floats(8, 8, 8),)),
    "merge": (lambda a: lax.reshape(a, (8, 64)), (floats(8, 8, 8),)),
    "split": (lambda a: lax.reshape(a, (2, 8, 8)), (floats(16, 8),)),
    "transpose": (lambda a: lax.transpose(a, (2, 0, 1)), (floats(8, 8, 8),)),
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (8, 8, 8), (1,)), (floats(8),)),
    "add": (lambda a, b: a + b, (floats(8, 8), floats(8, 8))),
    "slice": (lambda a: lax.slice(a, (0, 2), (8, 7)), (floats(8, 8),)),
    "dynamic slice": (
        lambda a, i: lax.dynamic_slice(a, (i, i), (8, 2)),
        (floats(8, 8), np.int32(7)),
    ),
    "dynamic update": (
        lambda a, b, i: lax.dynamic_update_slice(a, b, (i, i)),
        (floats(8, 8), floats(1, 4), np.int32(9)),
    ),
    "pad": (lambda a: lax.pad(a, np.float32(0), ((0, 0, 0), (4, 4, 0))), (floats(8, 8),)),
    "concatenate": (lambda a, b: lax.concatenate([a, b], 0), (floats(8, 8), floats(8, 8))),
    "reverse": (lambda a: lax.rev(a, (0,)), (floats(8, 8),)),
    "lookup": (
        lambda t, i: lax.gather(
            t,
            i,
            lax.GatherDimensionNumbers((1,), (0,), (0,)),
            (1, 8),
            mode=lax.GatherScatterMode.CLIP,
        ),
        (floats(16, 8), integers(20, 8, 1) - 2),
    ),
    "lookup of pairs": (
        lambda t, i: lax.gather(
            t,
            i,
            lax.GatherDimensionNumbers((1,), (0, 1), (0, 1)),
            (1, 1, 8),
            mode=lax.GatherScatterMode.CLIP,
        ),
        (floats(8, 4, 8), integers(9, 16, 2)),
    ),
    "take along": (
        lambda t, i: lax.gather(
            t,
            i[..., None] if i.ndim == 2 else i,
            lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,)),
            (1, 1),
            mode=lax.GatherScatterMode.CLIP,
        ),
        (floats(8, 16), integers(20, 8, 8, 1)),
    ),
    "scatter add": (
        lambda t, i, u: lax.scatter_add(
            t, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,)), mode="drop"
        ),
        (floats(16, 8), integers(20, 8, 1) - 2, floats(8, 8)),
    ),
    "scatter of one": (
        lambda t, i, u: lax.scatter_add(
            t, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,)), mode="drop"
        ),
        (floats(16, 8), integers(16, 1, 1), floats(1, 8)),
    ),
    "scatter set": (
        lambda t, i, u: lax.scatter(
            t, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,)), mode="drop"
        ),
        (floats(16, 8), np.arange(8, dtype=np.int32)[:, None] * 3 - 2, floats(8, 8)),
    ),
    "conv": (conv(1), (floats(8, 5, 5, 8), floats(3, 3, 8, 8))),
    "strided conv": (conv(2), (floats(8, 5, 5, 8), floats(3, 3, 8, 8))),
    "grouped conv": (conv(1, 8), (floats(8, 5, 5, 8), floats(3, 3, 1, 8))),
    "split window": (conv_1d(1), (floats(1, 16, 1), floats(3, 1, 4))),
    "split window of channels": (conv_1d(1), (floats(1, 16, 4), floats(2, 4, 1))),
    "split strided window": (conv_1d(2), (floats(1, 16, 1), floats(4, 1, 4))),
    "split window of images": (conv_1d(1), (floats(4, 8, 1), floats(3, 1, 1))),
    "gradient of a kernel": (
        lambda x, g: jax.vjp(lambda k: conv_1d(1)(x, k), jnp.zeros((3, 1, 4)))[1](g)[0],
        (floats(2, 16, 1), floats(2, 16, 4)),
    ),
    "gradient of a strided kernel": (
        lambda x, g: jax.vjp(lambda k: conv_1d(2)(x, k), jnp.zeros((3, 1, 2)))[1](g)[0],
        (floats(1, 16, 1), floats(1, 8, 2)),
    ),
    "split pool": (
        lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 3), (1, 1), "SAME"),
        (floats(2, 16),),
    ),
    "max pool": (
        lambda a: lax.reduce_window(a, -np.inf, lax.max, (1, 2), (1, 2), "VALID"),
        (floats(8, 8),),
    ),
    "ragged": (lax.ragged_dot, (floats(16, 8), floats(3, 8, 8), np.array([5, 0, 9], np.int32))),
    "ragged sum": (
        lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, SUM_OF_GROUPS),
        (floats(16, 4), floats(16, 8), np.array([3, 2, 11], np.int32)),
    ),
    "ragged batch": (
        jax.vmap(lax.ragged_dot),
        (floats(2, 8, 4), floats(2, 3, 4, 8), np.array([[5, 0, 3], [1, 4, 2]], np.int32)),
    ),
    "random bits": (
        lambda k: jax.random.bits(k, (8, 8)),
        (np.asarray(jax.random.PRNGKey(0)),),
    ),
}


def variants(fn: Any, args: Any, mesh_shape: tuple[int, ...]) -> tuple[list[Any], Any]:
    """A function for each choice of strategies, and what each is."""
    step = trace_step(fn, args, batch_argnums=())
    graph = build_graph(step)
    logical = autopar.LogicalMesh(mesh_shape)
    devices = np.array(jax.devices()).reshape(mesh_shape)
    mesh = _jax.fresh_mesh(devices, logical.axis_names)
    choices = []
    for node in graph.nodes:
        strategies = enumerate_strategies(node.rule, mesh_shape)
        choices.append([s for s in strategies if not any(PARTIAL in o for o in s.operands)])
        if node.kind is NodeKind.INPUT:  # an input is moved to where it is needed
            choices[-1] = [s for s in choices[-1] if max(s.factors) < 0]
    functions = []
    for chosen in itertools.product(*choices):
        layouts = [(s.operands, s.results) for s in chosen]
        sharding = assign_layouts(step.program, graph, layouts, logical)
        outs = [_last(chosen, graph, value) for value in graph.outputs]
        function = annotated_function(step.program, sharding, mesh)
        functions.append((tuple(s.factors for s in chosen), function, outs))
    return functions, mesh


def _last(chosen: Any, graph: Any, value: int) -> Layout:
    node, position = graph.producer[value]
    return chosen[node].results[position]


@pytest.mark.representatives(
    "dot-2x4",
    "grouped conv-2x4",
    "max pool-2x4",
    "random bits-2x4",
    "transpose-2x4",
    "sort-2x4",
    "concatenate-2x4",
    "scatter set-2x4",
    "dynamic slice-2x4",
    "merge-2x4",
    "ragged-2x4",
    slow=["batched dot-2x4"],
)
@pytest.mark.parametrize(
    "mesh_shape", [(2, 4), pytest.param((4, 2), marks=pytest.mark.slow)], ids=["2x4", "4x2"]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_strategy_equals_jit(name: str, mesh_shape: tuple[int, ...]) -> None:
    fn, args = OPERATORS[name]
    want = jax.tree.leaves(jax.jit(fn)(*args))
    functions, mesh = variants(fn, args, mesh_shape)
    out_shardings = [
        [
            NamedSharding(mesh, to_partition_spec(layout, array.ndim, mesh.axis_names))
            for layout, array in zip(outs, want, strict=True)
        ]
        for _, _, outs in functions
    ]
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    everything = jax.jit(
        lambda *args: [function(*args) for _, function, _ in functions],
        in_shardings=whole,
        out_shardings=out_shardings,
    )
    for (factors, _, outs), results in zip(functions, everything(*args), strict=True):
        for ours, theirs in zip(results, want, strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-4, atol=1e-4, err_msg=f"factors {factors} to {outs}"
            )
