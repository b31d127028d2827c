"""Stage programs of a pipelined step, compiled ahead for the meshes of their stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from autopar.errors import CompileError
from autopar.ir.pipeline import Pipeline, StageProgram, stage_program_names
from autopar.progress import Progress, logged

# Type and sharding of (stage, value); for values of a micro-batch, those of one micro-batch.
Buffers = Mapping[tuple[int, int], jax.ShapeDtypeStruct]


def compile_stage_programs(
    step_name: str,
    pipeline: Pipeline,
    functions: Sequence[Callable[..., Sequence[Any]]],
    donated: Sequence[tuple[int, ...]],
    buffers: Buffers,
) -> list[jax.stages.Compiled]:
    """The program of every stage program, from its reads to its writes. XLA works on several at a
    time."""
    names = stage_program_names(pipeline)
    lowered = lower_stage_programs(step_name, pipeline, functions, donated, buffers)

    def compile_one(name: str, one: jax.stages.Lowered) -> jax.stages.Compiled:
        try:
            return one.compile()
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"XLA could not compile {name} of {step_name}: {error}") from error

    what = f"compiling {step_name}"
    with (
        Progress(what, len(names)) as progress,
        logged(what),
        ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads,
    ):

        def compile_and_count(name: str, one: jax.stages.Lowered) -> jax.stages.Compiled:
            compiled = compile_one(name, one)
            progress.step()
            return compiled

        return list(threads.map(compile_and_count, names, lowered))


def lower_stage_programs(
    step_name: str,
    pipeline: Pipeline,
    functions: Sequence[Callable[..., Sequence[Any]]],
    donated: Sequence[tuple[int, ...]],
    buffers: Buffers,
) -> list[jax.stages.Lowered]:
    """The program of every stage program as XLA gets it."""
    names = stage_program_names(pipeline)
    with warnings.catch_warnings():
        # A buffer that a stage program may use up is freed by that, even if no result can lie in
        # it.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return [
            _lower(f"{step_name}_{name}", stage_program, flat_fn, used_up, buffers)
            for name, stage_program, flat_fn, used_up in zip(
                names, pipeline.stage_programs, functions, donated, strict=True
            )
        ]


def _lower(
    name: str,
    stage_program: StageProgram,
    flat_fn: Callable[..., Sequence[Any]],
    donated: tuple[int, ...],
    buffers: Buffers,
) -> jax.stages.Lowered:
    def run(*values: Any) -> list[Any]:
        return list(flat_fn(*values))

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
    lowered = jitted.lower(*reads)
    made = [(info.shape, info.dtype) for info in lowered.out_info]
    wanted = [(buffer.shape, buffer.dtype) for buffer in writes]
    assert made == wanted, f"{name} gives {made}, not {wanted}"
    return lowered


def program_bytes(program: jax.stages.Compiled) -> int:
    """XLA's figure: arguments, results and temporaries, donated buffers counted once."""
    stats = program.memory_analysis()
    assert stats is not None
    return int(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )
