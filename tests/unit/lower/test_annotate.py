"""The annotated function: constraints in the right places, under the user's names."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import _jax
from autopar.ir.program_sharding import EquationSharding, ProgramSharding
from autopar.lower.annotate import annotated_function
from autopar.tracer.trace_step import trace_step

AXES = ("x", "y")
ROWS, NONE = (0, -1), (-1, -1)
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16)
W = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
MESH = autopar.LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))


def device_mesh() -> jax.sharding.Mesh:
    return _jax.fresh_mesh(np.array(jax.devices()).reshape(2, 4), AXES)


def constraints(jaxpr: Any) -> list[Any]:
    return [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]


def test_operands_inputs_and_results_are_constrained() -> None:
    program = trace_step(lambda a: jnp.sin(a), (X,)).program
    own = ProgramSharding(
        inputs=(ROWS,),
        equations=(EquationSharding((((-1, 0), (1, 0)),), ((NONE,),)),),
        outputs=((ROWS,),),
    )
    function = annotated_function(program, own, device_mesh())
    jaxpr = jax.make_jaxpr(function)(X)
    specs = [e.params["sharding"].spec for e in constraints(jaxpr)]
    assert specs == [P("x"), P("y"), P("y", "x"), P(), P("x")]
    names = [e.primitive.name for e in jaxpr.eqns]
    assert names == [*["sharding_constraint"] * 3, "sin", *["sharding_constraint"] * 2]
    (result,) = jax.jit(function)(X)
    np.testing.assert_allclose(result, np.sin(X), rtol=1e-6)
    assert result.sharding.is_equivalent_to(NamedSharding(device_mesh(), P("x")), 2)


def test_a_value_is_moved_once_for_all_its_readers() -> None:
    program = trace_step(lambda a: (jnp.sin(a), jnp.cos(a), jnp.tan(a)), (X,)).program
    through, further = (((-1, 0),),), (((-1, 0), (1, 0)),)
    own = ProgramSharding(
        inputs=(ROWS,),
        equations=tuple(EquationSharding(c, ((),)) for c in (through, through, further)),
        outputs=((), (), ()),
    )
    jaxpr = jax.make_jaxpr(annotated_function(program, own, device_mesh()))(X)
    specs = [e.params["sharding"].spec for e in constraints(jaxpr)]
    assert specs == [P("x"), P("y"), P("y", "x")]


def test_scalars_and_keys_are_left_alone() -> None:
    def fn(key: Any, scalar: Any) -> Any:
        return jax.random.split(key, 8), scalar + 1

    program = trace_step(fn, (jax.random.key(0), 1.0)).program
    own = ProgramSharding(
        inputs=(NONE, NONE),
        equations=tuple(
            EquationSharding(((),) * len(e.operands), ((NONE,),)) for e in program.equations
        ),
        outputs=((), ()),
    )
    jaxpr = jax.make_jaxpr(annotated_function(program, own, device_mesh()))(jax.random.key(0), 1.0)
    assert constraints(jaxpr) == []


def test_names_and_lines_are_the_users() -> None:
    def layer(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    def step(x: Any, w: Any) -> Any:
        with jax.named_scope("model"):
            x = lax.scan(lambda c, _: (layer(c, w), None), x, None, length=3)[0]
            return layer(x, w)

    run = autopar.parallelize(step, method=autopar.ShardParallel(MESH))
    run(X, W)
    executable = run.last_executable
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in executable.avals]
    text = executable.jitted.lower(*shapes).as_text(debug_info=True)
    line = layer.__code__.co_firstlineno + 2
    assert f'test_annotate.py":{line}' in text
    names = {n for n in re.findall(r'op_name="([^"]*)"', executable.hlo_text()) if "dot" in n}
    assert "jit(step)/model/layer/dot_general" in names
    assert any("while/body" in name for name in names)
    # The loop's own scope comes once, as with jax.jit.
    assert all(name.count("model") == 1 and name.count("layer") == 1 for name in names)


def test_parameters_are_gathered_once_for_forward_and_backward() -> None:
    def train(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.sum(jnp.tanh(jnp.tanh(batch @ params) @ params))

        return params - jax.grad(loss)(params)

    method = autopar.ManualParallel((8,), ("x",), in_specs=(P("x"), P("x")))
    run = autopar.parallelize(train, method=method)
    run(W, X)
    gathers = [c for c in run.last_executable.collectives() if c.kind == "all-gather"]
    assert sum(c.trips for c in gathers) <= 1


def test_what_a_loop_reads_is_gathered_outside_of_it() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]

    method = autopar.ManualParallel((8,), ("x",), in_specs=(P("x"), P("x")), out_specs=P("x"))
    step = autopar.parallelize(run, method=method)
    np.testing.assert_allclose(step(X, W), jax.jit(run)(X, W), rtol=1e-5, atol=1e-5)
    collectives = step.last_executable.collectives()
    assert [c.kind for c in collectives if c.in_loop] == []
    assert [c.kind for c in collectives] == ["all-gather"]
