"""What the conformance cases share: the ring formulas, solving, and counting in compiled HLO."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

import autopar
from autopar.runtime.hlo import CollectiveOp, read_collectives


def all_reduce(num_bytes: float, ranks: int, alpha: float = 1.0, beta: float = 1.0) -> float:
    return alpha + beta * 2 * (ranks - 1) / ranks * num_bytes


def solve(example: Any, batch_size: int, mesh: autopar.LogicalMesh) -> autopar.ShardingSolution:
    state, batch = example.abstract_state(), example.abstract_batch(batch_size)
    return autopar.solve_sharding(example.train_step, state, batch, mesh=mesh)


def collectives(example: Any, batch_size: int, plan: autopar.ParallelPlan) -> list[CollectiveOp]:
    """Collectives of the compiled program; scalar ones (the loss) do not count."""
    state, batch = example.abstract_state(), example.abstract_batch(batch_size)
    devices = jax.devices()[: plan.num_devices]
    compiled = autopar.compile(example.train_step, state, batch, plan=plan, devices=devices)
    return [op for op in read_collectives(compiled["step"].as_text() or "") if not op.is_scalar]


def kinds(ops: list[CollectiveOp]) -> Counter[str]:
    return Counter(op.kind for op in ops)


def specs(plan: autopar.ParallelPlan, part: str) -> dict[str, Any]:
    """Specs of the inputs whose path holds `part`."""
    return {t.path: plan.spec_of(t) for t in plan.inputs if part in t.path}
