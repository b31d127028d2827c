"""Three steps of every model, sharded, equal three steps of `jax.jit(train_step)`.

Tolerances are those of float32 sums taken in another order. One kind of parameter needs more: the
attention's key bias shifts all scores of a query alike, so its true gradient is zero and Adam,
which divides a gradient by its own size, makes steps out of rounding noise. There a difference is
bounded by the learning rate, not by the gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

import autopar
from autopar.ir.plan import ParallelPlan
from examples.models import MODELS, Example, build

TINY = [name for name in MODELS if "-tiny" in name]
MESHES = [(8,), (2, 4), (4, 2), (1, 8)]
NUM_STEPS = 3
# Holds the biases of queries and values too; they are compared loosely along with the key's.
WITHOUT_GRADIENT = "['qkv']['bias']"

# All meshes for one model, one for every kind of model; the rest takes minutes. BERT, ViT and
# layers in a scan are like GPT.
LIKE_OTHERS = {"bert-tiny", "bert-layers-tiny", "gpt-tiny-scan", "llama-tiny-scan", "vit-tiny"}
IN_DEFAULT_RUN = {(name, (2, 4)) for name in TINY if name not in LIKE_OTHERS} | {
    *(("mlp-tiny", mesh) for mesh in MESHES),
}


def copy_state(state: Any) -> Any:
    """A state whose buffers may be donated."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, state)


@functools.cache
def reference(name: str) -> tuple[Example, Any, list[Any], Any]:
    """(example, first state, result of every step, last state) on one device."""
    example = build(name)
    first = example.create_state()
    step = jax.jit(example.train_step)
    state, results = first, []
    for index in range(NUM_STEPS):
        state, result = step(state, batch_of(example, index))
        results.append(result)
    return example, first, results, state


def batch_of(example: Example, index: int) -> Any:
    return example.make_batch(key=jax.random.key(index))


def check_model(name: str, method: Any) -> ParallelPlan:
    example, first, want_results, want_state = reference(name)
    step = autopar.parallelize(example.train_step, method=method)
    state = copy_state(first)
    for index in range(NUM_STEPS):
        state, result = step(state, batch_of(example, index))
        for got, want in zip(
            jax.tree.leaves(result), jax.tree.leaves(want_results[index]), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=f"step {index}")
    assert jax.tree.structure(state) == jax.tree.structure(want_state)
    for (path, want), got in zip(
        tree_leaves_with_path(want_state), jax.tree.leaves(state), strict=True
    ):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), keystr(path)
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        by_noise = keystr(path).endswith(WITHOUT_GRADIENT)
        atol = example.config.learning_rate if by_noise else 1e-5
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=atol, err_msg=keystr(path))
    return step.last_executable.plan


def is_split(tensor: Any) -> bool:
    return any(entry >= 0 for entry in tensor.layout)


@pytest.mark.representatives("gpt-tiny-mesh_shape5", "mlp-tiny-mesh_shape1")
@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in IN_DEFAULT_RUN else pytest.mark.slow)
        for name in TINY
        for mesh in MESHES
    ],
)
def test_sharded_model_equals_jit(name: str, mesh_shape: tuple[int, ...]) -> None:
    # Without a price on compute, products must be split over all devices; that latency is small
    # beside bandwidth makes the solver mind bytes, as for a model of real size.
    axes = len(mesh_shape)
    mesh = autopar.LogicalMesh(mesh_shape, alpha=(1e-7,) * axes, beta=(1e-9, 2e-9)[:axes])
    plan = check_model(name, autopar.ShardParallel(mesh))
    assert any(is_split(t) for t in plan.inputs)
    state = [t for t in plan.inputs if t.role == "state"]
    assert len(state) == sum(t.role == "state" for t in plan.outputs)
    assert any(is_split(t) for t in state)


@pytest.mark.representatives("mlp-tiny", slow=["gpt-tiny"])
@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny"])
def test_data_parallel_model_equals_jit(name: str) -> None:
    plan = check_model(name, autopar.DataParallel())
    for tensor in plan.inputs:
        assert is_split(tensor) == (tensor.role == "batch" and bool(tensor.shape)), tensor


@pytest.mark.representatives("mlp-tiny", slow=["gpt-tiny-scan"])
@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny-scan"])
def test_model_on_the_mesh_that_the_solver_chooses_equals_jit(name: str) -> None:
    check_model(name, autopar.ShardParallel("auto"))
