"""`autopar demo`: trains a small GPT with an unmodified step, on one device and on all.

The model is Flax, the optimizer optax, the text autopar's source. The losses of both runs are
compared step by step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from autopar.errors import AutoparError

_MISSING = (
    "autopar demo needs Flax and optax: {}. Install them with: pip install 'autopar[examples]'"
)
TOLERANCE = 2e-3


def run_demo(
    steps: int, batch_size: int, platform: str, cluster: str = "local", out: TextIO = sys.stdout
) -> bool:
    """Train, print, compare; True if the losses agree."""
    import jax

    if cluster == "ray":
        return _on_ray(steps, batch_size, out)
    if platform != "gpu":
        jax.config.update("jax_num_cpu_devices", 8)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    import autopar

    state, train_step = _make_model()
    batches = list(_batches(steps, batch_size, seq_len=64))
    devices = jax.devices()
    kind = devices[0].device_kind if devices[0].platform != "cpu" else "virtual CPU"
    print(f"training a small GPT on {len(devices)} {kind} device(s)\n", file=out)
    return _compare(state, train_step, batches, autopar.parallelize(train_step), out)


def _on_ray(steps: int, batch_size: int, out: TextIO) -> bool:
    """Train on a Ray cluster that is started here: two stages on two hosts of two devices, virtual
    ones without GPUs, or all GPUs of this host."""
    import autopar

    method = None
    try:
        autopar.init(cluster="ray", num_hosts=2, devices_per_host=2)
        method = autopar.PipeshardParallel(4, stages=autopar.UniformStages(2))
        print("training a small GPT as two stages on a Ray cluster\n", file=out)
    except autopar.ClusterError:
        autopar.init(cluster="ray")
        print("training a small GPT on the GPUs of this host, with Ray\n", file=out)
    try:
        state, train_step = _make_model()
        batches = list(_batches(steps, batch_size, seq_len=64))
        step = autopar.parallelize(train_step, method=method)
        return _compare(state, train_step, batches, step, out)
    finally:
        autopar.shutdown()


def _compare(
    state: Any,
    train_step: Any,
    batches: list[dict[str, np.ndarray]],
    parallel_step: Any,
    out: TextIO,
) -> bool:
    import jax

    alone = jax.jit(train_step)
    single = [float(loss) for loss in _train(alone, state, batches, "one device ", out)]
    sharded = [float(loss) for loss in _train(parallel_step, state, batches, "all devices", out)]

    executable = parallel_step.last_executable
    assert executable is not None
    print("\n" + executable.plan.explain() + "\n", file=out)
    worst = max(abs(a - b) for a, b in zip(single, sharded, strict=True))
    print(f"loss {single[0]:.4f} → {single[-1]:.4f} on one device", file=out)
    print(f"loss {sharded[0]:.4f} → {sharded[-1]:.4f} on all devices", file=out)
    agrees = worst <= TOLERANCE
    verdict = "agree" if agrees else "DIFFER"
    print(f"losses {verdict}: largest difference {worst:.2e} (tolerance {TOLERANCE:.0e})", file=out)
    return agrees


def _train(
    step: Any, state: Any, batches: list[dict[str, np.ndarray]], label: str, out: TextIO
) -> list[Any]:
    import jax
    import jax.numpy as jnp

    state = jax.tree.map(jnp.copy, state)  # the sharded step donates its state
    losses = []
    started = time.perf_counter()
    for index, batch in enumerate(batches):
        state, loss = step(state, batch)
        losses.append(loss)
        _progress(label, index + 1, len(batches), float(loss), time.perf_counter() - started, out)
    print(file=out)
    return losses


def _progress(label: str, done: int, total: int, loss: float, seconds: float, out: TextIO) -> None:
    if not out.isatty() and done != total:
        return
    filled = round(24 * done / total)
    bar = "█" * filled + "░" * (24 - filled)
    start = "\r" if out.isatty() else ""
    text = f"{start}{label} {bar} {done}/{total}  loss {loss:.4f}  {seconds:5.1f} s"
    print(text, end="", file=out, flush=True)


def _batches(steps: int, batch_size: int, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Windows of this package's source, as bytes."""
    folder = Path(__file__).parent
    text = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    data = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(data) - seq_len - 1, size=batch_size)
        windows = np.stack([data[s : s + seq_len + 1] for s in starts])
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def _make_model() -> tuple[Any, Any]:
    try:
        import flax.linen as nn
        import optax
        from flax.training.train_state import TrainState
    except ImportError as error:
        raise AutoparError(_MISSING.format(error)) from error
    import jax
    import jax.numpy as jnp

    hidden, heads, layers, vocabulary, length = 128, 8, 4, 256, 64

    class TransformerBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            batch, seq, _ = x.shape
            qkv = nn.Dense(3 * hidden, name="qkv")(nn.LayerNorm()(x))
            q, k, v = jnp.split(qkv.reshape(batch, seq, heads, -1), 3, axis=-1)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + nn.Dense(hidden, name="out")(attended.reshape(batch, seq, hidden))
            y = nn.gelu(nn.Dense(4 * hidden, name="up")(nn.LayerNorm()(x)))
            return x + nn.Dense(hidden, name="down")(y)

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(vocabulary, hidden, name="embed")
            positions = self.param("positions", nn.initializers.normal(0.02), (length, hidden))
            x = embed(tokens) + positions
            for _ in range(layers):
                x = TransformerBlock()(x)
            return nn.Dense(vocabulary, name="head")(nn.LayerNorm()(x))

    model = GPT()
    params = model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return state, train_step
