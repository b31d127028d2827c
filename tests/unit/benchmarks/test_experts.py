"""Experts compute what the model computes; their candidates are what was meant."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks.experts import Expert, best_of_families, chains_for, experts_for
from benchmarks.experts.grid import layouts_for
from benchmarks.suite.cases import DEVICES_PER_HOST, H100_ROWS, Row
from benchmarks.suite.cases import example_of as suite_example
from examples.models import Example, build

# Nothing here runs for long, so compiling quickly matters more than the code that comes out.
FAST = {"xla_backend_optimization_level": 0}
TINY = ("gpt-tiny", "llama-tiny", "moe-tiny", "bert-tiny", "wresnet-tiny", "vit-tiny", "dlrm-tiny")
UNSTACKED = ("wresnet-tiny", "dlrm-tiny")  # models without equal layers


@functools.cache
def example_of(name: str) -> Example:
    """One layer (of the mixture a pair), and rows enough for two micro-batches on 8 devices."""
    if name == "wresnet-tiny":
        return build(name, stage_sizes=(1,))
    if name == "dlrm-tiny":
        return build(name)
    rows = 32 if name == "moe-tiny" else 16
    return build(name, rows, num_layers=2 if name == "moe-tiny" else 1)


@functools.cache
def candidates(name: str, scanned: bool) -> dict[str, Expert]:
    found = experts_for(example_of(name), 8, 4, scan_layers=scanned)
    return {expert.name: expert for expert in found}


@functools.cache
def on_one_device(name: str, scanned: bool) -> list[np.ndarray]:
    example = example_of(name)
    if scanned:
        example = example.replace(scan_layers=True)
    step = jax.jit(example.train_step, compiler_options=FAST)
    return gradients_of(*step(example.create_state(), example.make_batch()))


def gradients_of(state: Any, loss: Any) -> list[np.ndarray]:
    """The loss and the optimizer's moments, which after one step are the gradients (and squares).
    New parameters are no test: Adam's first step is the gradient's sign, however small it is."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves((loss, state.opt_state))]


def check_step(name: str, expert: Expert) -> None:
    step, state, batch = expert.made(example_of(name), jax.devices())
    compiled = step.lower(state, batch).compile(compiler_options=FAST)
    found = gradients_of(*compiled(state, batch))
    for ours, expected in zip(found, on_one_device(name, expert.scan_layers), strict=True):
        scale = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4 * scale)


QUICK = [
    ("gpt-tiny", True, "FSDP (ZeRO-3), scanned, remat products"),
    ("llama-tiny", True, "Megatron 2×4 + sequence + ZeRO-3, scanned, 2 micro-batches"),
    ("moe-tiny", False, "expert parallel 2×4 + ZeRO-3, remat attention"),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "scanned", "expert"),
    [QUICK[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in QUICK[1:])],
)
def test_step_equals_that_of_one_device(name: str, scanned: bool, expert: str) -> None:
    check_step(name, candidates(name, scanned)[expert])


KNOBS_OF = ("FSDP (ZeRO-3)", "Megatron 2×4 + sequence + ZeRO-3")


def worth_running(name: str, scanned: bool) -> list[str]:
    """Every layout as it is, with layers one by one; of two layouts all knobs, stacked layers."""
    found = []
    for expert in candidates(name, scanned).values():
        if expert.layout is None or (name, scanned, expert.name) in QUICK:
            continue
        is_plain = expert.remat == "none" and expert.num_micro_batches == 1
        if expert.layout.name in KNOBS_OF if scanned else is_plain:
            found.append(expert.name)
    return found


ALL = [
    pytest.param(name, scanned, expert, id=f"{name}: {expert}", marks=pytest.mark.slow)
    for name in TINY
    for scanned in ((False,) if name in UNSTACKED else (False, True))
    for expert in worth_running(name, scanned)
]


