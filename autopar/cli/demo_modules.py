"""Flax modules of `autopar demo`: a small GPT, with or without experts, and a small ViT."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 128, 8, 4, 256, 64
EXPERTS, CLASSES, PATCH = 8, 10, 4


class Attention(nn.Module):
    causal: bool

    @nn.compact
    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = nn.Dense(3 * HIDDEN, name="qkv")(x).reshape(batch, length, HEADS, -1)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal)
        return nn.Dense(HIDDEN, name="out")(mixed.reshape(batch, length, HIDDEN))


class FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(HIDDEN, name="down")(nn.gelu(nn.Dense(4 * HIDDEN, name="up")(x)))


class Experts(nn.Module):
    """Every token passes all experts, weighted by its router."""

    @nn.compact
    def __call__(self, x):
        weights = jax.nn.softmax(nn.Dense(EXPERTS, name="router")(x))
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", init, (EXPERTS, HIDDEN, 2 * HIDDEN))
        down = self.param("down", init, (EXPERTS, 2 * HIDDEN, HIDDEN))
        hidden = nn.gelu(jnp.einsum("bth,ehf->ebtf", x, up))
        return jnp.einsum("bte,ebtf,efh->bth", weights, hidden, down)


class TransformerBlock(nn.Module):
    causal: bool
    experts: bool

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.causal, name="attention")(nn.LayerNorm()(x))
        ffn = Experts(name="experts") if self.experts else FeedForward(name="ffn")
        return x + ffn(nn.LayerNorm()(x))


class Language(nn.Module):
    experts: bool

    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, HIDDEN))
        x = nn.Embed(VOCABULARY, HIDDEN, name="embed")(tokens) + positions
        for _ in range(LAYERS):
            x = TransformerBlock(causal=True, experts=self.experts)(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm()(x))


class Vision(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(HIDDEN, (PATCH, PATCH), (PATCH, PATCH), name="patches")(images)
        x = x.reshape(x.shape[0], -1, HIDDEN)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(LAYERS):
            x = TransformerBlock(causal=False, experts=False)(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm()(x).mean(axis=1))
