"""Convolutions on CPU devices, whose patches are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cost.convolution_patches import patches_s
from autopar.cost.report import node_compute_s
from autopar.ir.graph import Node
from autopar.ir.mesh import DEVICES, ClusterSpec, mesh_of_cluster
from autopar.sharding.problem import node_costs
from autopar.sharding.strategies import enumerate_strategies
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

ELEMENT_S = DEVICES["cpu"].patch_element_s
MESH = mesh_of_cluster(ClusterSpec(1, 8, "cpu"), (8,))
WHOLE, BY_IMAGES, BY_CHANNELS = (-1,), (0,), (3,)


def convolve(stride: int) -> Callable[[Any, Any], Any]:
    def convolved(image: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            image, kernel, (stride, stride), "SAME", dimension_numbers=numbers
        )

    return convolved


def graph_of(fn: Callable[..., Any], channels: int) -> tuple[Any, Node]:
    image = jax.ShapeDtypeStruct((16, 32, 32, channels), jnp.float32)
    kernel = jax.ShapeDtypeStruct((7, 7, channels, 32), jnp.float32)
    graph = build_graph(trace_step(fn, (image, kernel)))
    *_, node = (n for n in graph.nodes if n.name == "conv_general_dilated")
    return graph, node


def test_channels_of_the_result_do_not_divide_the_patches() -> None:
    graph, node = graph_of(convolve(2), 3)
    by_images = patches_s(node, graph.values, MESH, (BY_IMAGES, WHOLE, BY_IMAGES), 8)
    by_channels = patches_s(node, graph.values, MESH, (WHOLE, BY_CHANNELS, BY_CHANNELS), 8)
    # A patch of 7 · 7 · 3 elements for each of 16 · 16 positions of an image's result.
    assert by_images == pytest.approx(2 * 16 * 16 * 147 * ELEMENT_S)
    assert by_channels == pytest.approx(8 * by_images)


def test_channels_that_fill_vectors_are_gathered_together() -> None:
    seconds = []
    for channels in (3, 4):
        graph, node = graph_of(convolve(1), channels)
        layouts = (BY_IMAGES, WHOLE, BY_IMAGES)
        seconds.append(patches_s(node, graph.values, MESH, layouts, 8) / channels)
    assert seconds[0] == pytest.approx(10 * seconds[1])


def test_the_gradient_of_a_strided_kernel_has_holes() -> None:
    def gradient(stride: int) -> Callable[[Any, Any], Any]:
        def of_kernel(image: Any, kernel: Any) -> Any:
            return jax.grad(lambda k: convolve(stride)(image, k).sum())(kernel)

        return of_kernel

    for stride, has_holes in ((1, False), (2, True)):
        _, node = graph_of(gradient(stride), 4)
        assert node.work is not None and node.work.kind == "kernel-gradient"
        assert node.work.has_holes == has_holes


def test_solver_and_report_agree_and_gpus_gather_nothing() -> None:
    for device in ("cpu", "h100-sxm"):
        graph, node = graph_of(convolve(2), 3)
        mesh = mesh_of_cluster(ClusterSpec(1, 8, device), (8,))
        strategies = list(enumerate_strategies(node.rule, mesh.shape))
        for one, cost in zip(strategies, node_costs(graph, node, mesh, strategies), strict=True):
            layouts = (one.operands, one.results)
            flat = (*one.operands, *one.results)
            gathered = patches_s(node, graph.values, mesh, flat, one.parallelism)
            assert (gathered > 0) == (device == "cpu")
            if not node.rule.halos:
                assert cost == pytest.approx(node_compute_s(graph, mesh, node, layouts), rel=1e-3)
