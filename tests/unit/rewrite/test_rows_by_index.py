"""Layers taken out of stacks by the number of the trip become slices, their gradients stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import _jax
from autopar.ir.graph import check_graph
from autopar.ir.program import Equation
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.rows_by_index import slice_rows
from autopar.rewrite.scan_remat import scan_parts
from autopar.rewrite.unroll_scans import unroll_scans
from autopar.sharding.assemble import unsharded
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

NUM, WIDTH = 4, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(NUM, WIDTH, WIDTH)).astype(np.float32) / 3,
    "b": RNG.normal(size=(NUM, WIDTH)).astype(np.float32),
}
X = RNG.normal(size=(16, WIDTH)).astype(np.float32)


def layer(x: Any, own: Any) -> Any:
    return jnp.tanh(x @ own["w"] + own["b"])


def by_loop(params: Any, x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        return layer(x, jax.tree.map(lambda p: p[i], params))

    return lax.fori_loop(0, NUM, body, x)


def by_counter(params: Any, x: Any) -> Any:
    def one(x: Any, i: Any) -> Any:
        own = jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, i, keepdims=False), params)
        return layer(x, own), None

    return lax.scan(one, x, jnp.arange(NUM))[0]


def read_twice(params: Any, x: Any) -> Any:
    """The gradient of each matrix is a sum of two rows per trip; the counter is used, too."""

    def body(i: Any, x: Any) -> Any:
        x = layer(x, jax.tree.map(lambda p: p[i], params))
        return jnp.tanh(x @ params["w"][i].T) * (1 + i.astype(jnp.float32))

    return lax.fori_loop(0, NUM, body, x)


def in_groups(params: Any, x: Any) -> Any:
    """The inner loop is inside an outer one, whose slices it takes rows of."""
    groups = jax.tree.map(lambda p: p.reshape(2, 2, *p.shape[1:]), params)

    def group(x: Any, own: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return layer(x, jax.tree.map(lambda p: p[i], own))

        return lax.fori_loop(0, 2, body, x), None

    return lax.scan(group, x, groups)[0]


def step_of(model: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(model(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def scans(step: TracedStep) -> list[Equation]:
    return [e for e in step.program.all_equations() if e.name == "scan"]


def reads_whole_stack(scan: Equation, step: TracedStep) -> bool:
    """Whether all trips read, or a carry sums up, an array with a row per trip."""
    parts = scan_parts(scan, scan.bodies[0].inputs)
    shapes = [step.program.avals[v].shape for v in (*parts.consts, *parts.carry)]
    return any(len(shape) > 1 and shape[0] == scan.params["length"] for shape in shapes)


def run(traced: TracedStep) -> list[Any]:
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    program = traced.program
    return jax.jit(annotated_function(program, unsharded(program), mesh))(*traced.call.leaves)


@pytest.mark.parametrize("model", [by_loop, by_counter, read_twice, in_groups])
def test_rows_become_slices(model: Callable[[Any, Any], Any]) -> None:
    step = step_of(model)
    before = trace_step(step, (PARAMS, X))
    after = slice_rows(before)
    assert any(reads_whole_stack(scan, before) for scan in scans(before))
    assert not any(reads_whole_stack(scan, after) for scan in scans(after))
    names = {e.name for e in after.program.all_equations()}
    assert names.isdisjoint({"dynamic_slice", "dynamic_update_slice"})
    check_graph(build_graph(after))
    for ours, theirs in zip(run(after), jax.tree.leaves(step(PARAMS, X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    unrolled = unroll_scans(after)
    assert not scans(unrolled), "they are scans over layers"
    for ours, theirs in zip(run(unrolled), jax.tree.leaves(step(PARAMS, X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_counters_that_nothing_reads_are_gone() -> None:
    after = slice_rows(trace_step(step_of(by_loop), (PARAMS, X)))
    for scan in scans(after):
        types = [after.program.avals[v].dtype for v in scan.bodies[0].inputs]
        assert all(dtype == np.float32 for dtype in types)
        assert _jax.scan_sizes(scan.params) == (0, 1)


def rolled(params: Any, x: Any) -> Any:
    """Another order of rows."""

    def body(i: Any, x: Any) -> Any:
        return layer(x, jax.tree.map(lambda p: p[NUM - 1 - i], params))

    return lax.fori_loop(0, NUM, body, x)


def fewer(params: Any, x: Any) -> Any:
    """Fewer trips than rows."""

    def body(i: Any, x: Any) -> Any:
        return layer(x, jax.tree.map(lambda p: p[i], params))

    return lax.fori_loop(0, NUM - 1, body, x)


def by_data(params: Any, x: Any) -> Any:
    """Rows that only the data tells."""
    rows = jnp.argsort(x[:NUM, 0])

    def one(x: Any, i: Any) -> Any:
        own = jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, i, keepdims=False), params)
        return layer(x, own), None

    return lax.scan(one, x, rows)[0]


@pytest.mark.parametrize("model", [rolled, fewer, by_data])
def test_other_rows_stay_as_they_are(model: Callable[[Any, Any], Any]) -> None:
    before = trace_step(step_of(model), (PARAMS, X))
    assert slice_rows(before) is before


def test_a_step_without_such_scans_is_itself() -> None:
    def model(params: Any, x: Any) -> Any:
        return lax.scan(lambda x, own: (layer(x, own), None), x, params)[0]

    before = trace_step(step_of(model), (PARAMS, X))
    assert slice_rows(before) is before
