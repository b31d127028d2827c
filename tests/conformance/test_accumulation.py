"""Gradient accumulation reduces gradients once per step, after the loop over micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from examples.models import mlp

BATCH_SIZE, NUM_MICRO_BATCHES = 256, 2
EXAMPLE = mlp.example(mlp.MLPConfig(16, num_layers=2), BATCH_SIZE)
METHODS = {
    "DataParallel": autopar.DataParallel(num_micro_batches=NUM_MICRO_BATCHES),
    "ShardParallel": autopar.ShardParallel(
        autopar.LogicalMesh((4, 1)), num_micro_batches=NUM_MICRO_BATCHES
    ),
}


def run(method: Any) -> Any:
    """One step on four devices: (executable, largest difference from the whole-batch step)."""
    autopar.init(devices=jax.devices()[:4])
    try:
        step = autopar.parallelize(EXAMPLE.train_step, method=method, donate_argnums=())
        state, batch = EXAMPLE.create_state(), EXAMPLE.make_batch()
        got = step(state, batch)
        executable = step.last_executable
        executable.collectives()
    finally:
        autopar.shutdown()
    want = jax.jit(EXAMPLE.train_step)(state, batch)
    differences = [
        np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    return executable, max(differences)


@pytest.mark.representatives("ShardParallel")
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_reduced_once(name: str) -> None:
    executable, difference = run(METHODS[name])
    collectives = executable.collectives()
    assert [c for c in collectives if c.in_loop] == []
    (reduction,) = [c for c in collectives if c.kind == "all-reduce"]
    assert reduction.trips == 1
    assert sorted(reduction.shapes) == sorted([(16, 16), (16,)] * 2 + [()])
    assert len(collectives) == 1
    assert difference < 5e-4
    # Both price the same communication: each gradient once, and the loss.
    plan = executable.plan
    each = sum(2 * 3 / 4 * size * 4 for size in (16 * 16, 16, 16 * 16, 16))
    assert plan.communication_bytes == pytest.approx(each)


@pytest.mark.ci
def test_the_loop_holds_activations_of_one_micro_batch() -> None:
    """The temporaries of a step whose activations dominate shrink with the micro-batches."""
    example = mlp.example(mlp.MLPConfig(16, num_layers=8), 4096)

    def temporaries(num_micro_batches: int) -> int:
        method = autopar.DataParallel(num_micro_batches=num_micro_batches)
        args = (example.abstract_state(), example.abstract_batch())
        plan = autopar.plan(
            example.train_step, *args, cluster=autopar.ClusterSpec(1, 4, "cpu"), method=method
        )
        program = autopar.compile(example.train_step, *args, plan=plan)["step"]
        stats = program.memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    assert temporaries(8) < temporaries(1) / 3
