"""Shardings by hand compute what the model computes; their specs fit the large models."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.experts import layouts as by_hand
from benchmarks.large_models import SIZES, example_of, plan_by_hand
from examples.models import Example, build

# Nothing here runs for long, so compiling quickly matters more than the code that comes out.
FAST = {"xla_backend_optimization_level": 0}


def shallow(name: str) -> Example:
    """One layer (of the mixture a pair): the plans say the same of every layer."""
    if name == "wresnet-tiny":
        return build(name, stage_sizes=(1,))
    return build(name, num_layers=2 if name == "moe-tiny" else 1)


@functools.cache
def on_one_device(name: str) -> list[np.ndarray]:
    example = shallow(name)
    step = jax.jit(example.train_step, compiler_options=FAST)
    return gradients_of(*step(example.create_state(), example.make_batch()))


def gradients_of(state: Any, loss: Any) -> list[np.ndarray]:
    """The loss and the optimizer's moments, which after one step are the gradients (and squares).
    New parameters are no test: Adam's first step is the gradient's sign, however small it is."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves((loss, state.opt_state))]


MEGATRON = by_hand.megatron(2, 4, sequence=True, zero=True)
CASES = [
    pytest.param("gpt-tiny", by_hand.fsdp(8), marks=pytest.mark.slow),
    pytest.param("gpt-tiny", MEGATRON, marks=pytest.mark.slow),
    pytest.param("llama-tiny", by_hand.fsdp(8), marks=pytest.mark.slow),
    pytest.param("llama-tiny", MEGATRON, marks=pytest.mark.slow),  # see test_experts
    pytest.param(
        "moe-tiny",
        by_hand.megatron(4, 2, sequence=True, zero=True),
        marks=pytest.mark.slow,
    ),
    pytest.param("moe-tiny", by_hand.fsdp(8), marks=pytest.mark.slow),
    pytest.param("moe-tiny", by_hand.expert_parallel(8, zero=True), marks=pytest.mark.slow),
    pytest.param("moe-tiny", by_hand.experts_in_hosts(2, 4), marks=pytest.mark.slow),
    pytest.param("moe-tiny", by_hand.experts_across_hosts(2, 4), marks=pytest.mark.slow),
    pytest.param("wresnet-tiny", by_hand.image_fsdp(8), marks=pytest.mark.slow),
    ("wresnet-tiny", by_hand.image_channels(2, 4)),
]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "plan"), CASES, ids=lambda x: getattr(x, "name", x))
def test_step_equals_that_of_one_device(name: str, plan: by_hand.HandWritten) -> None:
    example = shallow(name)
    state, batch = example.create_state(), example.make_batch()
    jitted, _ = plan.jitted(example.train_step, state, jax.devices())
    compiled = jitted.lower(state, batch).compile(compiler_options=FAST)
    state_shardings, batch_shardings = compiled.input_shardings[0]
    state = jax.device_put(state, state_shardings)
    batch = jax.device_put(batch, batch_shardings)
    found = gradients_of(*compiled(state, batch))
    for ours, expected in zip(found, on_one_device(name), strict=True):
        scale = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4 * scale)


def test_activations_of_nnx_modules_are_annotated_by_name() -> None:
    """Each module of a Llama is seen once a layer, under the name that it has in its parent."""
    example = build("llama-tiny")
    seen: collections.Counter[str] = collections.Counter()

    def count(out: Any, name: str) -> Any:
        seen[name] += 1
        return out

    with by_hand.intercept_nnx(count):
        jax.eval_shape(example.train_step, example.abstract_state(), example.abstract_batch())
    layers = example.config.num_layers
    in_layers = (
        "LlamaLayer", "attention_norm", "attention", "query", "key", "value", "out", "ffn_norm",
        "ffn", "gate", "up", "down",
    )  # fmt: skip
    outside = ("model", "embed", "final_norm", "lm_head")
    assert seen == dict.fromkeys(in_layers, layers) | dict.fromkeys(outside, 1)


@pytest.mark.representatives("llama3-8b-64", "wresnet-2b-64")
@pytest.mark.parametrize("num_devices", [8, 64])
@pytest.mark.parametrize("model", SIZES)
def test_specs_divide_the_large_models(model: str, num_devices: int) -> None:
    """No dimension of a parameter is split into parts that are not equal, and plans with ZeRO-3
    leave no device with much more than its share."""
    example = example_of(model, num_devices, num_layers=2)
    state = example.abstract_state()
    kinds = ["fsdp", "zero2", "megatron"] + ["experts"] * model.startswith("moe")
    for kind in kinds:
        plan = plan_by_hand(model, num_devices, kind)
        sizes = dict(zip(("x", "y"), plan.mesh_shape, strict=True))
        held = total = 0
        specs = plan.state_specs(state)
        for leaf, spec in zip(
            jax.tree.leaves(state),
            jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)),
            strict=True,
        ):
            shards = 1
            for size, axes in zip(leaf.shape, spec, strict=False):
                names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
                parts = int(np.prod([sizes[name] for name in names]))
                assert size % parts == 0, (kind, leaf.shape, spec)
                shards *= parts
            held += leaf.size * leaf.dtype.itemsize / shards
            total += leaf.size * leaf.dtype.itemsize
        if kind != "zero2":  # vectors and positions may be whole
            assert held < total / num_devices + 64e6, kind
