"""Programs on their way to workers: from a `LoweredProgram` to bytes, and from bytes to compiled.

Driver and workers have the same version of JAX, which is checked when workers start.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import NamedSharding

from autopar import _jax
from autopar.errors import ClusterError, CompileError
from autopar.ir.remote import LoweredProgram, ProgramSpec, ShardedType
from autopar.ir.spec import to_partition_spec
from autopar.ir.xla_options import compiler_options

_EXPORT_PLATFORM = {"cpu": "cpu", "gpu": "cuda"}
# JAX's errors for callbacks and other operators that it cannot lower for absent devices.
_NEEDS_DEVICES = ("require devices to be present", "different from the lowering platform")


class CallsBackError(CompileError):
    """A program that calls back into its Python process cannot run in another one."""


def sharding_of(type_: ShardedType, devices: list[Any] | None = None) -> NamedSharding:
    """Its sharding on the devices of its mesh; without them, on an abstract mesh."""
    if devices is None:
        mesh = _jax.abstract_mesh(type_.mesh_shape, type_.axis_names)
    else:
        grid = np.array([devices[place] for place in type_.grid], dtype=object)
        mesh = _jax.fresh_mesh(grid.reshape(type_.mesh_shape), type_.axis_names)
    spec = to_partition_spec(type_.layout, len(type_.shape), type_.axis_names)
    return NamedSharding(mesh, spec)


def struct_of(type_: ShardedType, devices: list[Any] | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, sharding=sharding_of(type_, devices))


_known_exports: weakref.WeakKeyDictionary[LoweredProgram, dict[tuple[str, str], bytes]] = (
    weakref.WeakKeyDictionary()
)


def export_stage_program(step_name: str, stage_program: LoweredProgram, platform: str) -> bytes:
    """The stage program as bytes, shardings included. It is exported once while it lives: workers
    of a restarted cluster get the same bytes, and JAX keeps what it has lowered for long."""
    known = _known_exports.setdefault(stage_program, {})
    if (step_name, platform) not in known:
        known[step_name, platform] = _as_bytes(step_name, stage_program, platform)
    return known[step_name, platform]


def _as_bytes(step_name: str, stage_program: LoweredProgram, platform: str) -> bytes:
    try:
        return bytes(exported_stage_program(step_name, stage_program, platform).serialize())
    except ImportError as error:
        raise ClusterError(
            "programs cannot be sent to workers, because the package flatbuffers is not installed. "
            "Install it with: pip install 'autopar[ray]'."
        ) from error


def exported_stage_program(
    step_name: str, stage_program: LoweredProgram, platform: str, function_name: str = ""
) -> export.Exported:
    """The stage program, lowered for devices that need not be here. Its module is named after the
    step and the stage program, unless `function_name` is given."""

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(stage_program.function(*values))

    run.__name__ = run.__qualname__ = function_name or f"{step_name}_{stage_program.name}"
    reads, writes = (
        list(map(struct_of, stage_program.reads)),
        list(map(struct_of, stage_program.writes)),
    )
    jitted = jax.jit(
        run,
        in_shardings=tuple(read.sharding for read in reads),
        out_shardings=tuple(write.sharding for write in writes),
        keep_unused=True,
    )
    return _exported(
        jitted, reads, _EXPORT_PLATFORM[platform], f"{stage_program.name} of {step_name}"
    )


def _exported(
    jitted: Any, reads: list[jax.ShapeDtypeStruct], platform: str, name: str
) -> export.Exported:
    """Allows all custom calls, since workers have the same version of JAX."""
    known: set[str] = set()
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(target) for target in sorted(known)]
        try:
            with _jax.kernels_without_devices():
                exported = export.export(jitted, platforms=[platform], disabled_checks=checks)
                result = exported(*reads)
                _jax.forget_pruned(jitted.trace(*reads).jaxpr)
                return result
        except ValueError as error:
            targets = set(re.findall(r'call_target_name = "([^"]+)"', str(error)))
            targets |= set(re.findall(r"stablehlo.custom_call @([\w.$-]+)", str(error)))
            if any(words in str(error) for words in _NEEDS_DEVICES):
                needing = _jax.primitives_that_need_devices(jitted.trace(*reads).jaxpr.jaxpr)
                if needing and not any("callback" in primitive for primitive in needing):
                    raise _partitions_itself(name, needing) from error
                raise _calls_back(name) from error
            if any("callback" in target for target in targets):
                raise _calls_back(name) from error
            if not targets - known:
                raise
            known |= targets
        except NotImplementedError as error:
            if "callback" not in str(error):
                raise
            raise _calls_back(name) from error


def _calls_back(name: str) -> CallsBackError:
    return CallsBackError(
        f"{name} calls back into Python (jax.debug.print, jax.pure_callback or "
        "jax.experimental.io_callback), which a worker process cannot do. Take the call out of the "
        "step, or run with autopar.init(cluster='local')."
    )


def _partitions_itself(name: str, primitives: set[str]) -> CallsBackError:
    return CallsBackError(
        f"{name} has operators that decide in Python how they are split, which JAX lowers only "
        f"where their devices are: {', '.join(sorted(primitives))}. Use operators without "
        "custom_partitioning, or run with autopar.init(cluster='local')."
    )


def compile_stage_program(
    name: str, spec: ProgramSpec, program: bytes, devices: list[Any]
) -> jax.stages.Compiled:
    """Compile a program for the devices of its mesh, including those of other processes."""
    exported = export.deserialize(bytearray(program))
    reads = [struct_of(type_, devices) for type_ in spec.reads]
    writes = [sharding_of(type_, devices) for type_ in spec.writes]

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(exported.call(*values))

    run.__name__ = run.__qualname__ = name
    jitted = jax.jit(
        run,
        in_shardings=tuple(read.sharding for read in reads),
        out_shardings=tuple(writes),
        donate_argnums=spec.donated,
        keep_unused=True,
    )
    try:
        return _jax.lowered(jitted, *reads).compile(compiler_options(spec.xla_options))
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(f"XLA could not compile {name}: {error}") from error
