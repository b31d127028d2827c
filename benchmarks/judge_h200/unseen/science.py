"""Proteins, atoms and fluids."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    bf16,
    cross_entropy,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    normal,
    trained,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def triangles(
    rows: int,
    *,
    residues: int = 256,
    sequences: int = 128,
    pair: int = 128,
    wide: int = 256,
    depth: int = 2,
) -> ZooStep:
    """Pairs of residues learn from third ones, and from products of aligned sequences (a block of
    AlphaFold without its structure)."""
    heads, classes = 4, 64
    sizes: Sizes = {"chains": (23, wide), "first": (wide, pair), "second": (wide, pair)}
    sizes["classes"] = (pair, classes)
    for n in range(depth):
        sizes |= {f"row_qkv_{n}": (wide, 3 * wide), f"row_o_{n}": (wide, wide)}
        sizes |= {f"row_gate_{n}": (wide, wide), f"row_bias_{n}": (pair, 8)}
        sizes |= {f"chain_up_{n}": (wide, 4 * wide), f"chain_down_{n}": (4 * wide, wide)}
        sizes |= {f"outer_{n}": (wide, 64), f"outer_out_{n}": (1024, pair)}
        for side in ("out", "in"):
            sizes |= {f"tri_{side}_{n}": (pair, 4 * pair), f"tri_{side}_gate_{n}": (pair, pair)}
            sizes |= {f"tri_{side}_o_{n}": (pair, pair)}
        sizes |= {f"node_qkv_{n}": (pair, 3 * pair), f"node_bias_{n}": (pair, heads)}
        sizes |= {f"node_gate_{n}": (pair, pair), f"node_o_{n}": (pair, pair)}
        sizes |= {f"pair_up_{n}": (pair, 4 * pair), f"pair_down_{n}": (4 * pair, pair)}

    def biased(w: Any, name: str, n: int, x: jax.Array, bias: jax.Array, count: int) -> jax.Array:
        """Attention along the last positions of (batch, one, two, features)."""
        y = layer_norm(x)
        q, k, v = (heads_of(z, count) for z in jnp.split(y @ w[f"{name}_qkv_{n}"], 3, -1))
        scores = jnp.einsum("bsqhd,bskhd->bshqk", q, k).astype(f32) * q.shape[-1] ** -0.5
        p = jax.nn.softmax(scores + bias.transpose(0, 3, 1, 2)[:, None].astype(f32)).astype(bf16)
        seen = jnp.einsum("bshqk,bskhd->bsqhd", p, v).reshape(x.shape)
        return x + (seen * jax.nn.sigmoid(y @ w[f"{name}_gate_{n}"])) @ w[f"{name}_o_{n}"]

    def loss(params: Any, chains: jax.Array, distances: jax.Array) -> jax.Array:
        w = half(params)
        m = w["chains"][chains]
        z = (m[:, 0] @ w["first"])[:, :, None] + (m[:, 0] @ w["second"])[:, None]
        for n in range(depth):
            m = biased(w, "row", n, m, layer_norm(z) @ w[f"row_bias_{n}"], 8)
            m = m + jax.nn.relu(layer_norm(m) @ w[f"chain_up_{n}"]) @ w[f"chain_down_{n}"]
            one, two = jnp.split(layer_norm(m) @ w[f"outer_{n}"], 2, -1)
            outer = jnp.einsum("bsic,bsjd->bijcd", one, two) / sequences
            z = z + outer.reshape(rows, residues, residues, -1) @ w[f"outer_out_{n}"]
            for side, form in (("out", "bikc,bjkc->bijc"), ("in", "bkic,bkjc->bijc")):
                y = layer_norm(z)
                a, b, gate_a, gate_b = jnp.split(y @ w[f"tri_{side}_{n}"], 4, -1)
                a, b = a * jax.nn.sigmoid(gate_a), b * jax.nn.sigmoid(gate_b)
                made = layer_norm(jnp.einsum(form, a, b)) @ w[f"tri_{side}_o_{n}"]
                z = z + made * jax.nn.sigmoid(y @ w[f"tri_{side}_gate_{n}"])
            z = biased(w, "node", n, z, layer_norm(z) @ w[f"node_bias_{n}"], heads)
            z = z + jax.nn.relu(layer_norm(z) @ w[f"pair_up_{n}"]) @ w[f"pair_down_{n}"]
        z = z + z.swapaxes(1, 2)
        return cross_entropy(layer_norm(z) @ w["classes"], distances)

    def batch(i: int) -> tuple[jax.Array, ...]:
        chains = integers(i, 23, rows, sequences, residues)
        return chains, integers(i + 1, classes, rows, residues, residues)

    return trained(lambda: weights(sizes), loss, batch, adamw(clip=0.1))


def forces(rows: int, *, neighbours: int = 24, channels: int = 64, depth: int = 2) -> ZooStep:
    """Energies of atoms by scalars and vectors that pass along edges; forces are the gradient by
    positions, so the step is a second one. `rows` atoms."""
    waves, edges = 8, rows * neighbours
    sizes: Sizes = {"kinds": (16, channels), "energy_1": (channels, channels)}
    sizes["energy_2"] = (channels, 1)
    for n in range(depth):
        sizes |= {f"radial_1_{n}": (waves, 64), f"radial_2_{n}": (64, 4 * channels)}
        sizes |= {f"scalar_{n}": (2 * channels, channels), f"vector_{n}": (2 * channels, channels)}
        sizes |= {f"gate_{n}": (channels, channels)}

    def energy(w: Any, positions: jax.Array, kinds: jax.Array, ends: jax.Array) -> jax.Array:
        sender, receiver = ends
        apart = positions[receiver] - positions[sender]
        distance = jnp.sqrt((apart**2).sum(-1, keepdims=True) + 1e-6)
        along = apart / distance
        number = jnp.arange(1, waves + 1)
        basis = jnp.sin(number * jnp.pi * distance / 6.0) / distance
        basis = basis * jnp.exp(-((distance / 4.0) ** 2))
        scalars, vectors = w["kinds"][kinds], jnp.zeros((rows, channels, 3))
        for n in range(depth):
            radial = jax.nn.silu(basis @ w[f"radial_1_{n}"]) @ w[f"radial_2_{n}"]
            r1, r2, r3, r4 = jnp.split(radial, 4, -1)
            s, v = scalars[sender], vectors[sender]
            inner = jnp.einsum("ecx,ex->ec", v, along)
            s_sent = jnp.concatenate([r1 * s, r2 * inner], -1)
            turned = (r3 * s)[..., None] * along[:, None]
            v_sent = jnp.concatenate([turned, r4[..., None] * v], 1)
            s_sum = jax.ops.segment_sum(s_sent, receiver, rows) / neighbours**0.5
            v_sum = jax.ops.segment_sum(v_sent, receiver, rows) / neighbours**0.5
            scalars = scalars + jax.nn.silu(s_sum @ w[f"scalar_{n}"])
            mixed = jnp.einsum("ncx,cd->ndx", v_sum, w[f"vector_{n}"])
            vectors = vectors + mixed * jax.nn.sigmoid(scalars @ w[f"gate_{n}"])[..., None]
        return (jax.nn.silu(scalars @ w["energy_1"]) @ w["energy_2"]).sum()

    def loss(
        w: Any, positions: jax.Array, kinds: jax.Array, ends: jax.Array, wanted: jax.Array
    ) -> jax.Array:
        value, slope = jax.value_and_grad(energy, 1)(w, positions, kinds, ends)
        return (value / rows) ** 2 + ((slope + wanted) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        receiver = jnp.arange(edges) // neighbours
        ends = jnp.stack([integers(i, rows, edges), receiver])
        return 5 * normal(i, rows, 3), integers(i, 16, rows), ends, normal(i + 1, rows, 3)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-3, 0.0))


def solver(rows: int, *, size: int = 256, steps: int = 16, channels: int = 32) -> ZooStep:
    """A flow, stepped by differences of neighbours and corrected by a small network, compared after
    16 steps; in float32, with the steps made again in the backward pass."""
    widths = (2, channels, channels, channels, 2)
    sizes: Sizes = {
        f"conv_{n}": (5, 5, into, out) for n, (into, out) in enumerate(itertools.pairwise(widths))
    }

    def differences(u: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        after, before = jnp.roll(u, -1, axis), jnp.roll(u, 1, axis)
        return (after - before) / 2, after - 2 * u + before

    def corrected(w: Any, u: jax.Array) -> jax.Array:
        x = u
        for n in range(len(widths) - 1):
            x = jnp.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="wrap")
            x = jax.lax.conv_general_dilated(
                x, w[f"conv_{n}"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x) if n < len(widths) - 2 else x
        return u + 0.1 * x

    def loss(w: Any, u: jax.Array, wanted: jax.Array) -> jax.Array:
        @jax.checkpoint
        def tick(u: jax.Array, _: None) -> tuple[jax.Array, None]:
            (dx, dxx), (dy, dyy) = differences(u, 1), differences(u, 2)
            moved = u[..., :1] * dx + u[..., 1:] * dy
            return corrected(w, u - 0.1 * moved + 0.05 * (dxx + dyy)), None

        last, _ = jax.lax.scan(tick, u, None, length=steps)
        return ((last - wanted) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 2), normal(i + 1, rows, size, size, 2)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-4, 0.0))
