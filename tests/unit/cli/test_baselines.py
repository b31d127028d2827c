"""Baselines are what people would write by hand, and those that cannot be made say why."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli.baselines import baselines
from tests.unit.cli.factories_for_tests import make_step

TITLES = ["data parallel", "ZeRO-2", "FSDP (ZeRO-3)", "Megatron"]


def planned(batch: int, hidden: int, cluster: autopar.ClusterSpec):
    """Baselines of two matrices, and the methods that were tried for them."""
    step, args = make_step(batch, hidden)
    tried = []

    def make(method):
        tried.append(method)
        return autopar.plan(step, *args, cluster=cluster, method=method)

    plan = autopar.plan(step, *args, cluster=cluster, method="data")
    return baselines(plan, cluster, make), tried


def splits(plan) -> dict[str, dict[str, int]]:
    """Path -> axis -> the dimension that it splits."""
    return {
        tensor.path: {
            name: dim for name, dim in zip(plan.axis_names, tensor.layout, strict=True) if dim >= 0
        }
        for tensor in plan.inputs
    }


def test_megatron_splits_the_batch_over_one_axis_and_weights_over_the_other() -> None:
    cluster = autopar.ClusterSpec(2, 4, "h100-sxm")
    found, tried = planned(64, 256, cluster)
    assert list(found) == TITLES
    shapes = [m.mesh_shape for m in tried if isinstance(m, autopar.ShardParallel)]
    assert shapes == [(4, 2), (2, 4)]  # inside a host of four
    plan = found["Megatron"]
    assert plan.axis_names == ("x", "y") and plan.mesh_shape in shapes
    assert splits(plan) == {
        "params['down']": {"y": 0},
        "params['up']": {"y": 1},
        "batch['x']": {"x": 0},
        "batch['y']": {"x": 0},
    }
    step, args = make_step(64, 256)
    others = [
        autopar.plan(step, *args, cluster=cluster, method=method)
        for method in tried
        if isinstance(method, autopar.ShardParallel)
    ]
    assert plan.estimated_step_s == min(other.estimated_step_s for other in others)


def test_megatron_is_no_data_parallelism_in_disguise() -> None:
    """With many rows, splitting them over both axes would be fastest."""
    found, _ = planned(2**14, 256, autopar.ClusterSpec(1, 8, "h100-sxm"))
    plan = found["Megatron"]
    assert plan.estimated_step_s > found["FSDP (ZeRO-3)"].estimated_step_s
    words = [dict(one.words) for one in plan.details.parallelism]
    assert words and not any("data" in word["y"] for word in words)


def test_each_takes_the_fewest_micro_batches_that_fit() -> None:
    """Activations of 131,072 rows take more than the memory of a device; the state does not."""
    cluster = autopar.ClusterSpec(1, 4, "h100-sxm", memory_bytes=2e8)
    found, tried = planned(2**17, 256, cluster)
    budget = 0.9 * 2e8
    for title in TITLES:
        plan = found[title]
        assert not isinstance(plan, str), plan
        assert plan.estimated_peak_bytes <= budget
        assert plan.num_micro_batches > 1
    data = [m for m in tried if type(m) is autopar.DataParallel]
    for remat in ("none", "all"):
        fewer = [m.num_micro_batches for m in data if m.remat == remat]
        assert fewer == [2**n for n in range(len(fewer))] and len(fewer) > 1
    last = [[m for m in data if m.remat == remat][-1] for remat in ("none", "all")]
    step, args = make_step(2**17, 256)
    both = [autopar.plan(step, *args, cluster=cluster, method=method) for method in last]
    fitting = [made for made in both if made.estimated_peak_bytes <= budget]
    assert found["data parallel"].estimated_step_s == min(p.estimated_step_s for p in fitting)


def test_layers_are_recomputed_where_micro_batches_are_not_enough() -> None:
    """A row on each device, which cannot be cut: 16 layers of 4 MiB, several times."""

    def step(params, batch):
        def loss(params):
            x = batch
            for w in params:
                x = x + jnp.tanh(jnp.sin(x @ w) * x)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    args = ([array(256, 256)] * 16, array(8, 4096, 256))
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm", memory_bytes=180e6)
    made = lambda method: autopar.plan(step, *args, cluster=cluster, method=method)  # noqa: E731
    plain = made("zero3")
    assert plain.estimated_peak_bytes > 180e6
    found = baselines(plain, cluster, made)
    for title in TITLES[:3]:
        assert found[title].remat and found[title].estimated_peak_bytes <= 0.9 * 180e6, title


def test_a_state_too_large_is_said_without_a_search() -> None:
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm", memory_bytes=2**20)
    step, args = make_step(64, 1024)
    plan = autopar.plan(step, *args, cluster=cluster, method="data")
    tried = []

    def make(method):
        tried.append(method)
        return autopar.plan(step, *args, cluster=cluster, method=method)

    found = baselines(plan, cluster, make)
    assert found["Megatron"] == (
        "split over 8 devices, the state takes 4.0 MiB of each, and the budget is 921.6 KiB"
    )
    assert [(type(m), m.num_micro_batches) for m in tried] == [
        (autopar.DataParallel, 1), (autopar.Zero2Parallel, 1), (autopar.Zero3Parallel, 1),
    ]  # fmt: skip
    held = prod((1024, 4096)) * 4 * 2
    assert found["data parallel"].estimated_peak_bytes > held


def test_a_batch_that_does_not_divide_is_said() -> None:
    cluster = autopar.ClusterSpec(2, 2, "h100-sxm")
    step, args = make_step(3, 8)
    plan = autopar.plan(step, *args, cluster=cluster, method="shard")
    made = lambda method: autopar.plan(step, *args, cluster=cluster, method=method)  # noqa: E731
    for title, found in baselines(plan, cluster, made).items():
        assert isinstance(found, str) and "3" in found, title


def test_hosts_of_one_device_have_no_tensor_axis() -> None:
    found, _ = planned(64, 64, autopar.ClusterSpec(4, 1, "h100-sxm"))
    assert found["Megatron"].startswith("hosts have one device each")


@pytest.mark.parametrize("rest", [{}, {"key": jax.random.key(0)}], ids=["an array", "with a key"])
def test_state_of_any_form(rest) -> None:
    """A bare array, and keys, which have no size that a user could know."""

    def step(w, batch):
        loss = lambda w: jnp.mean((batch @ (w["w"] if rest else w)) ** 2)  # noqa: E731
        grad = jax.grad(loss, allow_int=True)(w)
        if not rest:
            return w - grad
        return {"w": w["w"] - grad["w"], "key": jax.random.split(w["key"])[0]}

    w = jnp.ones((64, 64))
    args = ({"w": w, **rest} if rest else w, jnp.ones((8, 64)))
    cluster = autopar.ClusterSpec(1, 4, "h100-sxm")
    plan = autopar.plan(step, *args, cluster=cluster)
    made = lambda method: autopar.plan(step, *args, cluster=cluster, method=method)  # noqa: E731
    found = baselines(plan, cluster, made)["Megatron"]
    assert isinstance(found, autopar.ParallelPlan), found
    split = splits(found)
    assert "y" in split["w['w']" if rest else "w"] and "y" not in split["batch"]
