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

LENGTH, CLASSES, IMAGE = 64, 10, 32


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
        import optax
        from flax.training.train_state import TrainState

        from autopar.cli.demo_modules import EXPERTS, Language, Vision
    except ImportError as error:
        raise DependencyError(
            f"autopar demo needs Flax and optax: {error}. Install them with: "
            "pip install 'autopar[examples]'"
        ) from error
    import jax

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
