"""What plans say of themselves: sums that must agree, and words for shardings that are known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.details import (
    COLUMN,
    DATA,
    EXPERT,
    MEMORY_CATEGORIES,
    PARTIAL_SUMS,
    REPLICATED,
    ROW,
    STATE,
    ZERO,
    PlanDetails,
)
from autopar.ir.plan import ParallelPlan
from autopar.methods import ShardingOptions
from examples.models import build

CLUSTER = autopar.ClusterSpec(1, 8, "cpu")
MESH = autopar.LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.1))
DATA_AND_ZERO = f"{DATA} + {ZERO}"


@cache
def plan_of(model: str, how: str) -> ParallelPlan:
    if how == "megatron":  # what the second axis does not divide is left to the first
        example = build(model, seq_len=31)
        arguments = (example.abstract_state(), example.abstract_batch(62))
    else:
        example = build(model)
        arguments = (example.abstract_state(), example.abstract_batch())
    if how == "mesh":
        return autopar.solve_sharding(example.train_step, *arguments, mesh=MESH).plan
    methods = {
        "data": autopar.DataParallel(),
        "zero2": autopar.Zero2Parallel(),
        "zero3": autopar.Zero3Parallel(),
        "micro": autopar.ShardParallel((2, 4), num_micro_batches=2),
        "remat": autopar.ShardParallel((2, 4), options=ShardingOptions(remat="all")),
        "one": autopar.ShardParallel(),
        "megatron": autopar.ShardParallel((2, 4), options=ShardingOptions(pins=MEGATRON)),
    }
    cluster = autopar.ClusterSpec(1, 1, "cpu") if how == "one" else CLUSTER
    return autopar.plan(example.train_step, *arguments, cluster=cluster, method=methods[how])


MEGATRON = {
    "batch*": P("x"),
    "state.params*qkv*kernel*": P(None, "y"),
    "state.params*out*kernel*": P("y", None),
    "state.params*up*kernel*": P(None, "y"),
    "state.params*down*kernel*": P("y", None),
}


def details_of(plan: ParallelPlan) -> PlanDetails:
    assert plan.details is not None
    return plan.details


def words_of(plan: ParallelPlan) -> dict[str, Mapping[str, str]]:
    return {p.path: dict(p.words) for p in details_of(plan).parallelism}


# -- sums

PLANS = [
    ("mlp-tiny", "mesh"),
    ("gpt-tiny", "mesh"),
    ("moe-tiny", "mesh"),
    ("gpt-tiny-scan", "mesh"),
    ("gpt-tiny", "zero3"),
    ("gpt-tiny", "micro"),
    ("gpt-tiny", "remat"),
    ("gpt-tiny", "one"),
]


@pytest.mark.representatives("gpt-tiny-mesh", "mlp-tiny-mesh")
@pytest.mark.parametrize(("model", "how"), PLANS)
def test_parts_are_the_whole(model: str, how: str) -> None:
    plan = plan_of(model, how)
    details = details_of(plan)
    rows = list(details.ops.rows())
    assert len(rows) == len(details.ops) > 0
    compute_s = sum(m.compute_s for m in plan.modules)
    communication_s = sum(m.communication_s for m in plan.modules)
    assert sum(r.compute_s for r in rows) == pytest.approx(compute_s, rel=1e-3)
    assert sum(r.communication_s for r in rows) == pytest.approx(communication_s, rel=1e-3)
    assert sum(c.seconds for c in details.collectives) == pytest.approx(communication_s, rel=1e-3)
    assert sum(r.flops for r in rows) == pytest.approx(details.flops, rel=1e-3)
    moved = sum(c.num_bytes for c in details.collectives)
    assert moved == pytest.approx(plan.communication_bytes, rel=1e-2)
    assert sum(r.communication_bytes for r in rows) == pytest.approx(moved, rel=1e-3)
    assert details.memory is not None
    assert sum(details.memory.at_peak) == pytest.approx(plan.estimated_peak_bytes, rel=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize(("model", "how"), [p for p in PLANS if p[0] != "mlp-tiny"])
def test_flops_of_the_model_leave_out_recomputation(model: str, how: str) -> None:
    details = details_of(plan_of(model, how))
    wanted = build(model).flops_per_step()
    assert details.model_flops == pytest.approx(wanted, rel=2e-3)
    if how == "remat":
        assert details.flops > details_of(plan_of(model, "mesh")).flops * 1.15


def test_lines_are_the_users() -> None:
    rows = list(details_of(plan_of("gpt-tiny", "mesh")).ops.rows())
    products = [r for r in rows if r.name == "dot_general"]
    assert all(r.source.startswith("models/") for r in products)
    assert any(r.source.startswith("models/transformer.py:") for r in products)


# -- words


@pytest.mark.ci
def test_megatron_is_data_and_tensor_parallel() -> None:
    plan = plan_of("gpt-tiny", "megatron")
    words = words_of(plan)
    for layer in range(2):
        at = f"state.params['layer_{layer}']"
        for name, word in (
            ("['attention']['qkv']", COLUMN),
            ("['attention']['out']", ROW),
            ("['ffn']['up']", COLUMN),
            ("['ffn']['down']", ROW),
        ):
            assert words[f"{at}{name}['kernel']"] == {"x": DATA, "y": word}, name
        assert words[f"{at}['ffn']['up']['bias']"]["y"] == COLUMN
    own = next(p for p in details_of(plan).parallelism if "layer_0']['ffn']['up']['k" in p.path)
    assert own.module == "GPT/layer_0/ffn/up"
    assert own.reason == (
        "dot_general of GPT/layer_0/ffn/up: x splits the batch, y splits the output features"
    )
    # The passes of a layer go by the same words.
    products = [r for r in details_of(plan).ops.rows() if r.name == "dot_general"]
    up = [r for r in products if r.module == "GPT/layer_0/ffn/up"]
    assert [r.region for r in up] == ["forward", "backward", "backward"]
    assert {r.words for r in up} == {f"x: {DATA}, y: {COLUMN}"}
    down = [r for r in products if r.module == "GPT/layer_0/ffn/down"]
    assert {r.words for r in down} == {f"x: {DATA}, y: {ROW}"}


@pytest.mark.ci
def test_causes_of_megatrons_collectives() -> None:
    found = details_of(plan_of("gpt-tiny", "megatron")).collectives
    after_down = [
        c for c in found if c.producer == "dot_general of GPT/layer_0/ffn/down" and "y" in c.axes
    ]
    forward = [c for c in after_down if c.region == "forward"]
    assert {c.cause for c in forward} == {PARTIAL_SUMS}
    assert all("partial sums along y" in c.before for c in forward)
    name = "gradient of state.params['layer_0']['ffn']['up']['kernel']"
    gradients = [c for c in found if c.value == name]
    assert {c.cause for c in gradients} == {PARTIAL_SUMS}


@pytest.mark.representatives("zero3-data + ZeRO-it is kept split along x")
@pytest.mark.parametrize(
    ("how", "word", "reason"),
    [
        ("data", DATA, "x splits the batch"),
        ("zero2", DATA_AND_ZERO, "its moments are kept split along x"),
        ("zero3", DATA_AND_ZERO, "it is kept split along x"),
    ],
)
def test_data_parallelism_and_zero(how: str, word: str, reason: str) -> None:
    plan = plan_of("gpt-tiny", how)
    assert {w["x"] for w in words_of(plan).values()} == {word}
    assert all(p.reason.endswith(reason) for p in details_of(plan).parallelism)
    has_state = any(c.cause == STATE for c in details_of(plan).collectives)
    assert has_state == (how == "zero2")


def test_experts() -> None:
    words = words_of(plan_of("moe-tiny", "mesh"))
    assert set(words["state.params['layer_0']['experts']['up']"].values()) == {EXPERT}
    assert set(words["state.params['layer_0']['experts']['down']"].values()) == {EXPERT}


def test_one_device_is_told_too() -> None:
    plan = plan_of("gpt-tiny", "one")
    details = details_of(plan)
    assert plan.estimated_step_s > 0 and not details.collectives
    assert {w for p in details.parallelism for _, w in p.words} == {REPLICATED}
    assert set(details.ops.strings[w] for w in details.ops.words) == {""}


def test_a_dimension_of_the_batch_that_is_contracted_is_a_feature() -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(batch @ w) ** 2)

        return w - jax.grad(loss)(w)

    w, batch = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 8), (8, 64)))
    method = autopar.ShardParallel((8,), options=ShardingOptions(pins={"batch": P(None, "x")}))
    plan = autopar.plan(step, w, batch, cluster=CLUSTER, method=method)
    assert words_of(plan) == {"w": {"x": ROW}}


def test_averages_that_a_layer_keeps_are_no_parameters() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = batch @ w
            mean = 0.9 * state["mean"] + 0.1 * hidden.mean(0)
            return jnp.mean(jnp.tanh(hidden) ** 2), mean

        grad, mean = jax.grad(loss, has_aux=True)(state["w"])
        return {"w": state["w"] - grad, "mean": mean}

    shapes = {"w": (64, 64), "mean": (64,)}
    state = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    plan = autopar.plan(step, state, batch, cluster=CLUSTER, method=autopar.DataParallel())
    assert words_of(plan) == {"state['w']": {"x": DATA}}
    memory = details_of(plan).memory
    assert memory is not None
    held = dict(zip(MEMORY_CATEGORIES, memory.at_peak, strict=True))
    assert held["parameters"] == pytest.approx(4 * 64 * 64, rel=1e-3)
    assert held["optimizer state"] == 4 * 64


# -- memory


def test_categories_of_memory() -> None:
    plan = plan_of("gpt-tiny", "data")
    memory = details_of(plan).memory
    assert memory is not None
    held = dict(zip(MEMORY_CATEGORIES, memory.at_peak, strict=True))
    sizes = {
        t.path: 4.0 * jnp.prod(jnp.array(t.shape, dtype=int)).item()
        for t in plan.inputs
        if t.role == "state" and t.shape
    }
    params = sum(size for path, size in sizes.items() if path.startswith("state.params"))
    moments = sum(size for path, size in sizes.items() if ".mu" in path or ".nu" in path)
    assert held["parameters"] == pytest.approx(params, rel=1e-3)
    assert held["optimizer state"] == pytest.approx(moments, rel=1e-3)
    assert held["activations"] > 0 and held["batch"] > 0
    assert list(memory.seconds) == sorted(memory.seconds)
    assert len(memory.seconds) == len(memory.held) <= 300
    highest = max(sum(point) for point in memory.held)
    assert highest == pytest.approx(plan.estimated_peak_bytes, rel=1e-3)
    assert memory.largest[0].num_bytes == max(a.num_bytes for a in memory.largest)
    assert memory.seconds[-1] == pytest.approx(plan.estimated_step_s, rel=1e-2)


def test_files_keep_them() -> None:
    plan = plan_of("moe-tiny", "mesh")
    assert ParallelPlan.from_json(plan.to_json()) == plan
