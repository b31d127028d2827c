"""Marked layer boundaries survive transformations, make layers, and are seen by no other pass."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import autopar
from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.accumulate import accumulate, micro_batch_leaves
from autopar.rewrite.layer_boundaries import layers_by_marks
from autopar.rewrite.layers import find_layers, worth_recomputing
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.trace_step import trace_step

SHAPE = jax.ShapeDtypeStruct
BATCH = SHAPE((8, 8), jnp.float32)


def block(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w)


def marked(x: Any, w: Any) -> Any:
    x = block(x, w)
    autopar.mark_layer_boundary()
    return x


def in_python(params: Any, x: Any, wrap: Any = lambda f: f, mark: bool = True) -> Any:
    for w in params[:-1]:
        x = wrap(marked if mark else block)(x, w)
    return (block(x, params[-1]) ** 2).mean()


def vmapped(params: Any, x: Any) -> Any:
    return jax.vmap(lambda row: in_python(params, row))(x).mean()


@jax.custom_vjp
def _own(x: Any, w: Any) -> Any:
    return marked(x, w)


_own.defvjp(
    lambda x, w: (marked(x, w), (x, w)),
    lambda kept, g: jax.vjp(block, *kept)[1](g),
)

FORWARD_CODE = {
    "plain": in_python,
    "jit": lambda p, x: in_python(p, x, jax.jit),
    "checkpoint": lambda p, x: in_python(p, x, jax.checkpoint),
    "checkpoint of all": jax.checkpoint(in_python),
    "policy": jax.checkpoint(in_python, policy=jax.checkpoint_policies.dots_saveable),
    "vmap": vmapped,
    "custom_vjp": lambda p, x: in_python(p, x, lambda _: _own),
}


def step_of(forward: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(forward)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def traced(forward: Any, num_weights: int = 3) -> TracedStep:
    return trace_step(step_of(forward), ([SHAPE((8, 8), jnp.float32)] * num_weights, BATCH))


def names(program: Program) -> list[str]:
    return [
        x for e in program.equations for x in (e.name, *(y for b in e.bodies for y in names(b)))
    ]


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), got, want)


@pytest.mark.parametrize("kind", FORWARD_CODE)
def test_marks_make_layers(kind: str) -> None:
    step = traced(FORWARD_CODE[kind])
    layers = layers_by_marks(step.program, step.batch)
    products = [
        sum(step.program.equations[i].name == "dot_general" for i in layer.equations)
        for layer in layers
    ]
    assert products == [1, 1, 1]
    assert layers[0].flops == pytest.approx(layers[1].flops, rel=0.01)
    together = [i for layer in layers for i in layer.equations]
    assert together == sorted(set(together))


@pytest.mark.representatives("policy", "checkpoint")
@pytest.mark.parametrize("kind", FORWARD_CODE)
def test_marks_change_nothing_that_is_run(kind: str) -> None:
    params = [jnp.asarray(np.random.default_rng(i).normal(size=(8, 8)) / 8) for i in range(3)]
    x = jnp.linspace(-1, 1, 64).reshape(8, 8)
    step = step_of(FORWARD_CODE[kind])
    expected = step_of(lambda p, x: in_python(p, x, mark=False))(params, x)
    for run in (step, jax.jit(step)):
        assert_close(run(params, x), expected)


def test_a_program_with_marks_is_the_one_without() -> None:
    with_marks = traced(in_python).program
    without = traced(lambda p, x: in_python(p, x, mark=False)).program
    assert _jax.LAYER_BOUNDARY not in names(with_marks)
    assert program_fingerprint(with_marks) == program_fingerprint(without)
    assert not any(e.has_effect for e in with_marks.equations)


@pytest.mark.ci
def test_other_methods_ignore_marks() -> None:
    params = [jnp.full((8, 8), 0.1 * i) for i in range(3)]
    x = jnp.linspace(-1, 1, 64).reshape(8, 8)
    expected = jax.jit(step_of(in_python))(params, x)
    for method in (
        autopar.ShardParallel(mesh_shape=(4,)),
        autopar.ShardParallel(
            mesh_shape=(2,), num_micro_batches=2, options=autopar.ShardingOptions(remat="all")
        ),
    ):
        step = autopar.parallelize(step_of(in_python), method=method, donate_argnums=())
        assert_close(step(params, x), expected)


@pytest.mark.parametrize("remat", [False, True])
def test_marks_are_known_in_the_loop_over_micro_batches(remat: bool) -> None:
    full = traced(in_python)
    micro = trace_step(step_of(in_python), *[full.call.rebuild(micro_batch_leaves(full, 2))[0]])
    layers = worth_recomputing(find_layers(full.program, batch=full.batch)) if remat else ()
    step = accumulate(full, micro, 2, layers)
    (loop,) = [e for e in step.program.equations if e.name == "scan"]
    (body,) = loop.bodies
    num_consts, num_carry = _jax.scan_sizes(loop.params)
    found = layers_by_marks(body, range(num_consts + num_carry, len(body.inputs)))
    assert [
        sum(body.equations[i].name == "dot_general" for i in layer.equations) for layer in found
    ] == [1, 1, 1]


def test_marks_in_linen_modules_and_their_names() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Dense(16, name="first")(x))
            autopar.mark_layer_boundary()
            return nn.Dense(8, name="second")(x)

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    step = trace_step(step_of(lambda p, x: (model.apply(p, x) ** 2).mean()), (params, BATCH))
    assert [x.name for x in layers_by_marks(step.program, step.batch)] == [
        "Model/first",
        "Model/second",
    ]


def test_marks_in_nnx_modules() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.relu(self.first(x))
            autopar.mark_layer_boundary()
            return self.second(x)

    graphdef, params = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    forward = step_of(lambda p, x: (nnx.merge(graphdef, p)(x) ** 2).mean())
    step = trace_step(forward, (params, BATCH))
    layers = layers_by_marks(step.program, step.batch)
    assert [step.program.avals[v].shape for v in layers[1].inputs] == [(8, 16)]


def test_a_step_without_marks_is_refused() -> None:
    step = traced(lambda p, x: in_python(p, x, mark=False))
    with pytest.raises(TraceError, match=r"mark_layer_boundary\(\) between.*AutoLayers"):
        layers_by_marks(step.program, step.batch)


def first(p: Any, x: Any) -> Any:
    autopar.mark_layer_boundary()
    return in_python(p, x, mark=False)


def last(p: Any, x: Any) -> Any:
    loss = in_python(p, x, mark=False)
    autopar.mark_layer_boundary()
    return loss


def twice(p: Any, x: Any) -> Any:
    x = marked(x, p[0])
    autopar.mark_layer_boundary()
    return in_python(p[1:], x, mark=False)


@pytest.mark.parametrize(
    ("forward", "where"), [(first, "before the"), (last, "after the"), (twice, "between the")]
)
def test_a_layer_without_work_is_refused_with_its_line(forward: Any, where: str) -> None:
    step = traced(forward)
    with pytest.raises(TraceError, match=f"{where} .*test_layer_boundaries.py:[0-9]+") as caught:
        layers_by_marks(step.program, step.batch)
    assert forward.__name__ in str(caught.value)


def in_scan(p: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda x, w: (marked(x, w), None), x, jnp.stack(p))
    return x.sum()


def in_fori(p: Any, x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, x: marked(x, p[0]), x).sum()


def in_while(p: Any, x: Any) -> Any:
    x = lax.while_loop(lambda x: x.sum() < 9, lambda x: marked(x, x), lax.stop_gradient(x))
    return (x @ p[0]).sum()


def in_cond(p: Any, x: Any) -> Any:
    return lax.cond(x.sum() > 0, marked, block, x, p[0]).sum()


@pytest.mark.parametrize(
    ("forward", "loop"),
    [(in_scan, "scan"), (in_fori, "fori_loop"), (in_while, "while_loop"), (in_cond, "cond")],
)
def test_a_mark_inside_a_loop_is_refused_with_its_line(forward: Any, loop: str) -> None:
    step = traced(forward)
    assert not any(e.has_effect for e in step.program.equations)
    text = rf"layer boundary inside a {loop} body: .*test_layer_boundaries.py:\d+:\d+ \(marked\)"
    with pytest.raises(TraceError, match=text) as caught:
        layers_by_marks(step.program, step.batch)
    assert re.search("AutoLayers", str(caught.value))


def test_a_loop_around_the_step_is_not_one_of_its_own() -> None:
    """A step that is planned while a loop of somebody else's is traced."""
    found = []

    def body(i: Any, x: Any) -> Any:
        step = traced(in_python)
        found.append(len(layers_by_marks(step.program, step.batch)))
        return x + i

    lax.fori_loop(0, 2, body, 0)
    assert found and set(found) == {3}
