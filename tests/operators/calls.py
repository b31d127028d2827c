"""Cases of control flow, calls with their own derivatives, callbacks, kernels and references."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.xla_metadata import set_xla_metadata

from tests.operators.cases import bound, definite, floats, operator
from tests.operators.primitives import primitives

A, B, W = floats(8, 16), floats(8, 16, seed=1), floats(16, 16) / 4


def halved(x: Any) -> Any:
    return jnp.sin(x) / 2


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return jnp.tanh(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0] * 0.5))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.tanh(x)


with_vjp.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_batching.custom_vmap
def batched_by_hand(x: Any) -> Any:
    return jnp.sin(x) / 2


batched_by_hand.def_vmap(lambda size, batched, x: (halved(x), batched[0]))


@jax.custom_vjp
def recomputed(x: Any) -> Any:
    return jnp.tanh(x)


recomputed.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * jnp.cos(x),), optimize_remat=True)


def kernel(x: Any, y: Any, out: Any) -> None:
    out[...] = x[...] * 2 + y[...]


def add_in_blocks(x: Any, y: Any) -> Any:
    block = pl.BlockSpec((4, 16), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
        grid=(2,),
        in_specs=[block, block],
        out_specs=block,
        interpret=True,
    )(x, y)


operator(
    "scan",
    "control flow",
    lambda a, w: lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c.sum()), jnp.zeros(16), a),
    A,
    W,
    tolerance=1e-4,
)
operator(
    "while",
    "control flow",
    lambda a, n: lax.while_loop(lambda c: c[1] < n, lambda c: (halved(c[0]), c[1] + 1), (a, 0))[0],
    A,
    np.int32(3),
    gradient=False,
)
operator(
    "cond",
    "control flow",
    lambda i, a: lax.switch(i, [jnp.sin, lambda x: lax.cumsum(x, 1), lambda x: -x], a),
    np.int32(1),
    A,
)
operator(
    "platform_index",
    "control flow",
    lambda a: lax.platform_dependent(a, cpu=jnp.sin, default=jnp.cos),
    A,
)
operator("jit", "calls", lambda a: jax.jit(halved)(a), A)
operator("remat2", "calls", lambda a, w: jax.checkpoint(lambda x: jnp.sin(halved(x) @ w))(a), A, W)
operator("custom_jvp_call", "calls", with_jvp, A)
operator("custom_vjp_call", "calls", with_vjp, A)
operator(
    "linear_call",
    "calls",
    lambda a, b: jax.custom_derivatives.linear_call(
        lambda r, x: r * x, lambda r, ct: r * ct, lax.stop_gradient(a), b
    ),
    A,
    B,
)
operator("custom_vmap_call", "calls", batched_by_hand, A, gradient=False)
operator("composite", "calls", lambda a: lax.composite(halved, "my.halved")(a), A, gradient=False)
operator("pallas_call", "kernels", add_in_blocks, A, B, gradient=False)
operator(
    "pure_callback",
    "kernels",
    lambda a: jax.pure_callback(
        lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(a.shape, a.dtype), a
    ),
    A,
    gradient=False,
)


def _debugged(a: Any) -> Any:
    jax.debug.callback(lambda x: None, a[0, 0])
    return a * 2


def _printed(a: Any) -> Any:
    jax.debug.print("", ordered=False)
    return a * 2


operator("debug_callback", "effects", _debugged, A)
operator("debug_print", "effects", _printed, A)
operator(
    "io_callback",
    "effects",
    lambda a: (
        io_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct((), jnp.float32), a[0, 0]) + a
    ),
    A,
    gradient=False,
)
operator("remat_opt", "calls", recomputed, A)
if "closed_call" in primitives():  # JAX 0.10 has an `eval_jaxpr` that leaves a closed call
    operator(
        "closed_call",
        "calls",
        lambda a: bound("eval_jaxpr", jaxpr=jax.make_jaxpr(halved)(a))(a)[0],
        A,
    )
else:
    operator(
        "eval_jaxpr",
        "calls",
        lambda a: bound("eval_jaxpr", call_jaxpr=jax.make_jaxpr(halved)(a))(a)[0],
        A,
    )
operator(
    "call_exported",
    "calls",
    lambda a: jax.export.export(jax.jit(halved))(jax.ShapeDtypeStruct(a.shape, a.dtype)).call(a),
    A,
)
operator("xla_metadata_value", "calls", lambda a: set_xla_metadata(jnp.sin(a), note="x"), A)
operator(
    "xla_metadata_call",
    "calls",
    lambda a: bound(
        "xla_metadata_call", jaxpr=jax.make_jaxpr(halved)(a), xla_metadata=(), ad_metadata="same"
    )(a),
    A,
)
operator(
    "ffi_call",
    "kernels",
    lambda a: jnp.tril(
        jax.ffi.ffi_call(
            "lapack_spotrf_ffi",
            (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)),
        )(a, uplo=np.uint8(ord("U")))[0]
    ),
    definite(8, 8),
    gradient=False,
)
