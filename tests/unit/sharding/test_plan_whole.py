"""Scans over layers are written out where that fits and pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.rewrite.step_source import StepSource
from autopar.sharding import plan_whole
from autopar.sharding.planning_log import PlanningLog
from autopar.tracer.trace import StepOptions
from examples.models import build

ONE_H100 = autopar.ClusterSpec(1, 1, "h100-sxm")
EIGHT_H100S = autopar.ClusterSpec(1, 8, "h100-sxm")
SIZES = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "seq_len": 512, "vocab_size": 1024}


def plan_of(
    method: Any = None, cluster: autopar.ClusterSpec = ONE_H100, **changes: Any
) -> autopar.ParallelPlan:
    sizes = {"batch_size": 8, "scan_layers": True, **SIZES, **changes}
    model = build("gpt-2.6b", **sizes)
    state, batch = model.abstract_state(), model.abstract_batch()
    return autopar.plan(model.train_step, state, batch, cluster=cluster, method=method)


def test_a_short_scan_is_written_out() -> None:
    plan, loop = plan_of(), plan_of(scan_layers=False)
    assert plan.unrolled
    assert "scans over layers are written out" in plan.explain()
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)
    assert not loop.unrolled


def test_a_short_scan_is_written_out_on_a_mesh() -> None:
    large = {"cluster": EIGHT_H100S, "batch_size": 64, "hidden_size": 1024}
    plan, loop = plan_of(**large), plan_of(**large, scan_layers=False)
    assert plan.unrolled and plan.num_devices == 8 and not plan.is_pipeline
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)
    text = " ".join(plan.explain().split())
    assert "layers_0–3 (4)" in text, "all layers have the parallelism of their stack"
    assert "resharded parameters" in text and "partial sums of gradients" in text
    assert not plan_of(autopar.Zero3Parallel(), **large).unrolled, "each trip gathers its layer"


def test_a_scan_in_micro_batches_is_written_out() -> None:
    method = autopar.ShardParallel(num_micro_batches=2)
    for cluster, batch_size in ((ONE_H100, 32), (EIGHT_H100S, 256)):
        sizes = {"cluster": cluster, "batch_size": batch_size, "hidden_size": 1024}
        plan, loop = plan_of(method, **sizes), plan_of(method, **sizes, scan_layers=False)
        assert plan.unrolled and plan.num_micro_batches == 2
        assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)


def test_as_many_layers_are_recomputed_as_of_those_written_out_by_hand() -> None:
    sizes = {"hidden_size": 1024, "num_layers": 6, "batch_size": 32}
    budget = int(0.8 * plan_of(**sizes, scan_layers=False).estimated_peak_bytes)
    method = autopar.ShardParallel(options=autopar.ShardingOptions(memory_budget_bytes=budget))
    plan, loop = plan_of(method, **sizes), plan_of(method, **sizes, scan_layers=False)
    assert plan.unrolled and len(plan.remat) == len(loop.remat) > 0
    assert max(plan.estimated_peak_bytes, loop.estimated_peak_bytes) <= budget
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)


def test_a_scan_that_would_not_fit_written_out_stays() -> None:
    unrolled = plan_of()
    budget = int(0.9 * unrolled.estimated_peak_bytes)
    options = autopar.ShardingOptions(memory_budget_bytes=budget, remat="none")
    plan = plan_of(autopar.ShardParallel(options=options))
    assert not plan.unrolled, "the scan that stacks less fits as it is"
    assert plan.estimated_peak_bytes <= budget
    free = autopar.ShardingOptions(memory_budget_bytes=budget)
    cut = plan_of(autopar.AutoParallel(options=free))
    assert cut.unrolled, "written-out layers fit if one is recomputed, or in micro-batches"
    assert cut.remat or cut.num_micro_batches > 1
    assert cut.estimated_peak_bytes <= budget
    assert cut.estimated_step_s < plan.estimated_step_s


def whole_step(
    method: autopar.ShardParallel, cluster: autopar.ClusterSpec, batch_size: int = 8
) -> plan_whole.WholeStep:
    model = build("gpt-2.6b", batch_size=batch_size, scan_layers=True, **SIZES)
    arguments = (model.abstract_state(), model.abstract_batch())
    source = StepSource.of(model.train_step, arguments, {}, StepOptions())
    return plan_whole.WholeStep(source, cluster, method, PlanningLog())


def test_the_log_says_that_a_scan_stays_for_want_of_memory() -> None:
    roomy = whole_step(autopar.ShardParallel(), ONE_H100)
    plan = plan_whole.plan_whole(roomy).plan
    assert plan.unrolled and not roomy.log.cramped
    options = autopar.ShardingOptions(
        memory_budget_bytes=int(0.9 * plan.estimated_peak_bytes), remat="none"
    )
    short = whole_step(autopar.ShardParallel(options=options), ONE_H100)
    assert not plan_whole.plan_whole(short).plan.unrolled
    assert short.log.cramped == {1}


@pytest.mark.parametrize("limit_s", [60.0, 6.0, 0.1])
def test_layers_written_out_are_planned_on_all_meshes_if_there_is_time(limit_s: float) -> None:
    """On all meshes, it would take six seconds here; on one of the three, two."""
    whole = whole_step(autopar.ShardParallel(), EIGHT_H100S, batch_size=64)
    source = whole.source.written_out
    assert source is not None
    sizes = [one.whole.program.num_equations() for one in (source, whole.source)]
    plan = SimpleNamespace(mesh_shape=(4, 2))
    whole.log.deadline.limit_s = whole.log.deadline.elapsed_s + limit_s
    form = plan_whole._form_written_out(whole, source, plan, 6 * sizes[1] / sizes[0])  # type: ignore[arg-type]
    if limit_s < 1:
        assert form is None
        return
    assert form is not None and form.source is source
    assert (form.mesh is None) == (limit_s == 60)
    assert form.mesh is None or form.mesh.shape == (4, 2)


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.Zero2Parallel()])
def test_data_parallelism_treats_scanned_layers_as_those_written_out(method: Any) -> None:
    """Of a large batch: the update of a stack takes XLA more kernels than that of its layers."""
    sizes = {"cluster": EIGHT_H100S, "batch_size": 256, "hidden_size": 1024}
    plan, loop = plan_of(method, **sizes), plan_of(method, **sizes, scan_layers=False)
    assert plan.unrolled
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)
    assert plan.estimated_peak_bytes == pytest.approx(loop.estimated_peak_bytes, rel=0.02)


def test_a_scan_that_the_user_recomputes_whole_stacks_little_and_stays() -> None:
    plan, loop = plan_of(remat=True), plan_of(remat=True, scan_layers=False)
    assert not plan.unrolled
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.05)


def saving_step(num_layers: int, scanned: bool) -> Any:
    """Layers under a policy of `jax.checkpoint` that saves products: those of a scan stack them."""

    def layer(h: Any, own: Any) -> Any:
        return h + jnp.sin(jnp.tanh(h @ own["up"])) @ own["down"]

    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)

    def loss_of(params: Any, h: Any) -> Any:
        if scanned:
            return jnp.mean(lax.scan(lambda h, own: (layer(h, own), None), h, params)[0] ** 2)
        for index in range(num_layers):
            h = layer(h, jax.tree.map(lambda p, index=index: p[index], params))
        return jnp.mean(h**2)

    def train_step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def saving_state(num_layers: int, width: int) -> Any:
    shapes = {"up": (num_layers, width, 4 * width), "down": (num_layers, 4 * width, width)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("cluster", [ONE_H100, EIGHT_H100S], ids=["one device", "a mesh"])
def test_a_scan_that_stacks_what_a_policy_saves_is_written_out(
    cluster: autopar.ClusterSpec,
) -> None:
    batch = jax.ShapeDtypeStruct((4096 * cluster.num_devices, 1024), jnp.float32)
    plan, loop = (
        autopar.plan(
            saving_step(4, scanned),
            saving_state(4, 1024),
            batch,
            cluster=cluster,
            method=autopar.ShardParallel(),
        )
        for scanned in (True, False)
    )
    assert plan.unrolled
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)
    assert plan.estimated_peak_bytes == pytest.approx(loop.estimated_peak_bytes, rel=0.02)


def test_what_a_policy_saves_is_saved_by_layers_written_out() -> None:
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    source, loop = (
        StepSource.of(saving_step(3, scanned), (saving_state(3, 16), batch), {}, StepOptions())
        for scanned in (True, False)
    )
    assert source.written_out is not None
    ours, theirs = (
        Counter(e.name for e in one.whole.program.equations) for one in (source.written_out, loop)
    )
    for name in ("dot_general", "tanh", "sin", "cos", "optimization_barrier"):
        assert ours[name] == theirs[name] > 0, name
    assert ours["tanh"] == 6, "in both passes"


def test_only_a_long_scan_stays() -> None:
    assert plan_of(num_layers=24).unrolled
    assert not plan_of(num_layers=64).unrolled


def as_jit(step: Any, state: Any, batch: Any, method: Any, num_steps: int = 3) -> None:
    ours = autopar.parallelize(step, method=method)
    expected, found = state, state
    for _ in range(num_steps):
        expected, loss = jax.jit(step)(expected, batch)
        found, own_loss = ours(found, batch)
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected
    )


@pytest.mark.usefixtures("one_session")
@pytest.mark.parametrize(
    "method", [autopar.ShardParallel((8,)), autopar.DataParallel(), autopar.Zero2Parallel()]
)
def test_a_written_out_policy_trains_as_jit(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    monkeypatch.setattr(plan_whole, "_WORTH_UNROLLING", 2.0)  # whatever it gains
    rng = np.random.default_rng(0)
    state = {
        name: (0.2 * rng.normal(size=like.shape)).astype(np.float32)
        for name, like in saving_state(3, 16).items()
    }
    batch = rng.normal(size=(16, 16)).astype(np.float32)
    step = saving_step(3, scanned=True)
    plan = autopar.plan(step, state, batch, cluster=EIGHT_H100S, method=method)
    assert plan.unrolled
    autopar.init(devices=jax.devices()[:8])
    as_jit(step, state, batch, plan)


@pytest.fixture
def one_session() -> Iterator[None]:
    yield
    autopar.shutdown()


@pytest.mark.usefixtures("one_session")
@pytest.mark.representatives("one device-1-none", "a mesh-2-all")
@pytest.mark.parametrize(("num_micro_batches", "remat"), [(1, "none"), (2, "none"), (2, "all")])
@pytest.mark.parametrize("cluster", [ONE_H100, EIGHT_H100S], ids=["one device", "a mesh"])
def test_a_saved_plan_writes_the_scan_out_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: autopar.ClusterSpec,
    num_micro_batches: int,
    remat: Any,
) -> None:
    monkeypatch.setattr(plan_whole, "_WORTH_UNROLLING", 2.0)  # whatever it gains
    model = build("gpt-tiny-scan", num_layers=2)
    state, batch = model.create_state(), model.make_batch()
    options = autopar.ShardingOptions(remat=remat)
    method = autopar.ShardParallel((cluster.num_devices,), num_micro_batches, options)
    plan = autopar.plan(model.train_step, state, batch, cluster=cluster, method=method)
    assert plan.unrolled and bool(plan.remat) == (remat == "all")
    plan.save(tmp_path / "plan.json")
    autopar.init(devices=jax.devices()[: cluster.num_devices])
    loaded = autopar.ParallelPlan.load(tmp_path / "plan.json")
    _, loss = autopar.parallelize(model.train_step, method=loaded)(state, batch)
    _, expected = jax.jit(model.train_step)(model.create_state(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
