from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.cost.compute import EXACT_EFFICIENCY, compute_s, tie_break_s
from autopar.ir.devices import DEVICES, DeviceSpec
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.sharding.solve import solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

DEVICE = DeviceSpec("d", 200.0, 100.0, 1e9, 10.0, 1.0, 1.0, efficiency=0.5)


def test_time_is_the_larger_of_flops_and_bytes() -> None:
    assert compute_s(DEVICE, 500.0, 10.0, "float32") == 10.0  # 500 / (100 · 0.5)
    assert compute_s(DEVICE, 500.0, 1000.0, "float32") == 100.0  # 1000 / 10
    assert compute_s(DEVICE, 0.0, 0.0, "float32") == 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_narrow_types_run_at_the_narrow_rate(dtype: str) -> None:
    assert compute_s(DEVICE, 1000.0, 0.0, dtype) == 10.0


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "complex64"])
def test_wide_types_run_at_the_wide_rate(dtype: str) -> None:
    assert compute_s(DEVICE, 1000.0, 0.0, dtype) == 20.0


@pytest.mark.parametrize(
    "mesh",
    [
        LogicalMesh((4,), alpha=(0.0,), beta=(1e-6,)),
        LogicalMesh((2, 2), beta=(1.0, 1e6)),
        *(mesh_of_cluster(ClusterSpec(2, 2, name), (2, 2)) for name in DEVICES),
    ],
    ids=lambda m: m.device.name if m.device else "communication",
)
def test_ties_are_broken_far_below_any_cost(mesh: LogicalMesh) -> None:
    """A tensor of any size: fewer bytes are better, but not worth sending a thousandth of them."""
    small, large = tie_break_s(mesh, 1e3), tie_break_s(mesh, 1e6)
    assert 0 < small < large
    assert large <= 1e-3 * max(mesh.beta) * 1e6
    if mesh.device is not None:
        assert large <= 1e-3 * compute_s(mesh.device, 0.0, 1e6, "float32")


def test_ties_are_broken_even_where_bytes_are_free() -> None:
    assert tie_break_s(LogicalMesh((2,), beta=(0.0,)), 1.0) > 0


def test_a_tie_goes_to_the_smaller_shard() -> None:
    """Nothing has to be sent either way, so what is kept is kept once."""
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    graph = build_graph(trace_step(lambda x: jnp.tanh(x) * 2, (x,)))
    solution = solve_graph(graph, LogicalMesh((2, 4), alpha=(0.0, 0.0)))
    assert {layout for own in solution.layouts for layout in own[1]} == {(0, 0)}


def test_work_is_divided_where_compute_is_priced_and_links_are_free() -> None:
    arrays = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    graph = build_graph(trace_step(jnp.dot, tuple(arrays)))
    product = next(i for i, n in enumerate(graph.nodes) if n.is_heavy)
    cheap = LogicalMesh((4,), alpha=(0.0,), beta=(1e-30,), device=DEVICES["h100-sxm"])
    assert solve_graph(graph, cheap).strategies[product].parallelism == 4
    # Inputs can lie split for free, so it takes a use of the whole result to make it dear.
    dear = LogicalMesh((4,), alpha=(1e9,), beta=(1.0,), device=DEVICES["h100-sxm"])
    inputs = {v: (-1,) for v in (*graph.inputs, graph.outputs[0])}
    pinned = solve_graph(graph, dear, pins=inputs)
    assert pinned.strategies[product].parallelism == 1
    assert pinned.objective < 1


@pytest.mark.parametrize("profile", [None, "h200"], ids=["data sheet", "measured"])
def test_products_that_are_not_rounded_take_longer(profile: str | None) -> None:
    import autopar

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    half = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    cluster = autopar.ClusterSpec(1, 1, "h200-sxm", profile=profile)

    def seconds(precision: str | None, given: jax.ShapeDtypeStruct = x) -> float:
        def step(x: jax.Array) -> jax.Array:
            return jnp.dot(x, x, precision=precision)

        method = autopar.ShardParallel((1,))
        return autopar.plan(step, given, cluster=cluster, method=method).estimated_step_s

    spec = DEVICES["h200-sxm"]
    exact_s = 2 * 4096**3 / (spec.flops_32bit_exact * EXACT_EFFICIENCY)
    assert spec.efficiency > EXACT_EFFICIENCY
    assert seconds("highest") == pytest.approx(exact_s, rel=0.02)
    assert seconds("highest") > 4 * seconds("high")
    assert seconds("high") == seconds(None)
    assert seconds("highest", half) == seconds(None, half), "16 bits are never rounded"


def test_data_sheets_say_what_exact_products_reach() -> None:
    assert DEVICES["a100-sxm"].flops_32bit_exact == pytest.approx(19.5e12)
    assert DEVICES["v100"].flops_32bit_exact == pytest.approx(15.7e12)
    assert DEVICES["cpu"].flops_32bit_exact == DEVICES["cpu"].flops_32bit
