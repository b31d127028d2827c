"""What JAX offers beside the model: vmapped ensembles, `lax.map`, `switch`, `while_loop`,
`custom_vjp`, checkpoint policies, keys in scans, 64-bit numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.language import (
    LMSize,
    cast,
    embedding_init,
    rms_norm,
    split_heads,
    swiglu,
    swiglu_init,
)
from tests.zoo.written.training import (
    adamw,
    cross_entropy,
    dense_init,
    integers,
    mlp,
    mlp_init,
    normal,
    pick,
    trained,
    trained_with_key,
)


@zoo_program("ensemble", source="written", layers=True)
def ensemble(size: Size) -> ZooStep:
    """Seven members with parameters, optimizer states and temperatures of their own: the whole
    update is vmapped."""
    members, rows, width, hidden, classes = pick(
        size, (7, 16, 9, 16, 3), (7, 16384, 1024, 4096, 1000), (7, 4096, 1024, 2048, 1000)
    )
    tx = adamw()

    def make_member(key: jax.Array) -> Any:
        params = mlp_init(key, width, hidden, hidden, classes)
        return params, tx.init(params)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        def member(state: Any, temperature: jax.Array) -> Any:
            params, opt = state

            def loss(params: Any) -> jax.Array:
                return cross_entropy(mlp(params, x) / temperature, labels)

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt = tx.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt), value

        return jax.vmap(member)(state, jnp.linspace(0.5, 2.0, members))

    return ZooStep(
        step,
        lambda: jax.vmap(make_member)(jax.random.split(jax.random.key(0), members)),
        lambda i: (normal(i, rows, width), integers(i, classes, rows)),
    )


@zoo_program("lax-map", source="written", layers=True)
def lax_map(size: Size) -> ZooStep:
    """A large vocabulary's loss in chunks of positions by `lax.map`, each recomputed backwards."""
    s = pick(
        size, LMSize(16, 12, 61, 24, 1, 2), LMSize(64, 4096, 256000, 3072, 1, 16, jnp.bfloat16)
    )
    chunks = pick(size, 3, 16)

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), s.depth + 1)
        layers = [swiglu_init(k, s.dim, 4 * s.dim) for k in keys]
        return {"embedding": embedding_init(a, s.vocabulary, s.dim), "layers": layers}

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)
        x = p["embedding"][tokens]
        for layer in p["layers"]:
            x = x + swiglu(layer, x)

        @jax.checkpoint
        def chunk(part: Any) -> jax.Array:
            x, labels = part
            logits = (x @ p["embedding"].T).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

        x = x.reshape(-1, chunks, s.length // chunks, s.dim).swapaxes(0, 1)
        labels = labels.reshape(-1, chunks, s.length // chunks).swapaxes(0, 1)
        return jax.lax.map(chunk, (x, labels)).mean()

    def make_batch(i: int) -> tuple:
        shape = (s.rows, s.length)
        return integers(2 * i, s.vocabulary, *shape), integers(2 * i + 1, s.vocabulary, *shape)

    return trained(init, loss, make_batch)


@zoo_program("switch", source="written", layers=True)
def switch(size: Size) -> ZooStep:
    """Each scanned layer is of one of three kinds, which its index says; the augmentation of the
    batch is drawn by the step's number."""
    rows, width, depth, classes = pick(size, (16, 12, 5, 3), (8192, 4096, 24, 1000))
    tx = adamw()
    kinds = jnp.array([0, 1, 2, 1, 0])

    def make_state() -> Any:
        a, b, c = jax.random.split(jax.random.key(0), 3)
        params = {
            "w": 0.3
            * jax.vmap(partial(dense_init, fan_in=width, fan_out=width))(
                jax.random.split(a, depth)
            ),
            "scale": 1 + 0.1 * jax.random.normal(b, (depth, width)),
            "out": dense_init(c, width, classes),
        }
        return {"params": params, "opt": tx.init(params), "step": jnp.int32(0)}

    def layer(x: jax.Array, now: Any) -> Any:
        kind, w, scale = now
        branches = (
            lambda x: x + jnp.tanh(x @ w) * scale,
            lambda x: x + jax.nn.gelu(x) * scale,
            lambda x: x * scale + (x @ w.T),
        )
        return jax.lax.switch(kind, branches, x), None

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        augment = (lambda x: x, lambda x: -x, lambda x: jnp.flip(x, axis=1))
        x = jax.lax.switch(state["step"] % 3, augment, x)

        def loss(p: Any) -> jax.Array:
            layers = (jnp.resize(kinds, depth), p["w"], p["scale"])
            y, _ = jax.lax.scan(layer, x, layers)
            return cross_entropy(y @ p["out"], labels)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, value

    return ZooStep(step, make_state, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


@zoo_program("line-search", source="written", layers=True, micro_batches=1)
def line_search(size: Size) -> ZooStep:
    """The step is halved until the loss of the whole batch falls enough: a `while_loop` around the
    model whose trips depend on the data."""
    rows, width, hidden, classes = pick(size, (16, 9, 16, 3), (65536, 1024, 4096, 1000))

    def make_state() -> Any:
        return {
            "params": mlp_init(jax.random.key(0), width, hidden, hidden, classes),
            "rate": 64.0 + jnp.zeros(()),
        }

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(mlp(params, x), labels)

        value, grads = jax.value_and_grad(loss)(state["params"])
        norm = optax.tree.norm(grads) ** 2

        def moved(rate: jax.Array) -> Any:
            return jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)

        def too_far(rate: jax.Array) -> jax.Array:
            return (loss(moved(rate)) > value - 0.1 * rate * norm) & (rate > 1e-4)

        rate = jax.lax.while_loop(too_far, lambda rate: rate / 2, state["rate"])
        return {"params": moved(rate), "rate": 4 * rate}, {"loss": value, "rate": rate}

    return ZooStep(step, make_state, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax_loss(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    """Smoothed cross-entropy per row, that keeps only the probabilities for its gradient."""
    return _softmax_forward(logits, labels, smoothing)[0]


def _softmax_forward(logits: jax.Array, labels: jax.Array, smoothing: float) -> Any:
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    value = -(1 - smoothing) * chosen - smoothing * log_p.mean(-1)
    return value, (jnp.exp(log_p), labels)


def _softmax_backward(smoothing: float, saved: Any, g: jax.Array) -> Any:
    p, labels = saved
    wanted = (1 - smoothing) * jax.nn.one_hot(labels, p.shape[-1]) + smoothing / p.shape[-1]
    return (p - wanted) * g[..., None], None


softmax_loss.defvjp(_softmax_forward, _softmax_backward)


@zoo_program("custom-vjp", source="written", layers=True)
def custom_vjp(size: Size) -> ZooStep:
    """A loss with a gradient of its own, behind reversible layers whose inputs are computed anew
    from their outputs."""
    rows, width, depth, classes = pick(size, (16, 10, 3, 7), (32768, 4096, 12, 32000))
    half = width // 2

    def couple(params: Any, x: jax.Array) -> jax.Array:
        for f, g in params:
            a, b = jnp.split(x, 2, axis=-1)
            a = a + mlp(f, b, jnp.tanh)
            b = b + mlp(g, a, jnp.tanh)
            x = jnp.concatenate([a, b], axis=-1)
        return x

    @jax.custom_vjp
    def reversible(params: Any, x: jax.Array) -> jax.Array:
        return couple(params, x)

    def forward(params: Any, x: jax.Array) -> Any:
        out = couple(params, x)
        return out, (params, out)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        params, out = saved
        grads = []
        for f, g in reversed(params):
            a, b = jnp.split(out, 2, axis=-1)
            b = b - mlp(g, a, jnp.tanh)
            a = a - mlp(f, b, jnp.tanh)
            out = jnp.concatenate([a, b], axis=-1)
            _, pull = jax.vjp(lambda layer, x: couple([layer], x), (f, g), out)
            grad, cotangent = pull(cotangent)
            grads.append(grad)
        return grads[::-1], cotangent

    reversible.defvjp(forward, backward)

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), 2 * depth + 2)
        pairs = zip(keys[:depth], keys[depth:], strict=True)
        layers = [
            (mlp_init(f, half, 2 * half, half), mlp_init(g, half, 2 * half, half)) for f, g in pairs
        ]
        return {
            "in": dense_init(a, width, width),
            "layers": layers,
            "out": dense_init(b, width, classes),
        }

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        x = reversible(params["layers"], x @ params["in"])
        return softmax_loss(x @ params["out"], labels, 0.1).mean()

    return trained(init, loss, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


def checkpointed(size: Size, policy: Any) -> ZooStep:
    """A scanned decoder whose layers keep only what the policy says."""
    s = pick(size, LMSize(16, 7, 61, 24, 3, 3), LMSize(64, 2048, 50304, 4096, 32, 32, jnp.bfloat16))

    def layer_init(key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {
            "qkv": dense_init(a, s.dim, 3 * s.dim),
            "o": dense_init(b, s.dim, s.dim),
            "mlp": swiglu_init(c, s.dim, 2 * s.dim),
            "norms": jnp.ones((2, s.dim)),
        }

    def init() -> Any:
        a, b = jax.random.split(jax.random.key(0))
        layers = jax.vmap(layer_init)(jax.random.split(b, s.depth))
        return {"embedding": embedding_init(a, s.vocabulary, s.dim), "layers": layers}

    @partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: jax.Array, w: Any) -> Any:
        qkv = split_heads(rms_norm(x, w["norms"][0]) @ w["qkv"], 3 * s.heads)
        q, k, v = jnp.split(checkpoint_name(qkv, "qkv"), 3, axis=2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + checkpoint_name(y @ w["o"], "attention")
        return x + swiglu(w["mlp"], rms_norm(x, w["norms"][1])), None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)
        x, _ = jax.lax.scan(layer, p["embedding"][tokens], p["layers"])
        return cross_entropy(x[:, :-1] @ p["embedding"].T, tokens[:, 1:])

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


@zoo_program("checkpoint-dots", source="written", layers=True)
def checkpoint_dots(size: Size) -> ZooStep:
    return checkpointed(size, jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


@zoo_program("checkpoint-names", source="written", layers=True)
def checkpoint_names(size: Size) -> ZooStep:
    return checkpointed(size, jax.checkpoint_policies.save_only_these_names("attention"))


@zoo_program("keys-in-scan", source="written", layers=True)
def keys_in_scan(size: Size) -> ZooStep:
    """Dropout and stochastic depth in scanned layers: typed keys are split, stacked and scanned."""
    rows, length, dim, depth, classes = pick(size, (16, 5, 12, 3, 7), (512, 1024, 2048, 24, 1000))

    def init() -> Any:
        a, b = jax.random.split(jax.random.key(0))
        layers = jax.vmap(partial(swiglu_init, dim=dim, width=2 * dim))(jax.random.split(a, depth))
        return {"layers": layers, "out": dense_init(b, dim, classes)}

    def loss(params: Any, key: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        def layer(carry: Any, w: Any) -> Any:
            x, key = carry
            key, drop_key, path_key = jax.random.split(key, 3)
            y = swiglu(w, x)
            y = jnp.where(jax.random.bernoulli(drop_key, 0.8, y.shape), y / 0.8, 0)
            kept = jax.random.bernoulli(path_key, 0.9, (x.shape[0], 1, 1))
            return (x + kept * y, key), None

        (x, _), _ = jax.lax.scan(layer, (x, key), params["layers"])
        return cross_entropy(x.mean(1) @ params["out"], labels)

    return trained_with_key(
        init, loss, lambda i: (normal(i, rows, length, dim), integers(i, classes, rows))
    )


@zoo_program("x64", source="written", layers=True, x64=True, rtol=1e-9, atol=1e-10)
def x64(size: Size) -> ZooStep:
    """A Gaussian process in double precision: kernel, Cholesky factor and solves per row, a neural
    network below them."""
    rows, points, width, hidden = pick(size, (16, 7, 3, 12), (4096, 128, 16, 512))

    def double(tree: Any) -> Any:
        return cast(tree, jnp.float64)

    def init() -> Any:
        net = mlp_init(jax.random.key(0), width, hidden, hidden, 4)
        return double({"net": net, "noise": jnp.log(0.3), "scale": jnp.zeros(())})

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        z = mlp(params["net"], x, jnp.tanh)
        distance = jnp.sum((z[:, :, None] - z[:, None]) ** 2, -1)
        kernel = jnp.exp(params["scale"] - distance / 2)
        kernel += jnp.exp(2 * params["noise"]) * jnp.eye(points)
        factor = jnp.linalg.cholesky(kernel)
        white = jax.scipy.linalg.solve_triangular(factor, y[..., None], lower=True)[..., 0]
        log_det = jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum(-1)
        return jnp.mean(0.5 * jnp.sum(white**2, -1) + log_det)

    def make_batch(i: int) -> tuple:
        x = normal(i, rows, points, width, dtype=jnp.float64)
        return x, normal(i + 1, rows, points, dtype=jnp.float64)

    return trained(init, loss, make_batch)
