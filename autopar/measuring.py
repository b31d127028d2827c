"""A planned step, compiled and timed on the devices of this process with made-up inputs.

Arguments are zeros that lie as the plan wants them (made on the devices; random keys are real
ones); state that the step returns goes into its next call, so donated buffers are used as in
training. Running out of memory is a result, not an error. Used by re-ranking, by profiles of
segments and by the benchmarks of accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
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
    """An array of zeros in its place; of random keys, as many keys."""
    if is_extended_dtype(dtype):
        keys = jax.random.split(jax.random.key(0), max(1, _size(shape)))
        return jax.device_put(keys[: _size(shape)].reshape(tuple(shape)), sharding)
    return jax.jit(lambda: jnp.zeros(tuple(shape), dtype), out_shardings=sharding)()


def time_executable(
    executable: Any, *, state: Sequence[tuple[int, int]] = (), limit_s: float = 5.0, **how: Any
) -> StepTiming:
    """`executable`: as `api.make_executable` gives it. `state`: (input, output) of what a call
    hands to the next."""
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


def _size(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
