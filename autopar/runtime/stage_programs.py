"""From stage programs of a pipelined step to compiled programs for the meshes of their stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from autopar import _jax
from autopar.errors import CompileError
from autopar.ir.pipeline import StageProgram
from autopar.progress import Progress, logged

# (stage, value) -> type and sharding; for a value of each micro-batch, of one micro-batch.
Buffers = Mapping[tuple[int, int], jax.ShapeDtypeStruct]

_ROW_BYTES = 2**20  # a dimension of more than 2**31 is more than JAX likes


def compile_stage_programs(
    step_name: str,
    names: Sequence[str],
    lowered: Sequence[jax.stages.Lowered],
    xla_options: dict[str, Any] | None = None,
) -> list[jax.stages.Compiled]:
    """Compiles several at a time."""
    what = f"compiling {step_name}"
    with (
        Progress(what, len(names)) as progress,
        logged(what),
        ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads,
    ):

        def compile_one(name: str, program: jax.stages.Lowered) -> jax.stages.Compiled:
            try:
                compiled = program.compile(xla_options)
            except jax.errors.JaxRuntimeError as error:
                raise CompileError(
                    f"XLA could not compile {name} of {step_name}: {error}"
                ) from error
            progress.step()
            return compiled

        return list(threads.map(compile_one, names, lowered))


def lower_stage_program(
    name: str,
    stage_program: StageProgram,
    function: Callable[..., Sequence[Any]],
    donated: tuple[int, ...],
    buffers: Buffers,
) -> jax.stages.Lowered:
    """A stage program as XLA receives it, under the given name."""

    def run(*values: Any) -> list[Any]:
        return list(function(*values))

    run.__name__ = run.__qualname__ = name
    reads = [buffers[stage_program.stage, ref.value] for ref in stage_program.reads]
    writes = [buffers[stage_program.stage, ref.value] for ref in stage_program.writes]
    jitted = jax.jit(
        run,
        in_shardings=[buffer.sharding for buffer in reads],
        out_shardings=[buffer.sharding for buffer in writes],
        donate_argnums=donated,
        keep_unused=True,
    )
    with warnings.catch_warnings():
        # Donating a buffer frees it, even if no result can reuse it.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = _jax.lowered(jitted, *reads)
    made = [(info.shape, info.dtype) for info in lowered.out_info]
    wanted = [(buffer.shape, buffer.dtype) for buffer in writes]
    assert made == wanted, f"{name} gives {made}, not {wanted}"
    return lowered


def program_bytes(program: jax.stages.Compiled) -> int:
    """XLA's peak bytes per device: arguments, results and temporaries, donated buffers once."""
    stats = program.memory_analysis()
    assert stats is not None
    return int(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def bytes_beside_arguments(program: jax.stages.Compiled) -> tuple[int, int]:
    """What a run of the program allocates on a device: (temporaries, new results)."""
    stats = program.memory_analysis()
    assert stats is not None
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.temp_size_in_bytes), int(max(0, results))


def occupy(sizes: Sequence[int], devices: Sequence[Any]) -> None:
    """Allocate so many bytes on every device, all at once, and free them. Raises JAX's error if
    there is not enough memory."""
    held = [
        jnp.zeros((-(-size // _ROW_BYTES), _ROW_BYTES), jnp.uint8, device=device)
        for size in sizes
        if size
        for device in devices
    ]
    jax.block_until_ready(held)
    for array in held:
        array.delete()
