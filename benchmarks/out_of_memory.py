"""Steps that run out of memory under `jax.jit` on one H200 and train under autopar.

    python -m benchmarks.out_of_memory --out FILE       # on an H200: about 5 minutes
    python -m benchmarks.out_of_memory --tiny           # a dry run on a CPU
    python -m benchmarks.out_of_memory --case gpt       # one of gpt, vit, unet

Each case runs in a process of its own, which is ended after `--limit-s` seconds, and its row is
printed and written as soon as it is there: whether `jax.jit` ran out of memory and XLA's count for
it, the plan, its predicted bytes and XLA's, the losses of three steps, and those of an oracle that
adds up the gradients of slices of the batch by hand. On a CPU, which has no limit, the budget is
three quarters of what `jax.jit` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = ("gpt", "vit", "unet")
_FULL = {
    "gpt": {"layers": 24, "width": 1024, "heads": 16, "length": 1024, "words": 32768, "rows": 96},
    "vit": {"layers": 24, "width": 1024, "heads": 16, "side": 224, "patch": 16, "rows": 1024},
    "unet": {"channels": 64, "levels": 3, "blocks": 5, "side": 256, "rows": 480},
}
_TINY = {
    "gpt": {"layers": 2, "width": 64, "heads": 4, "length": 32, "words": 256, "rows": 16},
    "vit": {"layers": 2, "width": 64, "heads": 4, "side": 32, "patch": 8, "rows": 16},
    "unet": {"channels": 8, "levels": 2, "blocks": 2, "side": 16, "rows": 16},
}
_SLICES = {"gpt": 16, "vit": 16, "unet": 20}  # of the oracle's batch
_TINY_SLICES = 8
Loss = Callable[[Any, Any], Any]


def _normal(keys: Any, *shape: int) -> Any:
    import jax

    return 0.02 * jax.random.normal(next(keys), shape)


def _layers(keys: Any, count: int, d: int) -> Any:
    import jax.numpy as jnp

    return {
        "g1": jnp.ones((count, d)),
        "g2": jnp.ones((count, d)),
        "qkv": _normal(keys, count, d, 3 * d),
        "out": _normal(keys, count, d, d),
        "up": _normal(keys, count, d, 4 * d),
        "down": _normal(keys, count, 4 * d, d),
    }


def _norm(x: Any, g: Any) -> Any:
    import jax
    import jax.numpy as jnp

    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * g).astype(jnp.bfloat16)


def _block(x: Any, w: Any, heads: int, causal: bool) -> Any:
    import jax
    import jax.numpy as jnp

    bf16 = jnp.bfloat16
    b, s, d = x.shape
    q, k, v = jnp.split(_norm(x, w["g1"]) @ w["qkv"].astype(bf16), 3, -1)
    q, k, v = (t.reshape(b, s, heads, d // heads) for t in (q, k, v))
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32) / (d // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores).astype(bf16), v)
    x = x + mixed.reshape(b, s, d) @ w["out"].astype(bf16)
    return x + jax.nn.gelu(_norm(x, w["g2"]) @ w["up"].astype(bf16)) @ w["down"].astype(bf16)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _gpt(z: dict[str, int], keys: Any) -> tuple[Any, Any, Loss]:
    """A GPT of 350M parameters."""
    import jax
    import jax.numpy as jnp

    shape = (z["rows"], z["length"])
    params = {
        "tokens": _normal(keys, z["words"], z["width"]),
        "positions": _normal(keys, z["length"], z["width"]),
        "layers": _layers(keys, z["layers"], z["width"]),
        "g": jnp.ones(z["width"]),
    }
    batch = {n: jax.random.randint(next(keys), shape, 0, z["words"]) for n in "xy"}

    def loss(p: Any, b: Any) -> Any:
        x = (p["tokens"][b["x"]] + p["positions"]).astype(jnp.bfloat16)
        x, _ = jax.lax.scan(lambda x, w: (_block(x, w, z["heads"], True), None), x, p["layers"])
        logits = _norm(x, p["g"]) @ p["tokens"].T.astype(jnp.bfloat16)
        return _cross_entropy(logits.astype(jnp.float32), b["y"])

    return params, batch, loss


def _vit(z: dict[str, int], keys: Any) -> tuple[Any, Any, Loss]:
    """ViT-L/16."""
    import jax
    import jax.numpy as jnp

    side, patch, bf16 = z["side"], z["patch"], jnp.bfloat16
    count, size = (side // patch) ** 2, patch * patch * 3
    params = {
        "patches": _normal(keys, size, z["width"]),
        "positions": _normal(keys, count, z["width"]),
        "layers": _layers(keys, z["layers"], z["width"]),
        "head": _normal(keys, z["width"], 1000),
    }
    batch = {
        "x": jax.random.normal(next(keys), (z["rows"], side, side, 3), bf16),
        "y": jax.random.randint(next(keys), (z["rows"],), 0, 1000),
    }

    def loss(p: Any, b: Any) -> Any:
        k = side // patch
        x = b["x"].reshape(-1, k, patch, k, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, count, size) @ p["patches"].astype(bf16) + p["positions"].astype(bf16)
        x, _ = jax.lax.scan(lambda x, w: (_block(x, w, z["heads"], False), None), x, p["layers"])
        logits = x.mean(1) @ p["head"].astype(bf16)
        return _cross_entropy(logits.astype(jnp.float32), b["y"])

    return params, batch, loss


def _unet(z: dict[str, int], keys: Any) -> tuple[Any, Any, Loss]:
    import jax
    import jax.numpy as jnp

    c, n, bf16 = z["channels"], z["levels"], jnp.bfloat16

    def kernel(i: int, o: int) -> Any:
        return jax.random.normal(next(keys), (3, 3, i, o)) * (2 / (9 * i)) ** 0.5

    def level(i: int, o: int) -> list[Any]:
        """Kernels of `blocks` pairs of convolutions, the first of which has `i` channels."""
        inputs = [i] + [o] * (z["blocks"] - 1)
        return [{"a": kernel(channels, o), "b": kernel(o, o)} for channels in inputs]

    widths = [c * 2**i for i in range(n)]
    params = {
        "in": kernel(3, c),
        "out": kernel(c, 3),
        "down": [level(widths[max(i - 1, 0)], widths[i]) for i in range(n)],
        "up": [level(widths[i] + widths[i + 1], widths[i]) for i in range(n - 1)],
    }
    shape = (z["rows"], z["side"], z["side"], 3)
    batch = {name: jax.random.normal(next(keys), shape, bf16) for name in "xy"}

    def conv(x: Any, w: Any) -> Any:
        order = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w.astype(bf16), (1, 1), "SAME", dimension_numbers=order
        )

    def act(x: Any) -> Any:
        """Group norm of each image, then silu."""
        b, h, w, channels = x.shape
        y = x.astype(jnp.float32).reshape(b, h * w, 8, channels // 8)
        y = (y - y.mean((1, 3), keepdims=True)) * jax.lax.rsqrt(y.var((1, 3), keepdims=True) + 1e-5)
        return jax.nn.silu(y.reshape(x.shape)).astype(bf16)

    def blocks(x: Any, pairs: Any) -> Any:
        for w in pairs:
            x = act(conv(act(conv(x, w["a"])), w["b"]))
        return x

    def loss(p: Any, b: Any) -> Any:
        x, kept = conv(b["x"], p["in"]), []
        for i, w in enumerate(p["down"]):
            x = blocks(x, w)
            if i < n - 1:
                kept.append(x)
                rows, h, width, channels = x.shape
                x = x.reshape(rows, h // 2, 2, width // 2, 2, channels).mean((2, 4))
        for i in reversed(range(n - 1)):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = blocks(jnp.concatenate([x, kept[i]], -1), p["up"][i])
        wrong = conv(x, p["out"]).astype(jnp.float32) - b["y"].astype(jnp.float32)
        return jnp.mean(jnp.square(wrong))

    return params, batch, loss


_MODELS = {"gpt": _gpt, "vit": _vit, "unet": _unet}


def update(state: Any, grads: Any) -> Any:
    """Adam's."""
    import jax
    import jax.numpy as jnp

    t = state["step"] + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["nu"], grads)
    first, second = 1 - 0.9**t, 1 - 0.99**t
    params = jax.tree.map(
        lambda p, m, v: p - 3e-4 * (m / first) / (jnp.sqrt(v / second) + 1e-8),
        state["params"],
        mu,
        nu,
    )
    return {"params": params, "mu": mu, "nu": nu, "step": t}


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def _under_jit(train_step: Any, host: Any, batch: Any, runs: bool) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    found: dict[str, Any] = {"jit_out_of_memory": False}
    try:
        lowered = jax.jit(train_step, donate_argnums=0).lower(host, batch)
        # Trying kernels for convolutions of the whole batch would take minutes.
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
        stats = compiled.memory_analysis()
        assert stats is not None
        found["jit_bytes"] = (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )
        if runs:
            jax.block_until_ready(compiled(jax.tree.map(jnp.asarray, host), batch))
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        found["jit_out_of_memory"] = True
    jax.clear_caches()
    return found


