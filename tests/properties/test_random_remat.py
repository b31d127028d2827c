"""Gradients of random programs stay the same for any cut into layers and any recomputed ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from autopar import _jax
from autopar.ir.graph import check_graph
from autopar.lower.annotate import annotated_function
from autopar.rewrite.layers import find_layers
from autopar.rewrite.remat import with_remat
from autopar.sharding.assemble import unsharded
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from tests.properties.random_programs import RandomProgram, programs

FEW = settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MANY = settings(FEW, max_examples=60)


def check(program: RandomProgram, num_layers: int | None, chosen: Collection[int]) -> None:
    floats, ints = program.inputs()

    def step(floats: Any, ints: Any) -> Any:
        def loss(floats: Any) -> Any:
            leaves = jax.tree.leaves(program(floats, ints))
            kept = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum((jnp.sin(x).sum() for x in kept), start=jnp.zeros(()))

        return jax.value_and_grad(loss)(floats)

    try:
        traced = trace_step(step, (floats, ints))
    except ValueError as error:  # the program has a loop that JAX does not differentiate
        assume("Reverse-mode differentiation" not in str(error))
        raise
    most = sum(len(layer.equations) for layer in find_layers(traced.program, batch=traced.batch))
    count = min(num_layers, most) if num_layers else None
    layers = find_layers(traced.program, count or None, batch=traced.batch)
    after = with_remat(traced, [x for i, x in enumerate(layers) if i in chosen])
    check_graph(build_graph(after))
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    got = jax.jit(annotated_function(after.program, unsharded(after.program), mesh))(
        *traced.call.leaves
    )
    want = jax.tree.leaves(jax.jit(step)(floats, ints))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=program.tolerance, atol=program.tolerance)


ANY_LAYERS = st.sets(st.integers(0, 3))


@pytest.mark.ci
@FEW
@given(programs(3, 8), st.sampled_from([None, 1, 2, 4]), ANY_LAYERS)
def test_recomputed_layers_of_random_programs(
    program: RandomProgram, num_layers: int | None, chosen: set[int]
) -> None:
    check(program, num_layers, chosen)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@MANY
@given(programs(6, 14), st.sampled_from([None, 1, 2, 4]), ANY_LAYERS)
def test_60_recomputed_layers_of_random_programs(
    program: RandomProgram, num_layers: int | None, chosen: set[int]
) -> None:
    check(program, num_layers, chosen)
