"""Detectors: objects as a set, and as classes of anchors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    attend,
    bf16,
    convolution,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    momentum,
    normal,
    trained,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def _backbone_sizes(widths: tuple[int, ...]) -> Sizes:
    sizes: Sizes = {"stem": (7, 7, 3, widths[0])}
    below = widths[0]
    for n, wide in enumerate(widths):
        sizes |= {f"in_{n}": (1, 1, below, wide // 4), f"mid_{n}": (3, 3, wide // 4, wide // 4)}
        sizes |= {f"out_{n}": (1, 1, wide // 4, wide), f"skip_{n}": (1, 1, below, wide)}
        sizes |= {f"scale_{n}": (wide,), f"bias_{n}": (wide,)}
        below = wide
    return sizes


def _backbone(w: Any, x: jax.Array, count: int) -> list[jax.Array]:
    """Bottlenecks, each of half the resolution, with norms that are frozen."""
    x = jax.nn.relu(convolution(x, w["stem"], 2))
    x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    )
    levels = []
    for n in range(count):
        stride = 2 if n else 1
        y = jax.nn.relu(convolution(x, w[f"in_{n}"]))
        y = jax.nn.relu(convolution(y, w[f"mid_{n}"], stride))
        y = convolution(y, w[f"out_{n}"]) * (1 + w[f"scale_{n}"]) + w[f"bias_{n}"]
        x = jax.nn.relu(y + convolution(x, w[f"skip_{n}"], stride))
        levels.append(x)
    return levels


def _corners(box: jax.Array) -> tuple[jax.Array, jax.Array]:
    centre, size = jnp.split(box, 2, -1)
    return centre - size / 2, centre + size / 2


def _overlap(one: jax.Array, two: jax.Array) -> jax.Array:
    """Generalized intersection over union of boxes, centre and size."""
    (low, high), (other_low, other_high) = _corners(one), _corners(two)
    inner = jnp.prod(jnp.clip(jnp.minimum(high, other_high) - jnp.maximum(low, other_low), 0), -1)
    union = jnp.prod(high - low, -1) + jnp.prod(other_high - other_low, -1) - inner
    hull = jnp.prod(jnp.maximum(high, other_high) - jnp.minimum(low, other_low), -1)
    return inner / (union + 1e-6) - (hull - union) / (hull + 1e-6)


def set_detector(
    rows: int,
    *,
    size: int = 512,
    width: int = 256,
    heads: int = 8,
    queries: int = 100,
    objects: int = 20,
    depth: int = 3,
    classes: int = 92,
) -> ZooStep:
    """A hundred queries read the image; each object is matched with the cheapest query that is left
    and every decoder layer is judged. In float32."""
    widths = (width, 2 * width, 4 * width, 8 * width)
    sizes = _backbone_sizes(widths) | {"project": (8 * width, width), "queries": (queries, width)}
    for name in ("encoder_self", "decoder_self", "decoder_cross"):
        for n in range(depth):
            sizes |= {f"{name}_{part}_{n}": (width, width) for part in "qkvo"}
    for side in ("encoder", "decoder"):
        for n in range(depth):
            sizes |= {f"{side}_up_{n}": (width, 8 * width), f"{side}_down_{n}": (8 * width, width)}
    sizes |= {"class": (width, classes), "box_1": (width, width), "box_2": (width, 4)}

    def matched(cost: jax.Array) -> jax.Array:
        """The query of every object."""

        def one(n: jax.Array, state: Any) -> Any:
            cost, found = state
            query = jnp.argmin(cost[:, n], -1)
            is_taken = jax.nn.one_hot(query, queries, dtype=bool)
            cost = jnp.where(is_taken[:, None], 1e9, cost)
            return cost, found.at[:, n].set(query)

        found = jnp.zeros((rows, objects), jnp.int32)
        return jax.lax.fori_loop(0, objects, one, (cost, found))[1]

    def loss(w: Any, images: jax.Array, labels: jax.Array, boxes: jax.Array) -> jax.Array:
        def attention(name: str, n: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            parts = (
                heads_of(x @ w[f"{name}_{letter}_{n}"], heads)
                for letter, x in zip("qkv", (q, k, v), strict=True)
            )
            return attend(*parts) @ w[f"{name}_o_{n}"]

        def feed_forward(side: str, n: int, x: jax.Array) -> jax.Array:
            return layer_norm(x + jax.nn.relu(x @ w[f"{side}_up_{n}"]) @ w[f"{side}_down_{n}"])

        def judged(x: jax.Array) -> jax.Array:
            logits = x @ w["class"]
            found = jax.nn.sigmoid(jax.nn.relu(x @ w["box_1"]) @ w["box_2"])
            p = jax.nn.softmax(logits)
            wanted = jnp.take_along_axis(p, labels[:, None].repeat(queries, 1), -1)
            apart = jnp.abs(found[:, :, None] - boxes[:, None]).sum(-1)
            cost = 5 * apart - wanted - 2 * _overlap(found[:, :, None], boxes[:, None])
            query = matched(jax.lax.stop_gradient(cost).swapaxes(1, 2))
            target = jnp.full((rows, queries), classes - 1)
            target = target.at[jnp.arange(rows)[:, None], query].set(labels)
            log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1)[..., 0]
            weight = jnp.where(target == classes - 1, 0.1, 1.0)
            chosen = jnp.take_along_axis(found, query[..., None], 1)
            value = -(weight * log_p).sum() / weight.sum()
            value += 5 * jnp.abs(chosen - boxes).sum(-1).mean()
            return value + 2 * (1 - _overlap(chosen, boxes)).mean()

        x = _backbone(w, images, len(widths))[-1] @ w["project"]
        x = x.reshape(rows, -1, width)
        waves = jnp.arange(x.shape[1])[:, None] * jnp.exp(-jnp.linspace(0, 9, width // 2))
        places = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
        for n in range(depth):
            at = x + places
            x = layer_norm(x + attention("encoder_self", n, at, at, x))
            x = feed_forward("encoder", n, x)
        memory, value = x, jnp.zeros(())
        x = jnp.zeros((rows, queries, width))
        for n in range(depth):
            at = x + w["queries"]
            x = layer_norm(x + attention("decoder_self", n, at, at, x))
            read = attention("decoder_cross", n, x + w["queries"], memory + places, memory)
            x = feed_forward("decoder", n, layer_norm(x + read))
            value += judged(x)
        return value

    def batch(i: int) -> tuple[jax.Array, ...]:
        boxes = jax.random.uniform(jax.random.key(i), (rows, objects, 4), minval=0.1, maxval=0.4)
        images = normal(i, rows, size, size, 3)
        return images, integers(i, classes - 1, rows, objects), boxes

    return trained(lambda: weights(sizes), loss, batch, adamw(clip=0.1))


def focal_detector(
    rows: int, *, size: int = 512, width: int = 256, classes: int = 80, anchors: int = 9
) -> ZooStep:
    """A pyramid of features under heads that all its levels share, and a loss for few objects among
    many anchors."""
    widths = (width, 2 * width, 4 * width, 8 * width)
    sizes = _backbone_sizes(widths)
    for n, wide in enumerate(widths[1:], 1):
        sizes |= {f"lateral_{n}": (1, 1, wide, width), f"smooth_{n}": (3, 3, width, width)}
    for kind, out in (("class", anchors * classes), ("box", anchors * 4)):
        for n in range(4):
            sizes |= {f"{kind}_{n}": (3, 3, width, width), f"{kind}_norm_{n}": (width,)}
        sizes |= {f"{kind}_out": (3, 3, width, out)}
    num_anchors = anchors * sum((size // 2**level) ** 2 for level in (3, 4, 5))

    def group_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(f32).reshape(*x.shape[:3], 8, -1)
        mean = wide.mean((1, 2, 4), keepdims=True)
        wide = (wide - mean) * jax.lax.rsqrt(wide.var((1, 2, 4), keepdims=True) + 1e-5)
        return (wide.reshape(x.shape) * (1 + scale)).astype(x.dtype)

    def loss(params: Any, images: jax.Array, labels: jax.Array, boxes: jax.Array) -> jax.Array:
        w = half(params)

        def head(kind: str, x: jax.Array) -> jax.Array:
            for n in range(4):
                x = convolution(x, w[f"{kind}_{n}"])
                x = jax.nn.relu(group_norm(x, params[f"{kind}_norm_{n}"]))
            out = convolution(x, w[f"{kind}_out"])
            return out.reshape(rows, -1, out.shape[-1] // anchors).astype(f32)

        levels = _backbone(w, images.astype(bf16), len(widths))
        above, features = None, []
        for n in reversed(range(1, len(widths))):
            x = convolution(levels[n], w[f"lateral_{n}"])
            if above is not None:
                x = x + above.repeat(2, 1).repeat(2, 2)
            above = x
            features.append(convolution(x, w[f"smooth_{n}"]))
        logits = jnp.concatenate([head("class", x) for x in features], 1)
        found = jnp.concatenate([head("box", x) for x in features], 1)
        is_object = labels < classes
        wanted = jax.nn.one_hot(labels, classes)
        p = jax.nn.sigmoid(logits)
        entropy = jnp.logaddexp(0, logits) - logits * wanted
        right = p * wanted + (1 - p) * (1 - wanted)
        alpha = 0.25 * wanted + 0.75 * (1 - wanted)
        focal = (alpha * (1 - right) ** 2 * entropy).sum()
        apart = jnp.abs(found - boxes)
        smooth = jnp.where(apart < 0.1, 5 * apart**2, apart - 0.05).sum(-1)
        count = jnp.maximum(is_object.sum(), 1)
        return (focal + (smooth * is_object).sum()) / count

    def batch(i: int) -> tuple[jax.Array, ...]:
        labels = integers(i, 40 * classes, rows, num_anchors)
        boxes = normal(i + 1, rows, num_anchors, 4)
        return normal(i, rows, size, size, 3), jnp.minimum(labels, classes), boxes

    return trained(lambda: weights(sizes), loss, batch, momentum())
