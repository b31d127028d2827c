"""Every StableHLO op that the models lower to has a rule.

A new JAX release may lower something to an op that nobody has ruled on yet; the model that has it
would then run that part replicated, correctly and slowly.
"""

from __future__ import annotations

import jax
import pytest

from autopar.tracer.build import stablehlo_ops
from autopar.tracer.trace_step import trace_step
from examples.models import MODELS, build

TINY = [name for name in MODELS if "-tiny" in name]
VARIANTS = [(name, {}) for name in TINY] + [
    ("gpt-tiny", {"dropout": 0.1, "remat": True}),
    ("gpt-tiny-scan", {"dropout": 0.1, "remat": True}),
    ("moe-tiny", {"remat": True}),
]


@pytest.mark.representatives(
    "mlp-tiny-config0", "gpt-tiny-config1", "moe-tiny-config13", "wresnet-tiny-config8"
)
@pytest.mark.parametrize(("name", "config"), VARIANTS)
def test_every_op_of_the_model_has_a_rule(name: str, config: dict[str, object]) -> None:
    example = build(name, **config)
    ops = stablehlo_ops(
        trace_step(example.train_step, (example.abstract_state(), example.abstract_batch()))
    )
    assert "stablehlo.dot_general" in ops
    assert [op for op, ruled in ops.items() if not ruled] == []


def test_an_op_without_a_rule_is_seen() -> None:
    step = trace_step(
        lambda a: jax.numpy.linalg.qr(a)[0], (jax.ShapeDtypeStruct((8, 8), "float32"),)
    )
    ops = stablehlo_ops(step)
    assert [op for op, ruled in ops.items() if not ruled] == ["stablehlo.custom_call"]
