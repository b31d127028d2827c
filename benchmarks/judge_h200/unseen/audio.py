"""Speech and sound."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    attend,
    bf16,
    causal,
    convolution,
    cross_entropy,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    normal,
    trained,
    trained_with_key,
    weights,
)
from tests.zoo.program import ZooStep


def whisper(
    rows: int,
    *,
    width: int = 1024,
    heads: int = 16,
    frames: int = 3000,
    length: int = 448,
    depth: int = 2,
    vocabulary: int = 51865,
) -> ZooStep:
    """Speech to text: two convolutions, an encoder, and a decoder that reads it."""
    sizes: dict[str, tuple[int, ...]] = {
        "conv_1": (3, 80, width),
        "conv_2": (3, width, width),
        "positions": (length, width),
        "embed": (vocabulary, width),
    }
    for side in ("encoder", "decoder"):
        for n in range(depth):
            kinds = ("self", "cross") if side == "decoder" else ("self",)
            for kind in kinds:
                for name in "qkvo":
                    sizes[f"{side}_{kind}_{name}_{n}"] = (width, width)
                sizes[f"{side}_{kind}_norm_{n}"] = (width,)
            sizes[f"{side}_up_{n}"] = (width, 4 * width)
            sizes[f"{side}_up_bias_{n}"] = (4 * width,)
            sizes[f"{side}_down_{n}"] = (4 * width, width)
            sizes[f"{side}_norm_{n}"] = (width,)

    def loss(params: Any, sound: jax.Array, text: jax.Array) -> jax.Array:
        w = half(params)

        def attention(name: str, n: int, x: jax.Array, memory: Any, mask: Any) -> jax.Array:
            y = layer_norm(x, w[f"{name}_norm_{n}"])
            memory = y if memory is None else memory
            q, k, v = (
                heads_of(source @ w[f"{name}_{letter}_{n}"], heads)
                for letter, source in zip("qkv", (y, memory, memory), strict=True)
            )
            return x + attend(q, k, v, mask) @ w[f"{name}_o_{n}"]

        def feed_forward(side: str, n: int, x: jax.Array) -> jax.Array:
            y = layer_norm(x, w[f"{side}_norm_{n}"])
            y = jax.nn.gelu(y @ w[f"{side}_up_{n}"] + w[f"{side}_up_bias_{n}"], approximate=False)
            return x + y @ w[f"{side}_down_{n}"]

        x = jax.nn.gelu(convolution(sound.astype(bf16), w["conv_1"]), approximate=False)
        x = jax.nn.gelu(convolution(x, w["conv_2"], 2), approximate=False)
        waves = jnp.arange(x.shape[1])[:, None] * jnp.exp(-jnp.linspace(0, 9.2, width // 2))
        x = x + jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).astype(bf16)
        for n in range(depth):
            x = feed_forward("encoder", n, attention("encoder_self", n, x, None, None))
        memory, mask = layer_norm(x), causal(length)
        x = w["embed"][text[:, :-1]] + w["positions"]
        for n in range(depth):
            x = attention("decoder_self", n, x, None, mask)
            x = attention("decoder_cross", n, x, memory, None)
            x = feed_forward("decoder", n, x)
        return cross_entropy(layer_norm(x) @ w["embed"].T, text[:, 1:])

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, frames, 80), integers(i, vocabulary, rows, length + 1)

    return trained(lambda: weights(sizes), loss, batch, adamw(clip=1.0))


def waveforms(
    rows: int,
    *,
    width: int = 768,
    heads: int = 12,
    samples: int = 160000,
    channels: int = 512,
    depth: int = 3,
    negatives: int = 100,
) -> ZooStep:
    """Raw sound through seven strided convolutions; a transformer tells masked frames from others
    of the same sound."""
    windows = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))
    sizes: dict[str, tuple[int, ...]] = {}
    for n, (window, _) in enumerate(windows):
        sizes[f"conv_{n}"] = (window, channels if n else 1, channels)
    sizes |= {"project": (channels, width), "mask": (width,), "target": (channels, 256)}
    sizes |= {"positions": (128, width // 16, width), "out": (width, 256)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(f32)
        return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    def loss(params: Any, key: jax.Array, sound: jax.Array) -> jax.Array:
        w = half(params)
        x = sound[..., None].astype(bf16)
        for n, (_, stride) in enumerate(windows):
            x = jax.nn.gelu(layer_norm(convolution(x, w[f"conv_{n}"], stride, padding="VALID")))
        frames = layer_norm(x)
        length = frames.shape[1]
        masking, sampling = jax.random.split(key)
        is_masked = jax.random.bernoulli(masking, 0.4, (rows, length))
        x = jnp.where(is_masked[..., None], w["mask"], frames @ w["project"])
        x = x + jax.nn.gelu(convolution(x, w["positions"], groups=16))
        for n in range(depth):
            q, k, v = jnp.split(layer_norm(x) @ w[f"qkv_{n}"], 3, -1)
            x = x + attend(*(heads_of(y, heads) for y in (q, k, v))) @ w[f"o_{n}"]
            x = x + jax.nn.gelu(layer_norm(x) @ w[f"up_{n}"]) @ w[f"down_{n}"]
        targets, found = unit(frames @ w["target"]), unit(layer_norm(x) @ w["out"])
        others = jax.random.randint(sampling, (rows, length * negatives), 0, length)
        others = jnp.take_along_axis(targets, others[..., None], 1)
        others = others.reshape(rows, length, negatives, -1)
        near = (found * targets).sum(-1, keepdims=True)
        far = jnp.einsum("blc,blnc->bln", found, others)
        scores = jnp.concatenate([near, far], -1) / 0.1
        each = jax.nn.logsumexp(scores, -1) - scores[..., 0]
        return (each * is_masked).sum() / jnp.maximum(is_masked.sum(), 1)

    return trained_with_key(lambda: weights(sizes), loss, lambda i: (normal(i, rows, samples),))


def recurrent_speech(
    rows: int, *, frames: int = 300, labels: int = 40, width: int = 512, depth: int = 2
) -> ZooStep:
    """Bidirectional gated recurrences over frames, and the probability of all alignments (CTC)."""
    classes, features = 32, 240
    sizes: dict[str, tuple[int, ...]] = {"classes": (2 * width, classes), "bias": (classes,)}
    for n in range(depth):
        for side in ("left", "right"):
            sizes[f"{side}_in_{n}"] = (2 * width if n else features, 3 * width)
            sizes[f"{side}_{n}"] = (width, 3 * width)
            sizes[f"{side}_bias_{n}"] = (3 * width,)

    def recurrence(w: Any, name: str, n: int, xs: jax.Array, reverse: bool) -> jax.Array:
        inputs = xs @ w[f"{name}_in_{n}"] + w[f"{name}_bias_{n}"]
        recur = w[f"{name}_{n}"]

        def tick(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            xr, xz, xn = jnp.split(x, 3, -1)
            hr, hz, hn = jnp.split(h @ recur, 3, -1)
            reset, keep = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
            h = keep * h + (1 - keep) * jnp.tanh(xn + reset * hn)
            return h, h

        return jax.lax.scan(tick, jnp.zeros((rows, width)), inputs, reverse=reverse)[1]

    def alignments(log_p: jax.Array, text: jax.Array) -> jax.Array:
        """log P(text) of (frames, batch, classes); class 0 is none."""
        states = jnp.stack([jnp.zeros_like(text), text], -1).reshape(rows, -1)
        states = jnp.pad(states, ((0, 0), (0, 1)))
        before = jnp.pad(states, ((0, 0), (2, 0)), constant_values=-1)[:, :-2]
        may_skip = (states > 0) & (states != before)
        scores = jnp.take_along_axis(log_p, states[None].repeat(log_p.shape[0], 0), -1)

        def frame(alpha: jax.Array, score: jax.Array) -> tuple[jax.Array, None]:
            one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=-1e9)[:, :-1]
            two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=-1e9)[:, :-2]
            two = jnp.where(may_skip, two, -1e9)
            return jnp.logaddexp(jnp.logaddexp(alpha, one), two) + score, None

        first = jnp.where(jnp.arange(states.shape[1]) < 2, scores[0], -1e9)
        last, _ = jax.lax.scan(frame, first, scores[1:])
        return jnp.logaddexp(last[:, -1], last[:, -2])

    def loss(params: Any, sound: jax.Array, text: jax.Array) -> jax.Array:
        x = sound
        for n in range(depth):
            left = recurrence(params, "left", n, x, False)
            x = jnp.concatenate([left, recurrence(params, "right", n, x, True)], -1)
        log_p = jax.nn.log_softmax(x @ params["classes"] + params["bias"])
        return -alignments(log_p, text).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, frames, rows, features), 1 + integers(i, classes - 1, rows, labels)

    return trained(lambda: weights(sizes), loss, batch, adamw(clip=5.0))


def codec(
    rows: int, *, samples: int = 24000, channels: int = 32, codes: int = 1024, books: int = 8
) -> ZooStep:
    """Sound to the nearest vectors of several code books, each of what the ones before left, and
    back; compared as samples and as spectra."""
    strides, latent = (2, 4, 5, 8), 128
    sizes: dict[str, tuple[int, ...]] = {"first": (7, 1, channels), "last": (7, channels, 1)}
    for n, stride in enumerate(strides):
        wide = channels * 2**n
        for side, width in (("down", wide), ("up", wide)):
            sizes[f"{side}_res_{n}"] = (3, width, width // 2)
            sizes[f"{side}_mix_{n}"] = (1, width // 2, width)
        sizes[f"down_{n}"] = (2 * stride, wide, 2 * wide)
        sizes[f"up_{n}"] = (2 * stride, 2 * wide, wide)
    sizes |= {"encode": (7, 16 * channels, latent), "decode": (7, latent, 16 * channels)}
    sizes |= {f"book_{n}": (codes, latent) for n in range(books)}

    def residual(w: Any, name: str, n: int, x: jax.Array) -> jax.Array:
        inner = convolution(jax.nn.elu(x), w[f"{name}_res_{n}"])
        return x + convolution(jax.nn.elu(inner), w[f"{name}_mix_{n}"])

    def nearest(book: jax.Array, x: jax.Array) -> jax.Array:
        distance = (book**2).sum(-1) - 2 * x @ book.T
        return book[jnp.argmin(distance, -1)]

    def spectrum(x: jax.Array, window: int) -> jax.Array:
        starts = jnp.arange(0, samples - window + 1, window // 4)
        frames = x[:, starts[:, None] + jnp.arange(window)] * jnp.hanning(window)
        return jnp.log(jnp.abs(jnp.fft.rfft(frames)) + 1e-3)

    def loss(params: Any, sound: jax.Array) -> jax.Array:
        x = convolution(sound[..., None], params["first"])
        for n, stride in enumerate(strides):
            x = residual(params, "down", n, x)
            x = convolution(jax.nn.elu(x), params[f"down_{n}"], stride)
        left = convolution(jax.nn.elu(x), params["encode"])
        whole, commit = jnp.zeros_like(left), 0.0
        for n in range(books):
            found = nearest(params[f"book_{n}"], jax.lax.stop_gradient(left))
            commit += ((left - jax.lax.stop_gradient(found)) ** 2).mean()
            commit += ((found - jax.lax.stop_gradient(left)) ** 2).mean()
            whole += left + jax.lax.stop_gradient(found - left)
            left = left - jax.lax.stop_gradient(found)
        x = convolution(whole, params["decode"])
        for n, stride in reversed(list(enumerate(strides))):
            x = jax.lax.conv_transpose(
                jax.nn.elu(x),
                params[f"up_{n}"],
                (stride,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
            )
            x = residual(params, "up", n, x)
        made = convolution(jax.nn.elu(x), params["last"])[..., 0]
        value = jnp.abs(made - sound).mean() + 0.25 * commit
        for window in (64, 256) if samples < 2048 else (512, 1024, 2048):
            value += jnp.abs(spectrum(made, window) - spectrum(sound, window)).mean()
        return value

    return trained(lambda: weights(sizes), loss, lambda i: (normal(i, rows, samples),))
