"""A planned step, compiled and timed on the devices of this process with made-up inputs.

Arguments are made on the devices as the plan wants them, of scattered small values: zeros draw less
power, so that a GPU would run faster than in training, and equal row numbers would make gradients
of embeddings wait for each other. State that the step returns goes into its next call, so donated
buffers are used as in training. Running out of memory is a result, not an error. Used by
re-ranking, by profiles of segments and by the benchmarks of accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from autopar._jax import is_extended_dtype
from autopar.errors import CompileError
from autopar.ir.profile import Timing
from autopar.runtime.timing import time_calls


@dataclass(frozen=True)
class StepTiming:
    """What running a step showed. `step` is None if it did not fit into memory; then `failure`
    says how. `memory_bytes`: XLA's own figure of the peak on one device, 0 if not known."""

    step: Timing | None
    compile_s: float
    memory_bytes: float = 0.0
    failure: str = ""


def made_up(shape: Sequence[int], dtype: Any, sharding: Any) -> jax.Array:
    """An array of scattered values in its place: floats from 0 to 0.02 (second moments of an
    optimizer are not negative), whole numbers below 97, random keys."""
    return _maker(tuple(shape), dtype, sharding)()


@lru_cache(maxsize=1024)
def _maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    if is_extended_dtype(dtype):
        keys = jax.random.split(jax.random.key(0), max(1, prod(shape)))
        return lambda: jax.device_put(keys[: prod(shape)].reshape(shape), sharding)

    def make() -> jax.Array:
        numbers = jnp.arange(prod(shape), dtype=jnp.uint32) * jnp.uint32(2654435761) >> 8
        if jnp.issubdtype(dtype, jnp.inexact):
            values = (numbers % 65536).astype(jnp.float32) * (0.02 / 65536)
        else:
            values = numbers % (2 if dtype == jnp.bool_ else 97)
        return values.astype(dtype).reshape(shape)

    return jax.jit(make, out_shardings=sharding)


def time_executable(
    executable: Any, *, state: Sequence[tuple[int, int]] = (), limit_s: float = 5.0, **how: Any
) -> StepTiming:
    """`executable`: as `executables.make_executable` gives it. `state`: (input, output) of what a
    call hands to the next."""
    started = time.perf_counter()
    try:
        memory = float(executable.memory_bytes())  # compiles
        compile_s = time.perf_counter() - started
        leaves = [
            made_up(aval.shape, aval.dtype, sharding)
            for aval, sharding in zip(executable.avals, executable.input_shardings, strict=True)
        ]
    except (CompileError, jax.errors.JaxRuntimeError) as error:
        return StepTiming(None, time.perf_counter() - started, 0.0, _memory_failure(error))

    def call() -> Any:
        results = executable(leaves)
        for i, o in state:
            leaves[i] = results[o]
        return results

    try:
        return StepTiming(time_calls(call, limit_s=limit_s, **how), compile_s, memory)
    except jax.errors.JaxRuntimeError as error:
        return StepTiming(None, compile_s, memory, _memory_failure(error))
    finally:
        leaves.clear()


def _memory_failure(error: Exception) -> str:
    """The first line of an error that is about memory; any other is raised again."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return text.splitlines()[0]
    raise error
