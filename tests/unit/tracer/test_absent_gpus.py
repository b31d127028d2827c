"""Steps with kernels of GPUs are planned where there is none, and refused where they cannot run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import autopar
from autopar.errors import CompileError
from examples.models import build
from examples.models.example import Example

needs_no_gpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="this machine has what the test is to lack"
)
H100S = autopar.ClusterSpec(1, 8, "h100-sxm")


def llama() -> Example:
    return build("llama-tiny", attention="cudnn", dtype=jnp.bfloat16)


def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@needs_no_gpu
@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4)),
        autopar.ShardParallel((4,), num_micro_batches=2),
        autopar.PipeshardParallel(2, stages=autopar.UniformStages(2)),
    ],
    ids=["one mesh", "micro-batches", "pipeline"],
)
def test_a_llama_with_cudnn_is_planned_for_gpus(method: autopar.ParallelMethod) -> None:
    model = llama()
    args = model.abstract_state(), model.abstract_batch(8)
    plan = autopar.plan(model.train_step, *args, cluster=H100S, method=method)
    assert not [w for w in plan.warnings if "replicated" in w]


@needs_no_gpu
def test_jax_itself_is_as_before() -> None:
    model = llama()
    args = model.abstract_state(), model.abstract_batch()

    def error_of_jax() -> str:
        try:
            jax.eval_shape(model.train_step, *args)
        except RuntimeError as error:
            return str(error)
        return ""  # a host with a GPU, of which JAX was told to use the processor

    before = error_of_jax()
    assert not before or "cuDNN is not detected" in before
    autopar.plan(model.train_step, *args, cluster=H100S, method=autopar.ShardParallel((8,)))
    assert error_of_jax() == before


@needs_no_gpu
def test_an_unsupported_shape_is_refused_all_the_same() -> None:
    def attention(query: Any) -> Any:
        return jax.nn.dot_product_attention(query, query, query, implementation="cudnn")

    query = abstract(8, 128, 4, 60, dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="head dim"):
        autopar.plan(attention, query, cluster=H100S)


@needs_no_gpu
def test_cudnn_cannot_run_here() -> None:
    model = llama()
    state, batch = model.create_state(), model.make_batch()
    with pytest.raises(CompileError) as raised:
        autopar.parallelize(model.train_step, method=autopar.ShardParallel((8,)))(state, batch)
    text = str(raised.value)
    assert "models/transformer.py" in text and "cuDNN's attention" in text
    assert "cpu devices" in text and "implementation='xla'" in text


def double(x: Any, interpret: bool = False) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 8,),
        in_specs=[rows],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="double",
    )(x)


@needs_no_gpu
def test_a_triton_kernel_is_planned_and_split() -> None:
    autopar.register_rule("double", "r c -> r c")
    try:
        plan = autopar.plan(
            lambda w, x: double(x @ w), abstract(128, 128), abstract(512, 128), cluster=H100S
        )
    finally:
        autopar.register_rule("double", None)
    assert not [w for w in plan.warnings if "runs replicated" in w]


@needs_no_gpu
def test_a_triton_kernel_cannot_run_here_unless_interpreted() -> None:
    method = autopar.ShardParallel((8,))
    w, x = jnp.eye(128), jnp.ones((64, 128))
    with pytest.raises(CompileError, match=r"test_absent_gpus.py.*Pallas.*interpret=True"):
        autopar.parallelize(lambda w, x: double(x @ w), method=method)(w, x)
    interpreted = autopar.parallelize(lambda w, x: double(x @ w, True), method=method)
    assert (interpreted(w, x) == 2 * x).all()
