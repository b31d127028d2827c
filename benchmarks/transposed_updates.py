"""Adam's update with gradients as they are and transposed, on a GPU.

    python -m benchmarks.transposed_updates

A gradient that is scattered along another dimension than the first of its state arrives transposed
(`autopar/cost/reshard.py`). Several updates run in one program, so that launches are hidden.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

SHAPES = ((4096, 128), (1024, 512), (4096, 512), (8192, 1024), (2048, 8192), (8192, 8192))
DTYPES = ("bfloat16", "float32")
ROUNDS, ROUND_S = 4, 0.05


def main() -> None:
    print(f"{'state':>14s} {'gradient':>9s} {'as it is':>20s} {'transposed':>20s}  ratio")
    for shape in SHAPES:
        for dtype in DTYPES:
            plain_s, turned_s = (update_s(shape, dtype, turned) for turned in (False, True))
            moved = shape[0] * shape[1] * (24 + jnp.dtype(dtype).itemsize)
            cells = [f"{1e6 * s:7.1f} µs {moved / s / 1e9:5.0f} GB/s" for s in (plain_s, turned_s)]
            print(
                f"{shape[0]:>7d}×{shape[1]:<6d} {dtype:>9s} {cells[0]:>20s} {cells[1]:>20s}  "
                f"{turned_s / plain_s:.2f}",
                flush=True,
            )


def update_s(shape: tuple[int, int], dtype: str, turned: bool) -> float:
    """Seconds of one update; the least of some rounds."""
    num = 8 if shape[0] * shape[1] < 2**24 else 3
    gradients = [jnp.full(shape[::-1] if turned else shape, i + 1, dtype) for i in range(num)]
    state = [[jnp.full(shape, i + 1, jnp.float32) for i in range(num)] for _ in range(3)]

    def step(state: Any, gradients: Any) -> Any:
        return updated(state, [g.T for g in gradients] if turned else gradients)

    compiled = jax.jit(step, donate_argnums=0).lower(state, gradients).compile()

    def run(num_steps: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(num_steps):
            state = compiled(state, gradients)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / num_steps

    run(3)
    num_steps = max(5, int(ROUND_S / run(20)))
    return min(run(num_steps) for _ in range(ROUNDS)) / num


def updated(state: Sequence[Sequence[jax.Array]], gradients: Sequence[jax.Array]) -> Any:
    """[parameters, first moments, second moments] after Adam's step."""
    found = []
    for weight, first, second, gradient in zip(*state, gradients, strict=True):
        gradient = gradient.astype(jnp.float32)
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        found.append((weight - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second))
    return [list(arrays) for arrays in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
