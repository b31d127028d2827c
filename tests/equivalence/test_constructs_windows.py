"""Convolutions and poolings split along their windows: neighbours send rows, when it pays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.graph import Halo
from tests.equivalence.constructs import MESH, assert_same, floats, graph_of, ops_named

CLUSTER = autopar.ClusterSpec(1, 8, "h100-sxm")


def conv(x: Any, k: Any, stride: int = 1) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (stride, stride), "SAME", dimension_numbers=dims)


def step(kernels: Any, x: Any) -> Any:
    """Two convolutions, trained. (The gradient of a pooling pads unevenly: it is gathered.)"""

    def loss(kernels: Any) -> Any:
        hidden = jnp.tanh(conv(x, kernels[0]))
        return jnp.square(conv(hidden, kernels[1], stride=2)).mean()

    value, slopes = jax.value_and_grad(loss)(kernels)
    return [k - 0.1 * s for k, s in zip(kernels, slopes, strict=True)], value


def kernels(channels: int) -> list[np.ndarray]:
    return [floats(3, 3, channels, channels) / 4, floats(3, 3, channels, channels) / 8]


def test_one_large_image_is_split_along_its_rows() -> None:
    shapes = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in kernels(4)]
    image = jax.ShapeDtypeStruct((1, 1024, 1024, 4), jnp.float32)
    plan = autopar.plan(step, shapes, image, cluster=CLUSTER, method=autopar.ShardParallel((8,)))
    kinds = {kind for module in plan.modules for kind, _ in module.collectives}
    assert "shift(x)" in kinds
    assert kinds <= {"shift(x)", "all-reduce(x)"}


def test_split_windows_equal_jit_and_send_rows_alone() -> None:
    # Only the windows can be split, and a message costs nothing but its bytes.
    mesh = autopar.LogicalMesh((2, 4), alpha=(1e-15, 1e-15), beta=(1e-9, 1e-9))
    args = (kernels(3), floats(1, 64, 32, 3))
    run = autopar.parallelize(step, method=autopar.ShardParallel(mesh))
    assert_same(run(*args), jax.jit(step)(*args))
    kinds = {op.kind for op in run.last_executable.collectives()}
    assert "collective-permute" in kinds
    assert kinds <= {"collective-permute", "all-reduce"}


def test_micro_batches_of_split_windows_equal_jit() -> None:
    """Gradients of kernels are summed after the loop, each over a rank's own rows."""
    args = (kernels(3), floats(4, 64, 32, 3))
    run = autopar.parallelize(step, method=autopar.ShardParallel((2, 4), num_micro_batches=4))
    assert_same(run(*args), jax.jit(step)(*args))
    kinds = {op.kind for op in run.last_executable.collectives()}
    assert "collective-permute" in kinds


def test_a_batch_is_split_rather_than_its_windows() -> None:
    run = autopar.parallelize(step, method=autopar.ShardParallel(MESH))
    args = (kernels(3), floats(8, 8, 8, 3))
    assert_same(run(*args), jax.jit(step)(*args))
    assert not any(op.kind == "collective-permute" for op in run.last_executable.collectives())


@pytest.mark.parametrize("mesh_shape", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(("rows", "channels", "groups"), [(4, 3, 3), (2, 4, 4), (4, 8, 4)])
def test_gradients_of_kernels_in_groups_equal_jit(
    mesh_shape: tuple[int, int], rows: int, channels: int, groups: int
) -> None:
    """Where devices along an axis held the same rows, XLA summed over that axis too."""

    def step(kernel: Any, x: Any) -> Any:
        def loss(kernel: Any) -> Any:
            dims = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups
            )
            return jnp.square(jnp.tanh(y) + 1).mean()

        value, slope = jax.value_and_grad(loss)(kernel)
        return kernel - slope, value

    args = floats(3, 3, channels // groups, channels), floats(rows, 32, 32, channels)
    for number in (1, 2):
        method = autopar.ShardParallel(mesh_shape, num_micro_batches=number)
        assert_same(autopar.parallelize(step, method=method)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilation", "kernel_dilation", "rows"),
    [
        (3, 1, (1, 1), 1, 1, (1, 1)),
        (2, 1, (0, 1), 1, 1, (0, 1)),
        (3, 2, (0, 1), 1, 1, (0, 1)),
        (2, 2, (0, 0), 1, 1, (0, 0)),
        (7, 2, (2, 3), 1, 1, (2, 3)),
        (3, 1, (2, 2), 1, 2, (2, 2)),
        (3, 1, (2, 0), 1, 1, (2, 0)),
        (3, 1, (1, 2), 2, 1, (1, 1)),
        (3, 1, (0, 0), 1, 1, None),  # shorter than its operand: parts do not lie side by side
    ],
)
def test_rows_that_a_window_needs(
    size: int,
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    kernel_dilation: int,
    rows: tuple[int, int] | None,
) -> None:
    def fn(x: Any, k: Any) -> Any:
        dims = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x, k, (stride,), (padding,), (dilation,), (kernel_dilation,), dims
        )

    (node,) = ops_named(graph_of(fn, floats(2, 32, 2), floats(size, 2, 2)), "conv_general_dilated")
    assert node.rule.halos == (() if rows is None else (Halo(0, 1, rows),))
    (windowed, *_) = node.rule.operands[0][1]
    assert (windowed in node.rule.fixed) == (rows is None)


@pytest.mark.parametrize("length, size, padding", [(2, 3, (1, 1)), (4, 4, (0, 0)), (4, 3, (0, -1))])
def test_a_single_window(length: int, size: int, padding: tuple[int, int]) -> None:
    """It is a product only if each of its rows meets one row of the operand: an image of 2 × 2
    below a kernel of 3 × 3, at the end of a small ResNet, is none."""

    def fn(x: Any, k: Any) -> Any:
        dims = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, k, (2,), (padding,), dimension_numbers=dims)

    args = floats(8, length, 16), floats(size, 16, 16)
    (node,) = ops_named(graph_of(fn, *args), "conv_general_dilated")
    assert fn(*args).shape[1] == 1
    windowed = {f for f in node.rule.operands[0][1] if f not in node.rule.fixed}
    assert bool(windowed) == (length == size)
    run = autopar.parallelize(fn, method=autopar.ShardParallel(MESH))
    assert_same(run(*args), jax.jit(fn)(*args))
