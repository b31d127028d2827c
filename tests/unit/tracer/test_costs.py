"""Flops of equations, in closed form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.tracer.costs import equation_flops
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
