"""Convolutions on CPU devices, whose patches are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cost.convolution_patches import Patches, patches_of, patches_s
from autopar.cost.report import node_compute_s
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.spec import Layout
from autopar.sharding.problem import node_costs
from autopar.sharding.strategies import enumerate_strategies
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

MESH = mesh_of_cluster(ClusterSpec(1, 8, "cpu"), (8,))
WHOLE, BY_IMAGES, BY_CHANNELS = (-1,), (0,), (3,)


def convolve(stride: int) -> Callable[[Any, Any], Any]:
    def convolved(image: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            image, kernel, (stride, stride), "SAME", dimension_numbers=numbers
        )

    return convolved


def kernel_gradient(stride: int) -> Callable[[Any, Any], Any]:
    def of_kernel(image: Any, kernel: Any) -> Any:
        return jax.grad(lambda k: convolve(stride)(image, k).sum())(kernel)

    return of_kernel


def graph_of(fn: Callable[..., Any], channels: int, made: int = 32) -> tuple[Graph, Node]:
    image = jax.ShapeDtypeStruct((16, 32, 32, channels), jnp.float32)
    kernel = jax.ShapeDtypeStruct((7, 7, channels, made), jnp.float32)
    graph = build_graph(trace_step(fn, (image, kernel)))
    *_, node = (n for n in graph.nodes if n.name == "conv_general_dilated")
    return graph, node


def gathered(graph: Graph, node: Node, layouts: Sequence[Layout]) -> Patches:
    ways = 8 if any(layout != WHOLE for layout in layouts) else 1
    found = patches_of(node, graph.values, MESH, layouts, ways)
    assert found is not None
    return found


def test_channels_of_the_result_do_not_divide_the_patches() -> None:
    graph, node = graph_of(convolve(2), 3)
    by_images = gathered(graph, node, (BY_IMAGES, WHOLE, BY_IMAGES))
    by_channels = gathered(graph, node, (WHOLE, BY_CHANNELS, BY_CHANNELS))
    # A patch of 7 · 7 runs for each of 16 · 16 positions of an image's result.
    assert by_images == Patches(runs=2 * 16 * 16 * 49)
    # With 4 of 32 channels, XLA no longer leaves it to a library.
    assert by_channels == Patches(runs=16 * 16 * 16 * 49, elements=16 * 16 * 16 * 147)


def test_runs_that_do_not_fill_vectors_are_gathered_element_by_element() -> None:
    for channels in (3, 4, 15, 16, 17):
        graph, node = graph_of(convolve(1), channels, made=16)
        found = gathered(graph, node, (BY_IMAGES, WHOLE, BY_IMAGES))
        assert found.runs == 2 * 32 * 32 * 49
        # XLA leaves the convolution with 17 channels to a library.
        assert found.elements == (found.runs * channels if channels in (3, 15) else 0.0)


def test_the_gradient_of_a_strided_kernel_has_holes() -> None:
    for stride, has_holes in ((1, False), (2, True)):
        for made in (16, 32):
            graph, node = graph_of(kernel_gradient(stride), 4, made=made)
            assert node.work is not None and node.work.kind == "kernel-gradient"
            found = gathered(graph, node, (WHOLE, WHOLE, WHOLE))
            # Runs of 16 images. XLA leaves more than 16 channels to a library.
            elements = 16 * (32 // stride) ** 2 * 49 * 4
            assert found.runs == elements / 16
            assert found.with_holes == (elements if has_holes and made == 16 else 0.0)


def test_operands_of_a_kernel_gradient_are_transposed() -> None:
    graph, node = graph_of(kernel_gradient(1), 8)
    split = (BY_IMAGES, BY_IMAGES, WHOLE)
    images, results = 16 * 32 * 32 * 8, 16 * 32 * 32 * 32
    assert gathered(graph, node, (WHOLE, WHOLE, WHOLE)).transposed == images + results
    assert gathered(graph, node, split).transposed == (images + results) / 8
    forward, one = graph_of(convolve(1), 8)
    assert gathered(forward, one, (WHOLE, WHOLE, WHOLE)).transposed == 0


def test_solver_and_report_agree_and_gpus_gather_nothing() -> None:
    for device in ("cpu", "h100-sxm"):
        graph, node = graph_of(convolve(2), 3)
        mesh = mesh_of_cluster(ClusterSpec(1, 8, device), (8,))
        strategies = list(enumerate_strategies(node.rule, mesh.shape))
        for one, cost in zip(strategies, node_costs(graph, node, mesh, strategies), strict=True):
            layouts = (one.operands, one.results)
            flat = (*one.operands, *one.results)
            gathered_s = patches_s(node, graph.values, mesh, flat, one.parallelism)
            assert (gathered_s > 0) == (device == "cpu")
            if not node.rule.halos:
                assert cost == pytest.approx(node_compute_s(graph, mesh, node, layouts), rel=1e-3)
