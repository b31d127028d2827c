"""Train steps that scan over their layers, as people write them: name → step, state, batches.

They have what scans of real models have beside weights: keys and caches per layer, other carries,
kinds of layers, skips, several scans, a place in the middle of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

NUM_LAYERS, WIDTH, HEADS, LENGTH, ROWS, VOCABULARY = 4, 16, 4, 8, 16, 32
# A large epsilon: Adam would turn the rounding of a zero gradient into a whole step.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)


@dataclass(frozen=True)
class Scanned:
    """`step(state, batch) -> (state, loss)`; `batch_of(i)` is that of call i. `stacks`: what the
    arguments with a row per layer are called."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch_of: Callable[[int], Any]
    stacks: tuple[str, ...] = ("layers",)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * 0.25


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attend(q: Any, k: Any, v: Any, *, causal: bool = True, window: Any = None) -> jax.Array:
    q, k, v = (x.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    if causal:
        scores = jnp.where(distance >= 0, scores, -1e9)
    if window is not None:
        scores = jnp.where(distance < window, scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(*mixed.shape[:2], WIDTH)


def mlp(x: jax.Array, own: Any) -> jax.Array:
    return x + jax.nn.gelu(rms_norm(x, own["n2"]) @ own["up"]) @ own["down"]


def block(x: jax.Array, own: Any, **options: Any) -> jax.Array:
    h = rms_norm(x, own["n1"])
    mixed = attend(h @ own["q"], h @ own["k"], h @ own["v"], **options)
    return mlp(x + mixed @ own["o"], own)


def block_params(*num: int, seed: int = 0) -> dict[str, jax.Array]:
    square = {name: (WIDTH, WIDTH) for name in "qkvo"}
    shapes = {**square, "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {n: normal(seed + i, *num, *shape) for i, (n, shape) in enumerate(shapes.items())}
    return {**params, "n1": jnp.ones((*num, WIDTH)), "n2": jnp.ones((*num, WIDTH))}


def tokens(index: int) -> dict[str, jax.Array]:
    key = jax.random.key(100 + index)
    return {"tokens": jax.random.randint(key, (ROWS, LENGTH), 0, VOCABULARY)}


def sequences(index: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(200 + index))
    shape = (ROWS, LENGTH, WIDTH)
    return {"x": jax.random.normal(first, shape), "y": jax.random.normal(second, shape)}


def images(index: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(300 + index))
    labels = jax.random.randint(second, (ROWS,), 0, 10)
    return {"x": jax.random.normal(first, (ROWS, 8, 8, 3)), "y": labels}


def label_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def token_loss(params: Any, x: jax.Array, batch: Any) -> jax.Array:
    return label_loss(x[:, :-1] @ params["embed"].T, batch["tokens"][:, 1:])


def language_params(layers: Any = None) -> dict[str, Any]:
    layers = block_params(NUM_LAYERS) if layers is None else layers
    return {"embed": normal(90, VOCABULARY, WIDTH), "layers": layers}


def state_of(params: Any, **others: Any) -> dict[str, Any]:
    return {"params": params, "opt": OPTIMIZER.init(params), **others}


def step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(state, grads), value

    return step


def updated(state: Any, grads: Any, **others: Any) -> dict[str, Any]:
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt, **others}


def language_model(layers: Callable[[Any, Any], Any], own: Any = None) -> Scanned:
    """`layers(params, x)` between an embedding and its transpose."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = layers(params["layers"], params["embed"][batch["tokens"]])
        return token_loss(params, x, batch)

    return Scanned(step_of(loss), state_of(language_params(own)), tokens)


# -- models


def keys_and_caches() -> Scanned:
    """A key of dropout for each layer from one in the state, keys and values that all layers add
    to, and a running mean per layer."""

    def one(carry: Any, own: Any) -> tuple[Any, jax.Array]:
        (x, keys, values), (params, key, mean) = carry, own
        h = rms_norm(x, params["n1"])
        keys, values = 0.5 * keys + h @ params["k"], 0.5 * values + h @ params["v"]
        mixed = attend(h @ params["q"], keys, values) @ params["o"]
        kept = jax.random.bernoulli(key, 0.9, (WIDTH,))
        x = mlp(x + jnp.where(kept, mixed / 0.9, 0.0) + mean, params)
        return (x, keys, values), 0.9 * mean + 0.1 * lax.stop_gradient(x.mean((0, 1)))

    def loss(params: Any, used: Any, batch: Any) -> tuple[jax.Array, Any]:
        key, use = jax.random.split(used["key"])
        x = params["embed"][batch["tokens"]]
        start = (x, jnp.zeros_like(x), jnp.zeros_like(x))
        own = (params["layers"], jax.random.split(use, NUM_LAYERS), used["layers"])
        (x, _, _), means = lax.scan(one, start, own)
        return token_loss(params, x, batch), {"key": key, "layers": means}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        run = jax.value_and_grad(loss, has_aux=True)
        (value, used), grads = run(state["params"], state["used"], batch)
        return updated(state, grads, used=used), value

    used = {"key": jax.random.key(5), "layers": jnp.zeros((NUM_LAYERS, WIDTH))}
    return Scanned(step, state_of(language_params(), used=used), tokens)


def period_of_three() -> Scanned:
    """Groups of two layers with windows, scanned in the scan, and a third that sees everything."""

    @jax.checkpoint
    def group(x: Any, own: Any) -> tuple[Any, None]:
        x, _ = lax.scan(lambda x, p: (block(x, p, window=3), None), x, own["local"])
        return block(x, own["global"]), None

    own = {"local": block_params(NUM_LAYERS, 2), "global": block_params(NUM_LAYERS, seed=20)}
    return language_model(lambda layers, x: lax.scan(group, x, layers)[0], own)


def encoder_decoder() -> Scanned:
    """Two scans; each layer of the second reads what the first has made."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = lax.scan(
            lambda x, p: (block(x, p, causal=False), None), batch["x"] @ params["in"], params["enc"]
        )
        memory = rms_norm(x, params["norm"])

        def one(y: Any, own: Any) -> tuple[Any, None]:
            params, cross = own
            y = block(y, params)
            keys, values = memory @ cross["k"], memory @ cross["v"]
            return y + attend(
                rms_norm(y, cross["n"]) @ cross["q"], keys, values, causal=False
            ), None

        y = jnp.roll(batch["y"], 1, axis=1) @ params["in"]
        y, _ = lax.scan(one, y, (params["dec"], params["cross"]))
        return jnp.mean((y @ params["out"] - batch["y"]) ** 2)

    cross = {name: normal(30 + i, NUM_LAYERS, WIDTH, WIDTH) for i, name in enumerate("qkv")}
    params = {
        "in": normal(1, WIDTH, WIDTH),
        "out": normal(2, WIDTH, WIDTH),
        "norm": jnp.ones(WIDTH),
        "enc": block_params(NUM_LAYERS),
        "dec": block_params(NUM_LAYERS, seed=10),
        "cross": {**cross, "n": jnp.ones((NUM_LAYERS, WIDTH))},
    }
    return Scanned(step_of(loss), state_of(params), sequences, ("enc", "dec", "cross"))


def between_convolutions() -> Scanned:
    """Residual blocks scanned in the middle of a network that changes sizes around them."""

    def conv(x: Any, kernel: Any, stride: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
        )

    def group_norm(x: Any, scale: Any) -> jax.Array:
        groups = x.reshape(*x.shape[:-1], 4, -1)
        mean, variance = (f((1, 2, 4), keepdims=True) for f in (groups.mean, groups.var))
        return ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale

    def one(x: Any, own: Any) -> tuple[Any, None]:
        h = conv(jax.nn.silu(group_norm(x, own["scale"])), own["a"])
        return x + conv(jax.nn.silu(h), own["b"]), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(conv(jax.nn.relu(conv(batch["x"], params["c1"])), params["c2"], 2))
        x, _ = lax.scan(one, x, params["layers"])
        x = jax.nn.relu(conv(x, params["c3"], 2))
        return label_loss(x.mean((1, 2)) @ params["out"], batch["y"])

    shape = (3, 3, WIDTH, WIDTH)
    params = {
        "c1": normal(1, 3, 3, 3, WIDTH),
        "c2": normal(2, *shape),
        "c3": normal(5, *shape),
        "out": normal(6, WIDTH, 10),
        "layers": {
            "a": normal(3, NUM_LAYERS, *shape),
            "b": normal(4, NUM_LAYERS, *shape),
            "scale": jnp.ones((NUM_LAYERS, WIDTH)),
        },
    }
    return Scanned(step_of(loss), state_of(params), images)


def skips() -> Scanned:
    """A U-ViT: what one scan stacks, the next one reads in reverse."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def down(x: Any, own: Any) -> tuple[Any, Any]:
            x = block(x, own, causal=False)
            return x, x

        def up(x: Any, own: Any) -> tuple[Any, None]:
            params, merge, skip = own
            x = jnp.concatenate([x, skip], -1) @ merge
            return block(x, params, causal=False), None

        x, kept = lax.scan(down, batch["x"] @ params["in"], params["down"])
        x = block(x, params["middle"], causal=False)
        x, _ = lax.scan(up, x, (params["up"], params["merge"], kept), reverse=True)
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    params = {
        "in": normal(1, WIDTH, WIDTH),
        "out": normal(2, WIDTH, WIDTH),
        "down": block_params(2),
        "middle": block_params(),
        "up": block_params(2, seed=10),
        "merge": normal(40, 2, 2 * WIDTH, WIDTH),
    }
    return Scanned(step_of(loss), state_of(params), sequences, ())


def by_index() -> Scanned:
    """A loop over numbers of layers, each of which takes its row of every parameter."""

    def layers(params: Any, x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return block(x, jax.tree.map(lambda p: p[i], params))

        return lax.fori_loop(0, NUM_LAYERS, body, x)

    return language_model(layers)


def deep_supervision() -> Scanned:
    """The loss reads every layer's output, and a learned mix of them."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def one(x: Any, own: Any) -> tuple[Any, Any]:
            x = block(x, own)
            return x, x

        _, each = lax.scan(one, params["embed"][batch["tokens"]], params["layers"])
        mixed = jnp.einsum("l,lbtd->btd", jax.nn.softmax(params["mix"]), each)
        early = jax.vmap(lambda x: token_loss(params, x, batch))(each)
        return token_loss(params, mixed, batch) + 0.1 * early.mean()

    params = {**language_params(), "mix": jnp.zeros(NUM_LAYERS)}
    return Scanned(step_of(loss), state_of(params), tokens)


def kinds_by_flag() -> Scanned:
    """Which layers attend, and how far, is data; some are left out at random."""

    def one(x: Any, own: Any) -> tuple[Any, None]:
        params, attends, window, key = own
        with_attention = lambda x: block(x, params, window=window)  # noqa: E731
        y = lax.cond(attends, with_attention, lambda x: mlp(x, params), x)
        return jnp.where(jax.random.bernoulli(key, 0.8), y, x), None

    def layers(params: Any, x: Any) -> Any:
        attends = jnp.array([True, False] * (NUM_LAYERS // 2))
        windows = jnp.array([2, LENGTH] * (NUM_LAYERS // 2))
        keys = jax.random.split(jax.random.key(3), NUM_LAYERS)
        return lax.scan(one, x, (params, attends, windows, keys))[0]

    return language_model(layers)


def rates_by_layer() -> Scanned:
    """Gradients clipped layer by layer, rates that fall with depth, and averages of all weights."""
    base = language_model(
        lambda layers, x: lax.scan(lambda x, p: (block(x, p), None), x, layers)[0]
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = lax.scan(
            lambda x, p: (block(x, p), None), params["embed"][batch["tokens"]], params["layers"]
        )
        return token_loss(params, x, batch)

    def clipped(grads: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        grads = {**grads, "layers": jax.vmap(clipped)(grads["layers"])}
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        rates = 0.9 ** (NUM_LAYERS - 1 - jnp.arange(NUM_LAYERS, dtype=jnp.float32))
        scaled = lambda u: u * rates.reshape(-1, *[1] * (u.ndim - 1))  # noqa: E731
        updates = {**updates, "layers": jax.tree.map(scaled, updates["layers"])}
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return {"params": params, "opt": opt, "average": average}, value

    average = jax.tree.map(jnp.array, base.state["params"])
    return Scanned(step, {**base.state, "average": average}, tokens)


def adapters() -> Scanned:
    """Small matrices are trained beside frozen ones, in a scan under a policy of checkpoints."""

    def one(x: Any, own: Any) -> tuple[Any, None]:
        frozen, small = own
        q, v = (frozen[n] + small[n + "a"] @ small[n + "b"] for n in "qv")
        return block(x, {**frozen, "q": q, "v": v}), None

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss(small: Any, frozen: Any, batch: Any) -> jax.Array:
        x = frozen["embed"][batch["tokens"]]
        own = (frozen["layers"], small["layers"])
        x, _ = lax.scan(jax.checkpoint(one, policy=policy), x, own)
        return token_loss(frozen, x, batch)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], state["frozen"], batch)
        return updated(state, grads), value

    shapes = {"a": (WIDTH, 2), "b": (2, WIDTH)}
    small = {m + n: normal(ord(m), NUM_LAYERS, *shapes[n]) for m in "qv" for n in shapes}
    return Scanned(step, state_of({"layers": small}, frozen=language_params()), tokens)


def grouped_queries() -> Scanned:
    """A Llama as MaxText writes it: a scan under a policy that saves products by name, rotary
    positions, queries in groups, a gated MLP and masks from the batch."""
    groups, size = 2, WIDTH // HEADS
    per_group = HEADS // groups

    def rotate(x: jax.Array, at: jax.Array) -> jax.Array:
        angle = at[..., None, None] / 100.0 ** (jnp.arange(size // 2) * 2 / size)
        left, right = jnp.split(x, 2, -1)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def one(carry: Any, own: Any) -> tuple[Any, None]:
        x, at, segments = carry
        h = rms_norm(x, own["n1"])
        q = checkpoint_name(jnp.einsum("btd,dhk->bthk", h, own["query"]), "query")
        k = checkpoint_name(jnp.einsum("btd,dgk->btgk", h, own["key"]), "key")
        v = checkpoint_name(jnp.einsum("btd,dgk->btgk", h, own["value"]), "value")
        q = rotate(q, at).reshape(*x.shape[:2], groups, per_group, size)
        scores = jnp.einsum("btgpk,bsgk->bgpts", q, rotate(k, at)) / size**0.5
        seen = (at[:, :, None] >= at[:, None]) & (segments[:, :, None] == segments[:, None])
        scores = jnp.where(seen[:, None, None], scores, -1e9)
        mixed = jnp.einsum("bgpts,bsgk->btgpk", jax.nn.softmax(scores), v)
        mixed = mixed.reshape(*x.shape[:2], HEADS, size)
        x = x + checkpoint_name(jnp.einsum("bthk,hkd->btd", mixed, own["out"]), "out")
        h = rms_norm(x, own["n2"])
        x = x + (jax.nn.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]
        return (x, at, segments), None

    policy = jax.checkpoint_policies.save_only_these_names("query", "key", "value", "out")

    def loss(params: Any, batch: Any) -> jax.Array:
        carry = (params["embed"][batch["tokens"]], batch["at"], batch["segments"])
        (x, _, _), _ = lax.scan(jax.checkpoint(one, policy=policy), carry, params["layers"])
        return token_loss(params, rms_norm(x, params["norm"]), batch)

    def batch_of(index: int) -> dict[str, jax.Array]:
        segments = (jnp.arange(LENGTH) >= LENGTH // 2).astype(jnp.int32)
        at = jnp.arange(LENGTH) % (LENGTH // 2)
        rows = {"segments": segments, "at": at.astype(jnp.float32)}
        return {**tokens(index), **{n: jnp.tile(x, (ROWS, 1)) for n, x in rows.items()}}

    shapes = {"query": (WIDTH, HEADS, size), "key": (WIDTH, groups, size)}
    shapes |= {"value": (WIDTH, groups, size), "out": (HEADS, size, WIDTH)}
    shapes |= {"gate": (WIDTH, 48), "up": (WIDTH, 48), "down": (48, WIDTH)}
    own = {n: normal(i, NUM_LAYERS, *shape) for i, (n, shape) in enumerate(shapes.items())}
    own |= {n: jnp.ones((NUM_LAYERS, WIDTH)) for n in ("n1", "n2")}
    params = {**language_params(own), "norm": jnp.ones(WIDTH)}
    return Scanned(step_of(loss), state_of(params), batch_of)


class Residual(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=first)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def stacked_modules() -> Scanned:
    """Equinox's modules, made together by `filter_vmap` and scanned as its manual shows."""
    modules = eqx.filter_vmap(Residual)(jax.random.split(jax.random.key(5), NUM_LAYERS))
    arrays, others = eqx.partition(modules, eqx.is_array)

    def one(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return jax.vmap(jax.vmap(eqx.combine(own, others)))(x), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = lax.scan(one, batch["x"], params["layers"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    params = {"layers": arrays, "head": normal(8, WIDTH, WIDTH)}
    return Scanned(step_of(loss), state_of(params), sequences)


MODELS: Mapping[str, Callable[[], Scanned]] = {
    "keys-and-caches": keys_and_caches,
    "period-of-three": period_of_three,
    "encoder-decoder": encoder_decoder,
    "between-convolutions": between_convolutions,
    "skips": skips,
    "by-index": by_index,
    "deep-supervision": deep_supervision,
    "kinds-by-flag": kinds_by_flag,
    "rates-by-layer": rates_by_layer,
    "adapters": adapters,
    "grouped-queries": grouped_queries,
    "stacked-modules": stacked_modules,
}