def _oracle(loss: Loss, host: Any, batch: Any, slices: int) -> list[float]:
    """Losses of three steps, with the gradients of slices of the batch added up."""
    import jax
    import jax.numpy as jnp

    grad = jax.jit(jax.value_and_grad(loss))
    apply = jax.jit(update, donate_argnums=(0, 1))
    state, losses = jax.tree.map(jnp.asarray, host), []
    rows = len(jax.tree.leaves(batch)[0]) // slices
    for _ in range(3):
        total, grads = 0.0, None
        for i in range(slices):
            part = jax.tree.map(lambda x, i=i: x[i * rows : (i + 1) * rows], batch)
            value, new = grad(state["params"], part)
            total += float(value) / slices
            new = jax.tree.map(lambda g: g / slices, new)
            grads = new if grads is None else jax.tree.map(jnp.add, grads, new)
        state = apply(state, grads)
        losses.append(total)
    return losses


def run(case: str, tiny: bool) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar

    began = time.perf_counter()

    def note(phase: str) -> None:
        print(f"{time.perf_counter() - began:.0f} s: {phase}", file=sys.stderr, flush=True)

    keys = iter(jax.random.split(jax.random.key(0), 200))
    params, batch, loss = _MODELS[case]((_TINY if tiny else _FULL)[case], keys)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "mu": zeros, "nu": zeros, "step": jnp.zeros((), jnp.int32)}
    host = jax.tree.map(np.asarray, state)  # nothing of it stays on the device
    del params, zeros, state

    def train_step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return update(state, grads), value

    autopar.init(devices=jax.devices()[:1])
    device = jax.devices()[0]
    row: dict[str, Any] = {"case": case, "device": device.device_kind, "jax": jax.__version__}
    row["parameters"] = sum(x.size for x in jax.tree.leaves(host["params"]))
    note("jax.jit")
    row.update(_under_jit(train_step, host, batch, runs=not tiny))
    note("oracle")
    row["oracle_losses"] = _oracle(loss, host, batch, _TINY_SLICES if tiny else _SLICES[case])
    budget = 0.75 * row["jit_bytes"] if tiny else None
    options = autopar.ShardingOptions(memory_budget_bytes=budget)
    step = autopar.parallelize(train_step, method=autopar.AutoParallel(options=options))
    note("autopar")
    first = time.perf_counter()
    mine, value = step(jax.tree.map(jnp.asarray, host), batch)
    losses = [float(value)]
    row["first_call_s"] = time.perf_counter() - first
    note("steps")
    for _ in range(2):
        start = time.perf_counter()
        mine, value = step(mine, batch)
        losses.append(float(value))
        row["step_s"] = time.perf_counter() - start
    plan = step.last_executable.plan
    found = plan.memory_found
    stats = device.memory_stats() or {}
    row.update(
        losses=losses,
        same_losses=bool(np.allclose(losses, row["oracle_losses"], rtol=2e-3)),
        micro_batches=plan.num_micro_batches,
        recomputed=len(plan.remat),
        host_bytes=0.0 if plan.host is None else plan.host.num_bytes,
        predicted_step_s=plan.estimated_step_s,
        predicted_bytes=plan.estimated_peak_bytes,
        xla_bytes=found.peak_bytes,
        limit_bytes=found.limit_bytes,
        replanned=list(found.replanned),
        device_peak_bytes=stats.get("peak_bytes_in_use"),
        device_limit_bytes=stats.get("bytes_limit"),
    )
    return row


def in_a_process(case: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    """The row of a case, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.out_of_memory", "--case", case, "--here"]
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", **os.environ}
    try:
        done = subprocess.run(
            [*command, *(["--tiny"] if tiny else [])],
            env=env,
            timeout=limit_s,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired as late:
        written = late.stderr or b""
        notes = written if isinstance(written, str) else written.decode(errors="replace")
        return {"case": case, "error": f"not done after {limit_s:g} s", "log": notes[-2500:]}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"case": case, "error": done.stderr[-2500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models and a budget")
    parser.add_argument("--case", choices=CASES, nargs="+", default=CASES)
    parser.add_argument("--limit-s", type=float, default=115, help="seconds for each case")
    parser.add_argument("--out", type=Path, help="file for the rows; other cases in it stay")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(run(arguments.case[0], arguments.tiny)), flush=True)
        return
    out = arguments.out
    known = json.loads(out.read_text()) if out is not None and out.exists() else []
    rows = {row["case"]: row for row in known}
    for case in arguments.case:
        rows[case] = in_a_process(case, arguments.tiny, arguments.limit_s)
        print(json.dumps(rows[case]), flush=True)
        if out is not None:
            ordered = [rows[one] for one in CASES if one in rows]
            out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
