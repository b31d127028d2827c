"""A planned step, compiled and timed on the devices of this process with made-up inputs.

Arguments are created on the devices, in the plan's layouts, with scattered small values: on zeros a
GPU draws less power and runs faster than in training, and equal indices would serialize gradients
of embeddings. State that the step returns goes into its next call, so donated buffers are used as
in training. Running out of memory is a result, not an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar._jax import is_extended_dtype
from autopar.errors import CompileError
from autopar.ir.profile import Timing
from autopar.runtime.timing import time_calls


@dataclass(frozen=True)
class StepTiming:
    """The timing of a step. `step` is None if it ran out of memory, as `failure` says.
    `memory_bytes`: the peak per device according to XLA, 0 if unknown."""

    step: Timing | None
    compile_s: float
    memory_bytes: float = 0.0
    failure: str = ""


def synthetic_array(shape: Sequence[int], dtype: Any, sharding: Any) -> jax.Array:
    """An array of scattered values: floats from 0 to 0.02 (second moments of an optimizer are not
    negative), integers below 97, or random keys."""
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


class TimedExecutable(Protocol):
    """What can be timed: an `Executable` of this process, or the program of a segment."""

    @property
    def avals(self) -> Sequence[Any]: ...

    @property
    def input_shardings(self) -> Sequence[Any]: ...

    def memory_bytes(self) -> int: ...

    def __call__(self, leaves: Sequence[Any]) -> Any: ...


def time_executable(
    executable: TimedExecutable,
    *,
    state: Sequence[tuple[int, int]] = (),
    limit_s: float = 5.0,
) -> StepTiming:
    """`state`: (input, output) pairs that a call passes on to the next."""
    started = time.perf_counter()
    try:
        memory = float(executable.memory_bytes())  # compiles
        compile_s = time.perf_counter() - started
        leaves = [
            synthetic_array(aval.shape, aval.dtype, sharding)
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
        return StepTiming(time_calls(call, limit_s=limit_s), compile_s, memory)
    except jax.errors.JaxRuntimeError as error:
        return StepTiming(None, compile_s, memory, _memory_failure(error))
    finally:
        leaves.clear()


def _memory_failure(error: Exception) -> str:
    """The first line of an out-of-memory error; any other is raised again."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return text.splitlines()[0]
    raise error
