from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from autopar import ClusterSpec, ManualParallel
from autopar.compiler import plan_step
from autopar.errors import CompileError
from autopar.ir.remote import LoweredProgram, ProgramSpec, ShardedType
from autopar.lower.lower_step import AbstractDevices
from autopar.lower.remote_step import lower_for_workers
from autopar.runtime.remote.exporting import compile_stage_program, export_stage_program

HELD = ShardedType((8, 4), np.dtype(np.float32), (2, 2), ("x", "y"), (0, 1), (0, 1, 2, 3))
WHOLE = ShardedType((8, 4), np.dtype(np.float32), (2, 2), ("x", "y"), (-1, -1), (0, 1, 2, 3))


def stage_program_of(function: Any, **options: Any) -> LoweredProgram:
    return LoweredProgram("step", 0, function, (HELD,), (HELD,), (), **options)


def test_what_is_exported_on_no_devices_runs_on_devices() -> None:
    stage_program = LoweredProgram("step", 0, lambda x: [2 * x, x], (HELD,), (HELD, WHOLE), (0,))
    program = export_stage_program("train", stage_program, "cpu")
    spec = ProgramSpec("step", 0, stage_program.reads, stage_program.writes, stage_program.donated)
    compiled = compile_stage_program("train_step", spec, program, jax.devices()[:4])
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    doubled, same = compiled(jax.device_put(x, compiled.input_shardings[0][0]))
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(same, x)
    assert {s.data.shape for s in doubled.addressable_shards} == {(4, 2)}
    assert {s.data.shape for s in same.addressable_shards} == {(8, 4)}


def test_a_stage_program_is_exported_once_while_it_lives() -> None:
    traced = []

    def function(x: Any) -> list[Any]:
        traced.append(x)
        return [2 * x]

    stage_program = stage_program_of(function)
    first = export_stage_program("train", stage_program, "cpu")
    assert export_stage_program("train", stage_program, "cpu") is first
    assert len(traced) == 1
    assert export_stage_program("other", stage_program, "cpu") != first


def test_options_of_xla_reach_the_workers_compiler() -> None:
    stage_program = stage_program_of(lambda x: [2 * x])
    program = export_stage_program("train", stage_program, "cpu")

    def compiled(*options: tuple[str, str]) -> Any:
        spec = ProgramSpec("step", 0, stage_program.reads, stage_program.writes, (), options)
        return compile_stage_program("train_step", spec, program, jax.devices()[:4])

    assert compiled(("xla_llvm_disable_expensive_passes", "true")) is not None
    with pytest.raises(CompileError, match="xla_no_such_option"):
        compiled(("xla_no_such_option", "true"))


def test_custom_calls_without_guarantees_are_let_through() -> None:
    def function(x: Any) -> list[Any]:
        first = jax.ffi.ffi_call("one_of_mine", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return [jax.ffi.ffi_call("another", jax.ShapeDtypeStruct(x.shape, x.dtype))(first)]

    program = export_stage_program("train", stage_program_of(function), "cpu")
    text = export.deserialize(bytearray(program)).mlir_module()
    assert "one_of_mine" in text and "another" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x.sum()),
        lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((), jnp.float32), x.sum()),
    ],
)
def test_callbacks_are_refused(call: Any) -> None:
    def function(x: Any) -> list[Any]:
        called = call(x)
        return [x if called is None else x + called]

    with pytest.raises(CompileError, match="step of train calls back into Python"):
        export_stage_program("train", stage_program_of(function), "cpu")


def test_fused_attention_is_lowered_without_devices() -> None:
    """Split over heads and batch: on each device the kernel is called with its part."""
    params = {name: jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16) for name in "qkv"}
    batch = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16)

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            query, key, value = (
                jnp.einsum("bthd,hde->bthe", batch, params[name]) for name in "qkv"
            )
            out = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
            return out.astype(jnp.float32).sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    planned = plan_step(
        step,
        (params, batch),
        {},
        cluster=ClusterSpec(1, 4, "h100-sxm"),
        method=ManualParallel(
            (2, 2), ("data", "heads"), (P("heads"), P("data", None, "heads")), P("heads")
        ),
    )
    (stage_program,) = lower_for_workers(planned, AbstractDevices(4, "gpu")).stage_programs
    text = export.deserialize(
        bytearray(export_stage_program("train", stage_program, "gpu"))
    ).mlir_module()
    kernels = [line for line in text.splitlines() if "@__cudnn$fmha" in line]
    assert len(kernels) == 2
    assert all("2x128x4x64xbf16" in line for line in kernels)


def test_operators_that_split_themselves_are_refused() -> None:
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def double(x: Any) -> Any:
        return 2 * x

    double.def_partition(
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        partition=lambda mesh, args, result: (mesh, lambda x: 2 * x, result.sharding, ()),
        sharding_rule="i j -> i j",
    )
    with pytest.raises(CompileError, match=r"only where their devices are.*custom_partitioning"):
        export_stage_program("train", stage_program_of(lambda x: [double(x)]), "cpu")
