"""The models of `autopar demo`: a name → a state, an unmodified train step and batches.

Written with Flax and optax, small enough for a laptop. The text is autopar's own source; images
and labels are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import DependencyError

Batch = dict[str, np.ndarray]

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 128, 8, 4, 256, 64
EXPERTS, CLASSES, PATCH, IMAGE = 8, 10, 4, 32


@dataclass(frozen=True)
class DemoModel:
    """`what`: in a few words; `unit`: what a row of the batch is."""

    what: str
    unit: str
    state: Any
    train_step: Callable[[Any, Batch], tuple[Any, Any]]
    batches: Callable[[int, int], Iterator[Batch]]


def make_model(name: str) -> DemoModel:
    """`name`: gpt, vit, moe, or pipeline, which is the GPT."""
    try:
        import flax.linen as nn
        import optax
        from flax.training.train_state import TrainState
    except ImportError as error:
        raise DependencyError(
            f"autopar demo needs Flax and optax: {error}. Install them with: "
            "pip install 'autopar[examples]'"
        ) from error
    import jax
    import jax.numpy as jnp

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

    is_vision = name == "vit"
    model = Vision() if is_vision else Language(experts=name == "moe")
    batches = _images if is_vision else _text
    example = next(batches(1, 1))["inputs"]
    params = model.init(jax.random.key(0), example)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    kinds = {"vit": "vision transformer", "moe": f"GPT with {EXPERTS} experts in each layer"}
    what = f"a small {kinds.get(name, 'GPT')} of {count / 1e6:.1f} million parameters"
    unit = "images" if is_vision else f"sequences of {LENGTH} tokens"
    return DemoModel(what, unit, state, train_step, batches)


def _text(steps: int, batch_size: int) -> Iterator[Batch]:
    """Windows of this package's source, as bytes."""
    folder = Path(__file__).parent
    text = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    data = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(data) - LENGTH - 1, size=batch_size)
        windows = np.stack([data[s : s + LENGTH + 1] for s in starts])
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def _images(steps: int, batch_size: int) -> Iterator[Batch]:
    """Noise around one made-up image for each class."""
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(CLASSES, IMAGE, IMAGE, 3)).astype(np.float32)
    for _ in range(steps):
        targets = random.integers(0, CLASSES, size=batch_size).astype(np.int32)
        noise = random.normal(size=(batch_size, IMAGE, IMAGE, 3)).astype(np.float32)
        yield {"inputs": prototypes[targets] + noise, "targets": targets}
