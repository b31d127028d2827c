"""Programs that are timed: from a combination of a segment, or a resharding, to a `Runnable`.

A segment's program is its equations, annotated with the combination's layouts as `lower` annotates
a whole step. Its inputs are parameters, optimizer state and what it reads of other segments; its
outputs what others read. State is donated, as in a step. The dispatch, which a step pays once, is
measured by a program of the same arguments that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar import _jax
from autopar.cost.reshard import reshard_table
from autopar.errors import CompileError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import WHOLE, Layout, NodeLayouts, to_partition_spec
from autopar.lower.annotate import annotated_function
from autopar.lower.assign import assign_layouts
from autopar.measure.segments.cut import SegmentPart
from autopar.runtime.threads import must_run_alone, run_alone


class Runnable:
    """A program on a mesh, for `time_step.time_executable`."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Sequence[Any]],
        avals: Sequence[Any],
        input_shardings: Sequence[NamedSharding],
        output_shardings: Sequence[NamedSharding],
        donated: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.avals = tuple(avals)
        self.input_shardings = tuple(input_shardings)
        mesh = input_shardings[0].mesh
        assert isinstance(mesh, Mesh)
        self._devices = list(mesh.devices.flat)
        self._runs_alone = must_run_alone(mesh)

        def run(*values: Any) -> list[Any]:
            return list(function(*values))

        run.__name__ = run.__qualname__ = "segment"
        self._jitted = jax.jit(
            run,
            in_shardings=self.input_shardings,
            out_shardings=list(output_shardings),
            donate_argnums=tuple(donated),
            keep_unused=True,
        )

    @cached_property
    def compiled(self) -> Any:
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(self.avals, self.input_shardings, strict=True)
        ]
        try:
            return _jax.lowered(self._jitted, *arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"XLA could not compile {self.name}: {error}") from error

    def memory_bytes(self) -> int:
        stats = self.compiled.memory_analysis()
        return int(
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self._runs_alone:
            return run_alone(self.compiled, leaves, self._devices)
        return self.compiled(*leaves)


def jax_mesh(mesh: LogicalMesh, devices: Sequence[Any]) -> Mesh:
    grid = np.array(list(devices[: mesh.num_devices]), dtype=object).reshape(mesh.shape)
    return _jax.fresh_mesh(grid, mesh.axis_names)


def segment_program(
    part: SegmentPart, mesh: LogicalMesh, layouts: Sequence[NodeLayouts], on: Mesh
) -> Runnable:
    """The program of a segment with these layouts."""
    sharding = assign_layouts(part.program, part.graph, layouts, mesh)
    avals = [part.program.avals[v] for v in part.program.inputs]
    whole = (WHOLE,) * len(mesh.shape)
    outputs = []
    for value, chain in zip(part.graph.outputs, sharding.outputs, strict=True):
        assert value is not None
        node, result = part.graph.producer[value]
        made = tuple(max(entry, WHOLE) for entry in layouts[node][1][result])
        outputs.append(chain[-1] if chain else made)
    out_avals = [part.program.avals[v] for v in part.program.output_values]
    return Runnable(
        f"{part.name} on {mesh.shape}",
        annotated_function(part.program, sharding, on),
        avals,
        [
            _sharding(on, whole if layout is None else layout, a)
            for a, layout in zip(avals, sharding.inputs, strict=True)
        ],
        [_sharding(on, layout, a) for a, layout in zip(out_avals, outputs, strict=True)],
        [i for i, _ in part.graph.state],
    )


def empty_program(program: Runnable, state: Sequence[tuple[int, int]]) -> Runnable:
    """A program of the same arguments that only passes its state on."""
    kept = [i for i, _ in state] or [0]
    return Runnable(
        f"dispatch of {program.name}",
        lambda *values: [values[i] for i in kept],
        program.avals,
        program.input_shardings,
        [program.input_shardings[i] for i in kept],
        [i for i, _ in state],
    )


def reshard_program(
    mesh: LogicalMesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, on: Mesh
) -> Runnable:
    """The resharding of one array, by the collectives that a plan uses."""
    aval = _jax.array_aval(shape, jax.numpy.dtype(dtype))
    num_bytes = float(aval.size * aval.dtype.itemsize)
    steps = reshard_table(mesh, shape, num_bytes, False).path(source, target)
    shardings = [_sharding(on, layout, aval) for layout in steps]

    def move(value: Any) -> list[Any]:
        for sharding in shardings:
            value = jax.lax.with_sharding_constraint(value, sharding)
        return [value]

    name = f"{dtype}{list(shape)} from {source} to {target}"
    return Runnable(
        name, move, [aval], [_sharding(on, source, aval)], [_sharding(on, target, aval)]
    )


def _sharding(on: Mesh, layout: Layout, aval: Any) -> NamedSharding:
    shape = getattr(aval, "shape", ())
    if not shape or _jax.is_extended_dtype(aval.dtype):
        layout = (WHOLE,) * len(layout)
    return NamedSharding(on, to_partition_spec(layout, len(shape), on.axis_names))


@contextmanager
def compilation_cache_in(folder: Path) -> Iterator[None]:
    """Use a folder as XLA's compilation cache, which several processes may share."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(folder), 0.0, -1), strict=True):
        jax.config.update(name, value)
    _jax.reset_compilation_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        _jax.reset_compilation_cache()