@pytest.mark.parametrize(("name", "scanned", "expert"), ALL)
def test_every_step_equals_that_of_one_device(name: str, scanned: bool, expert: str) -> None:
    check_step(name, candidates(name, scanned)[expert])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_pipeline_by_hand_computes_the_same_step(name: str) -> None:
    example = build(name, 8)
    plain = jax.jit(example.train_step)(example.create_state(), example.make_batch())
    found = [expert for expert in experts_for(example, 8, 4) if expert.is_pipeline]
    expert = next(expert for expert in found if expert.name.startswith("2 stages of 2×2"))
    plan = expert.plan(example, autopar.ClusterSpec(2, 4, "cpu"))
    kernels = [spec for path, spec in plan_specs(plan) if "['up']['kernel']" in path]
    assert [stage.mesh_shape for stage in plan.stages] == [(2, 2), (2, 2)]
    assert set(kernels) == {P(None, "y"), P("x", "y")}
    step = autopar.parallelize(expert.example(example).train_step, method=plan)
    ours = gradients_of(*step(example.create_state(), example.make_batch()))
    for own, expected in zip(ours, gradients_of(*plain), strict=True):
        scale = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4 * scale)


def plan_specs(plan: autopar.ParallelPlan) -> list[tuple[str, P]]:
    leaves = jax.tree.leaves_with_path(plan.input_specs, is_leaf=lambda s: isinstance(s, P))
    return [(jax.tree_util.keystr(path), spec) for path, spec in leaves]


# -- candidates


def test_the_first_of_a_chain_that_fits_is_taken() -> None:
    @dataclass(frozen=True)
    class Verdict:
        fits: bool
        step_s: float

    tried = []

    def judge(expert: Expert) -> Verdict:
        """FSDP fits as it is, ZeRO-2 when the feed-forward is computed again, the rest never."""
        tried.append(expert.name)
        if expert.family == "FSDP":
            return Verdict(True, 2.0 + expert.num_micro_batches)
        return Verdict(expert.name == "ZeRO-2, remat attention", 1.0)

    chains = chains_for(build("gpt-tiny", 16), 8, 8)
    best = best_of_families(chains, judge)
    assert best["FSDP"][0].name == "FSDP (ZeRO-3)"
    assert best["ZeRO-2"][0].name == "ZeRO-2, remat attention"
    assert "ZeRO-2, remat full" not in tried
    assert "FSDP (ZeRO-3), remat products" not in tried
    assert not best["data parallel"][1].fits
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("name", TINY)
def test_names_tell_candidates_apart(name: str) -> None:
    found = experts_for(build(name, 16), 8, 4)
    assert len({expert.name for expert in found}) == len(found)
    assert {"data parallel", "FSDP", "ZeRO-2", "HSDP"} <= {expert.family for expert in found}
    assert ("expert parallel" in {e.family for e in found}) == (name == "moe-tiny")
    assert ("3-D by hand" in {e.family for e in found}) == (name in ("gpt-tiny", "llama-tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("row", H100_ROWS, ids=lambda row: row.name)
def test_specs_divide_the_models_of_the_suite(row: Row) -> None:
    """No dimension of the state or batch is split into parts that are not equal."""
    example = suite_example(replace(row, layers=2))
    state, batch = example.abstract_state(), example.abstract_batch()
    for family, layout in layouts_for(example, row.devices, DEVICES_PER_HOST):
        mesh = jax.sharding.AbstractMesh(layout.mesh_shape, ("x", "y"))
        specs = jax.tree.leaves(layout.state_specs(state), is_leaf=lambda s: isinstance(s, P))
        specs += [layout.batch] * len(batch)
        for leaf, spec in zip(jax.tree.leaves((state, batch)), specs, strict=True):
            sharding = jax.sharding.NamedSharding(mesh, spec)
            part = sharding.shard_shape(leaf.shape)  # an error where it is not even
            assert len(part) == leaf.ndim, (family, layout.name)
