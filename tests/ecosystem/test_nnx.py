"""nnx modules, optimizers and metrics that a step changes in place, as under `nnx.jit`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.errors import ArgumentError
from tests.ecosystem.steps import ON_A_MESH, SHARDED, TWO_STAGES, batch, check_close
from tests.remote.cases import running_on
from tests.remote.process_cluster import ProcessCluster

ONE_AXIS = autopar.ShardParallel((8,))


class Net(nnx.Module):
    """Everything whose state a step changes: parameters, averages, random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.name = "net"

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(nnx.relu(self.norm(self.layers[0](x))))
        return self.layers[1](x)


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, num_layers: int = 2) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(num_layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def parts(kind: type = Net, key: Any = 0, **options: Any) -> tuple[Any, Any, Any]:
    model = kind(nnx.Rngs(key), **options)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
    def loss_fn(model: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def check_same(got: Any, want: Any) -> None:
    check_close(nnx.state(got), nnx.state(want))


def run(step: Any, objects: tuple[Any, ...], num_steps: int = 2) -> list[Any]:
    return [step(*objects, batch(i)) for i in range(num_steps)]


def test_a_step_in_place_equals_that_of_nnx_jit() -> None:
    got, want = parts(), parts()
    step = autopar.parallelize(train_step, method=ON_A_MESH)
    check_close(run(step, got, 3), run(nnx.jit(train_step), want, 3))
    check_same(got, want)
    check_close(got[2].compute(), want[2].compute())

    plan = step.last_executable.plan
    roles = {tensor.path: tensor.role for tensor in plan.inputs}
    assert roles["model.layers[0].kernel"] == roles["model.norm.mean"] == "state"
    assert roles["model.dropout.rngs.count"] == roles["metrics.loss.total"] == "state"
    assert roles["optimizer.opt_state[0].mu.layers[1].kernel"] == "state"
    assert {path for path, role in roles.items() if role == "batch"} == {"batch['x']", "batch['y']"}
    assert plan.outputs[-1].path == "result"
    assert "model.layers[0].kernel" in plan.explain("model.layers[0].kernel")
    wanted_spec = plan.input_specs[0].layers[0].kernel
    assert got[0].layers[0].kernel.sharding.spec == wanted_spec
    assert len(step.compiled_entries()) == 1, "no later call was planned anew"


def test_an_optimizer_that_holds_the_model() -> None:
    def make() -> tuple[Any, Any]:
        model = Stack(nnx.Rngs(0))
        return model, nnx.ModelAndOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(
            lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        )(model)
        optimizer.update(grads)
        return loss

    got, want = make(), make()
    parallel = autopar.parallelize(step, method=SHARDED)
    check_close(run(parallel, got), run(nnx.jit(step), want))
    check_same(got, want)
    assert got[1].model is got[0]
    assert [t.path for t in parallel.last_executable.plan.inputs].count(
        "model.layers[0].kernel"
    ) == 1
    moment = got[1].opt_state[0].mu["layers"][0]["kernel"]
    for array in (got[0].layers[0].kernel, moment):
        assert not array.get_value().sharding.is_fully_replicated


def test_structure_and_attributes_that_the_step_changes() -> None:
    def step(model: Any, x: Any) -> Any:
        model.seen = nnx.Variable(jnp.sum(x) + (model.seen if hasattr(model, "seen") else 0.0))
        model.name = "seen"
        return model(x).sum()

    got, want = Stack(nnx.Rngs(0)), Stack(nnx.Rngs(0))
    kernel = got.layers[0].kernel
    parallel = autopar.parallelize(step, method=ONE_AXIS)
    serial = nnx.jit(step)
    for _ in range(3):
        check_close(parallel(got, batch()["x"]), serial(want, batch()["x"]))
    check_same(got, want)
    assert got.name == "seen"
    assert got.layers[0].kernel is kernel, "the caller's own objects"
    assert len(parallel.compiled_entries()) == 2, "one per structure"


def test_objects_that_are_returned() -> None:
    def step(model: Any, batch: Any) -> Any:
        before = nnx.clone(model)
        model.layers[0].bias[...] += 1.0
        return {"model": model, "before": before, "sum": model(batch["x"]).sum()}

    model = Stack(nnx.Rngs(0))
    parallel = autopar.parallelize(step, method=ONE_AXIS)
    for _ in range(2):
        result = parallel(model, batch())
        assert result["model"] is model
        assert isinstance(result["before"], Stack) and result["before"] is not model
        np.testing.assert_allclose(result["before"].layers[0].bias + 1, model.layers[0].bias)
    np.testing.assert_allclose(model.layers[0].bias, 2.0)


def test_keyword_arguments_and_containers_of_objects() -> None:
    def step(batch: Any, *, second: Any, first: Any) -> Any:
        for add, one in enumerate((*first["of"], second)):
            one.layers[0].bias[...] += add + 1.0
        return batch["x"].sum()

    models = [Stack(nnx.Rngs(i)) for i in range(3)]
    parallel = autopar.parallelize(step, method=ONE_AXIS, batch_argnums=(0,))
    parallel(batch(), second=models[2], first={"of": (models[0], models[1]), "none": None})
    assert [float(m.layers[0].bias[0]) for m in models] == [1.0, 2.0, 3.0]
    paths = [t.path for t in parallel.last_executable.plan.inputs]
    assert "first['of'][1].layers[0].bias" in paths


def test_evaluation_returns_only_what_it_changed() -> None:
    objects = parts(Stack)
    step = autopar.parallelize(train_step, method=SHARDED)
    step(*objects, batch())
    model, _, metrics = objects

    def evaluate(model: Any, metrics: Any, batch: Any) -> Any:
        loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        metrics.update(loss=loss)
        return loss

    kernel = model.layers[0].kernel.get_value()
    metrics.reset()
    follow = autopar.parallelize(evaluate, method=autopar.FollowParallel(step))
    loss = follow(model, metrics, batch())
    plan = follow.last_executable.plan
    assert [t.path for t in plan.outputs] == [
        "result['metrics'].loss.count",
        "result['metrics'].loss.total",
        "result",
    ]
    assert [t.path for t in plan.inputs if t.role == "batch"] == ["batch['x']", "batch['y']"]
    assert model.layers[0].kernel.get_value() is kernel
    assert plan.input_specs[0].layers[0].kernel == kernel.sharding.spec
    check_close(metrics.compute()["loss"], loss)


@pytest.mark.ci
def test_objects_are_made_in_shards_and_kept_in_checkpoints(tmp_path: Path) -> None:
    step = autopar.parallelize(train_step, method=SHARDED)

    def create(key: Any) -> tuple[Any, Any, Any]:
        return parts(Stack, key)

    init = autopar.parallelize(create, method=autopar.CreateStateParallel(step, batch()))
    key = jax.random.key(3)
    got, want = init(key), create(key)
    check_same(got, want)
    spec = got[0].layers[0].kernel.sharding.spec
    assert any(spec)
    check_close(run(step, got), run(nnx.jit(train_step), want))
    assert len(step.compiled_entries()) == 1

    autopar.save_checkpoint(tmp_path, got[:2], step=2)
    by_plan = autopar.restore_checkpoint(tmp_path, step)
    by_objects = autopar.restore_checkpoint(tmp_path, parts(Stack)[:2])
    for restored in (by_plan, by_objects):
        assert isinstance(restored[0], Stack) and isinstance(restored[1], nnx.Optimizer)
        check_same(restored, want[:2])
    assert by_plan[0].layers[0].kernel.sharding.spec == spec
    check_close(step(*by_plan, got[2], batch(5)), nnx.jit(train_step)(*want, batch(5)))


def test_a_method_of_a_module() -> None:
    class Counting(Stack):
        @autopar.parallelize(method=ONE_AXIS)
        def count(self, x: Any) -> Any:
            self.layers[0].bias[...] += x.sum(0)
            return x.sum()

    model = Counting(nnx.Rngs(0))
    for _ in range(2):
        model.count(batch()["x"])
    np.testing.assert_allclose(model.layers[0].bias, 2 * batch()["x"].sum(0), rtol=1e-5, atol=1e-5)
    assert Counting.count.last_executable.plan.inputs[0].path == "self.layers[0].bias"


def test_a_static_argument_stays_an_object() -> None:
    def step(scale: Any, x: Any, model: Any) -> Any:
        model.layers[0].bias[...] += scale.by
        return x.sum()

    class Scale(nnx.Module):
        by = 2.0

    model, scale = Stack(nnx.Rngs(0)), Scale()
    parallel = autopar.parallelize(step, method=ONE_AXIS, static_argnums=(0,))
    for _ in range(2):
        parallel(scale, batch()["x"], model)
    np.testing.assert_allclose(model.layers[0].bias, 4.0)
    assert len(parallel.compiled_entries()) == 1


def test_plans_of_objects_without_arrays() -> None:
    """Shapes alone, for a cluster that is not there."""
    objects = nnx.eval_shape(lambda: parts(Stack))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    cluster = autopar.ClusterSpec(2, 4, "h100-sxm")
    plan = autopar.plan(train_step, *objects, shapes, cluster=cluster, method=SHARDED)
    assert plan.num_devices == 8
    assert any(t.path == "optimizer.opt_state[0].nu.layers[1].kernel" for t in plan.inputs)


def test_a_variable_that_holds_no_array_is_part_of_the_program() -> None:
    model = Stack(nnx.Rngs(0))
    model.note = nnx.Variable("text")
    plan = autopar.parallelize(train_step).plan(model, *parts(Stack)[1:], batch())
    assert not [t.path for t in plan.inputs if "note" in t.path]


def test_arrays_that_the_step_took_over_are_named() -> None:
    objects = parts(Stack)
    other = nnx.clone(objects[0])  # shares arrays, not variables
    step = autopar.parallelize(train_step, method=ONE_AXIS)
    step(*objects, batch())
    with pytest.raises(ArgumentError, match=r"model\.layers\[0\]\.\w+: this array was deleted"):
        step(other, *objects[1:], batch())


@pytest.mark.slow
def test_flax_is_imported_by_those_who_use_it() -> None:
    program = (
        "import sys, autopar, jax.numpy as jnp\n"
        "step = autopar.parallelize(lambda w, x: w + x.sum(0))\n"
        "step.plan(jnp.ones(4), jnp.ones((8, 4)))\n"
        "assert not {'flax', 'equinox', 'optax'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("method", [TWO_STAGES, autopar.AutoParallel()], ids=["stages", "auto"])
def test_in_place_in_pipelines(method: Any) -> None:
    got, want = parts(Stack, num_layers=4), parts(Stack, num_layers=4)
    step = autopar.parallelize(train_step, method=method)
    check_close(run(step, got, 3), run(nnx.jit(train_step), want, 3))
    check_same(got, want)
    if method is TWO_STAGES:
        first, *_, last = (layer.kernel.sharding.device_set for layer in got[0].layers)
        assert not first & last


@pytest.mark.slow
def test_run_training_with_objects(tmp_path: Path) -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return state, train_step(*state, batch)

    want, losses = parts(Stack), []
    want_losses = run(nnx.jit(train_step), want, 4)
    parallel = autopar.parallelize(step, method=SHARDED)
    batches = [batch(i) for i in range(4)]
    for num_steps in (2, 4):  # the second goes on from the first's checkpoint
        got, _ = autopar.run_training(
            parallel,
            parts(Stack),
            batches,
            checkpoint_dir=tmp_path,
            num_steps=num_steps,
            on_step=lambda _, loss: losses.append(loss),
        )
    check_close(losses, want_losses)
    check_same(got, want)


@pytest.mark.slow
def test_in_place_on_workers(tmp_path: Path) -> None:
    got, want = parts(Stack, num_layers=4), parts(Stack, num_layers=4)
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        step = autopar.parallelize(train_step, method=TWO_STAGES)
        losses = [np.asarray(loss) for loss in run(step, got, 2)]
        autopar.save_checkpoint(tmp_path, got[:2], step=2)
    check_close(losses, run(nnx.jit(train_step), want, 2))
    check_same(autopar.restore_checkpoint(tmp_path, parts(Stack, num_layers=4)[:2]), want[:2])
