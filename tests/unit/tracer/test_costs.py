"""Flops of equations, in closed form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.devices import DEVICES
from autopar.tracer.costs import equation_flops, fits_tiles
from autopar.tracer.trace_step import trace_step


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_a_convolution_take_as_long_as_itself(stride: int) -> None:
    """Zeros between the elements of the input gradient's operand are no work."""

    def loss(image: jax.Array, kernel: jax.Array) -> jax.Array:
        out = jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (out * out).sum()

    image, kernel = jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8, 32))
    program = trace_step(jax.grad(loss, argnums=(0, 1)), (image, kernel)).program
    flops = [
        equation_flops(equation, program.avals)
        for equation in program.equations
        if equation.name == "conv_general_dilated"
    ]
    forward = 2 * 4 * (16 // stride) ** 2 * 32 * 9 * 8
    assert flops == [forward] * 3


def test_a_ragged_product_does_the_work_of_every_group_for_all_rows() -> None:
    """In both passes, as compiled for an H100 (16 groups: 16 and 32 times the flops of the rows'
    own), and whether the sizes of groups are known or not."""
    rows, depth, columns, groups = 24, 8, 16, 4

    def flops(fn, *args) -> list[float]:
        program = trace_step(fn, args).program
        return [
            equation_flops(equation, program.avals)
            for equation in program.equations
            if equation.name == "ragged_dot_general"
        ]

    x, w = jnp.ones((rows, depth)), jnp.ones((groups, depth, columns))
    sizes = jnp.full(groups, rows // groups)
    dense = 2.0 * rows * depth * columns * groups
    assert flops(jax.lax.ragged_dot, x, w, sizes) == [dense]
    assert flops(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w) == [dense]

    def gradients(x, w, sizes):
        product = lambda x, w: (jax.lax.ragged_dot(x, w, sizes) ** 2).sum()  # noqa: E731
        return jax.grad(product, (0, 1))(x, w)

    assert flops(gradients, x, w, sizes) == [dense] * 3


@pytest.mark.parametrize(
    ("shape", "h100", "h200", "split"),
    [
        ((1, 2, 1024, 1024), True, True, True),  # few scores
        ((1, 8, 4096, 4096), True, False, False),
        ((2, 16, 4096, 4096), True, True, False),  # many rows, unless devices share them
        ((1, 16, 3000, 3000), True, False, False),
        ((64, 16, 577, 577), False, False, False),  # padded to 1,024
    ],
)
def test_a_softmax_is_made_in_tiles_as_xla_does(
    shape: tuple[int, ...], h100: bool, h200: bool, split: bool
) -> None:
    """As compiled for both: where memory is fast, exponentials are rather written. `split`: on one
    of several H200s."""
    rates = [DEVICES[name].instructions_per_byte for name in ("h100-sxm", "h200-sxm")]
    assert [fits_tiles(shape, rate) for rate in rates] == [h100, h200]
    assert fits_tiles(shape, rates[1], is_split=True) == split
