"""Objects that gather metrics in the step: of clu, of nnx, and dataclasses of one's own."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from tests.ecosystem.steps import SHARDED, TWO_STAGES, batch, check_close, own

CLASSES = 4


def labelled(seed: int) -> dict[str, np.ndarray]:
    return {"x": batch(seed)["x"], "label": np.arange(16, dtype=np.int32) % CLASSES}


def weights() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(16, 16), (16, 16), (16, CLASSES)]
    return [jax.random.normal(k, size) / 4 for k, size in zip(keys, sizes, strict=True)]


def trained(params: Any, batch: Any) -> tuple[Any, Any, Any]:
    """(new parameters, logits, loss of each row)."""

    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        logits = x @ params[-1]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
        return -picked.mean(), (logits, -picked[:, 0])

    grads, (logits, losses) = jax.grad(loss_fn, has_aux=True)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], logits, losses


@flax.struct.dataclass
class Running:
    """A dataclass of one's own, with a field that is part of the program."""

    total: jax.Array
    count: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="loss")

    def merge(self, values: Any) -> Running:
        return self.replace(total=self.total + values.sum(), count=self.count + values.size)


def check_metrics(step: Any, metrics: Any, method: Any, compute: Any) -> Any:
    """`params, metrics = step(params, metrics, batch)`: argument 1 is not the batch."""
    want, got = (weights(), metrics), own((weights(), metrics))
    serial, parallel = jax.jit(step), autopar.parallelize(step, method=method)
    for i in range(2):
        want = serial(*want, labelled(i))
        got = parallel(*got, labelled(i))
    check_close(got, want)
    check_close(compute(got[1]), compute(want[1]))
    batches = {t.path for t in parallel.last_executable.plan.inputs if t.role == "batch"}
    assert batches == {"batch['x']", "batch['label']"}


@pytest.mark.ci
def test_a_dataclass() -> None:
    def step(params: Any, metrics: Any, batch: Any) -> tuple[Any, Any]:
        params, _, losses = trained(params, batch)
        return params, metrics.merge(losses)

    start = Running(jnp.zeros(()), jnp.zeros((), jnp.int32))
    check_metrics(step, start, SHARDED, lambda m: m.total / m.count)


@pytest.mark.ci
@pytest.mark.parametrize(
    "method",
    [SHARDED, pytest.param(TWO_STAGES, marks=pytest.mark.slow)],
    ids=["sharded", "stages"],
)
def test_a_collection_of_clu(method: Any) -> None:
    clu = pytest.importorskip("clu.metrics")

    Metrics = clu.Collection.create(
        accuracy=clu.Accuracy,
        loss=clu.Average.from_output("losses"),
    )

    def step(params: Any, metrics: Any, batch: Any) -> tuple[Any, Any]:
        params, logits, losses = trained(params, batch)
        new = Metrics.single_from_model_output(logits=logits, labels=batch["label"], losses=losses)
        return params, metrics.merge(new)

    check_metrics(step, Metrics.empty(), method, lambda m: m.compute())


@pytest.mark.slow
def test_metrics_of_nnx() -> None:
    def make() -> Any:
        return nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(),
            loss=nnx.metrics.Welford("loss"),
        )

    def step(params: Any, metrics: Any, batch: Any) -> Any:
        params, logits, losses = trained(params, batch)
        metrics.update(logits=logits, labels=batch["label"], loss=losses)
        return params

    want, got = (weights(), make()), (weights(), make())
    serial, parallel = nnx.jit(step), autopar.parallelize(step, method=SHARDED)
    for i in range(2):
        want = serial(*want, labelled(i)), want[1]
        got = parallel(*got, labelled(i)), got[1]
    check_close(got[0], want[0])
    check_close(got[1].compute(), want[1].compute())
    got[1].reset()
    assert not got[1].accuracy.count.get_value()
