"""Closed-form cases: BERT layers (fused qkv, FFN 4H, dropout on, Adam) on four devices."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from autopar import LogicalMesh
from examples.models import bert
from tests.conformance.closed_form import all_reduce, collectives, kinds, solve, specs


def layers(batch, **config):
    return bert.layers_example(bert.BertLayersConfig(num_layers=2, num_heads=8, **config), batch)


@pytest.mark.slow
def test_large_batch_is_data_parallel():
    example = layers(64, hidden_size=32, seq_len=64)
    solution = solve(example, 64, LogicalMesh((4, 1)))
    assert solution.gap == 0
    assert set(specs(solution.plan, "state").values()) == {P()}
    assert set(specs(solution.plan, "batch").values()) == {P("x")}
    assert kinds(collectives(example, 64, solution.plan)) == {"all-reduce": 1}


@pytest.mark.ci
def test_small_batch_is_tensor_parallel():
    """qkv column, attention out row, FFN-in column, FFN-out row; 4 · layers − 1 all-reduces."""
    example = layers(8, hidden_size=128, seq_len=8)
    solution = solve(example, 8, LogicalMesh((4, 1)))
    assert solution.gap == 0
    expected = {"qkv": P(None, "x"), "out": P("x"), "up": P(None, "x"), "down": P("x")}
    for name, spec in expected.items():
        found = specs(solution.plan, f"['{name}']['kernel']")
        assert found and set(found.values()) == {spec}, (name, found)
    assert solution.objective == pytest.approx(7 * all_reduce(8 * 8 * 128 * 4, 4))
    ops = collectives(example, 8, solution.plan)
    assert kinds(ops) == {"all-reduce": 7}
    assert {op.shapes for op in ops} == {((8, 8, 128),)}


@pytest.mark.ci
def test_remat_costs_no_more_than_its_all_reduces():
    """Each layer recomputed: 6 · layers − 1 all-reduces by Megatron's pattern. The solver may
    scatter between them and pay less, never more."""
    example = layers(8, hidden_size=128, seq_len=8, remat=True)
    solution = solve(example, 8, LogicalMesh((4, 1)))
    assert solution.gap == 0
    assert solution.objective <= 11 * all_reduce(8 * 8 * 128 * 4, 4) * 1.0001
    expected = {"qkv": P(None, "x"), "out": P("x"), "up": P(None, "x"), "down": P("x")}
    for name, spec in expected.items():
        found = specs(solution.plan, f"['{name}']['kernel']")
        assert found and set(found.values()) == {spec}, (name, found)


@pytest.mark.ci
def test_data_and_tensor_together_on_two_axes():
    """α = (2, 2), β = (1, 0.1): data on the dear axis, the cheap one splits kernels."""
    example = layers(32, hidden_size=64, seq_len=32)
    solution = solve(example, 32, LogicalMesh((2, 2), alpha=(2, 2), beta=(1, 0.1)))
    assert solution.gap == 0
    for path, spec in specs(solution.plan, "batch").items():
        assert "x" in (spec[0] if isinstance(spec[0], tuple) else (spec[0],)), (path, spec)
    kernels = specs(solution.plan, "['kernel']")
    assert any("y" in str(spec) for spec in kernels.values()), kernels
    assert not any("'x'" in str(s) for p, s in kernels.items() if ".params" in p), kernels
