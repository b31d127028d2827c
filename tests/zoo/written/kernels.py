"""Kernels and meshes of the user's own: Pallas, and `shard_map` inside the step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import cross_entropy, dense_init, integers, normal, pick, trained


def reference_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def norm_kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
    out_ref[...] = reference_norm(x_ref[...], scale_ref[...])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fused_norm(x: jax.Array, scale: jax.Array, block: int, interpret: bool) -> jax.Array:
    """RMSNorm of (rows, features), a block of rows per program of the grid."""
    rows, dim = x.shape
    return pl.pallas_call(
        norm_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // block,),
        in_specs=[
            pl.BlockSpec((block, dim), lambda i: (i, 0)),
            pl.BlockSpec((dim,), lambda i: (0,)),
        ],
        out_specs=pl.BlockSpec((block, dim), lambda i: (i, 0)),
        interpret=interpret,
    )(x, scale)


def _norm_forward(x: jax.Array, scale: jax.Array, block: int, interpret: bool) -> Any:
    return fused_norm(x, scale, block, interpret), (x, scale)


def _norm_backward(block: int, interpret: bool, saved: Any, g: jax.Array) -> Any:
    return jax.vjp(reference_norm, *saved)[1](g)


fused_norm.defvjp(_norm_forward, _norm_backward)


@zoo_program("pallas", source="written", layers=True)
def pallas(size: Size) -> ZooStep:
    """Interpreted where it runs on CPUs; a Triton kernel at its real size."""
    rows, dim, depth, classes = pick(size, (16, 12, 2, 5), (65536, 4096, 12, 1000))
    block = pick(size, 2, 16)

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), depth + 1)
        layers = [{"w": dense_init(k, dim, dim), "scale": jnp.ones(dim)} for k in keys]
        return {"layers": layers, "out": dense_init(a, dim, classes)}

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in params["layers"]:
            y = fused_norm(x, w["scale"], block, size.is_small)
            x = x + jax.nn.gelu(y @ w["w"])
        return cross_entropy(x @ params["out"], labels)

    return trained(init, loss, lambda i: (normal(i, rows, dim), integers(i, classes, rows)))


@zoo_program("shard-map", source="written", layers=False)
def shard_map(size: Size) -> ZooStep:
    """A ring over all devices inside the model: each has a part of the sequence, and passes keys
    and values on with `ppermute`."""
    rows, length, dim, depth, classes = pick(size, (4, 16, 12, 2, 5), (64, 8192, 1024, 4, 1000))
    devices = np.array(jax.devices())
    mesh, parts = Mesh(devices, ("ring",)), len(devices)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "ring"),) * 3, out_specs=P(None, "ring"))
    def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        to_next = [(i, (i + 1) % parts) for i in range(parts)]

        def turn(carry: Any, _: Any) -> Any:
            k, v, top, total, out = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k) / dim**0.5
            new_top = jnp.maximum(top, scores.max(-1))
            weight, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            total = total * old + weight.sum(-1)
            out = out * old[..., None] + jnp.einsum("bqk,bkd->bqd", weight, v)
            k, v = (jax.lax.ppermute(x, "ring", to_next) for x in (k, v))
            return (k, v, new_top, total, out), None

        row = q.sum(-1)
        start = (k, v, jnp.full_like(row, -1e9), jnp.zeros_like(row), jnp.zeros_like(q))
        (_, _, _, total, out), _ = jax.lax.scan(turn, start, length=parts)
        return out / total[..., None]

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), depth + 1)
        return {
            "layers": [dense_init(k, dim, 3 * dim) for k in keys],
            "out": dense_init(a, dim, classes),
        }

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in params["layers"]:
            x = x + ring_attention(*jnp.split(x @ w, 3, axis=-1))
        return cross_entropy(x.mean(1) @ params["out"], labels)

    return trained(init, loss, lambda i: (normal(i, rows, length, dim), integers(i, classes, rows)))
