"""A compiled step on the devices of this process.

The program takes the flat array leaves, so a warm call is: flatten, look up, JAX's own dispatch,
unflatten. It is compiled once, for arguments that lie as planned, and called as it is: `jax.jit`
would compile it again for arguments from the host, since an array's type tells the mesh it is on.
JAX checks types and shardings of the arguments itself; only when it finds them other than planned
does the slow path run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar import _jax
from autopar.errors import CompileError
from autopar.ir.plan import ParallelPlan
from autopar.progress import Progress, logged
from autopar.runtime import recording
from autopar.runtime.arguments import (
    SignatureChanged,
    has_types,
    place_some,
    put,
    weak_types,
    with_own_buffers,
)
from autopar.runtime.debug import Describe, describe_nothing, dump, program_files
from autopar.runtime.hlo import CollectiveOp, read_collectives
from autopar.runtime.threads import must_run_alone, run_alone
from autopar.runtime.timestamps import StepDescription


class LocalExecutable:
    """What `step.last_executable` gives: the compiled program and ways to look into it."""

    def __init__(
        self,
        plan: ParallelPlan,
        flat_fn: Callable[..., list[Any]],
        avals: Sequence[Any],
        donated: Sequence[int],
        mesh: Mesh,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.avals = tuple(avals)
        self.input_shardings = [NamedSharding(mesh, plan.spec_of(t)) for t in plan.inputs]
        self.output_shardings = [NamedSharding(mesh, plan.spec_of(t)) for t in plan.outputs]
        self._weak_types = [aval.weak_type for aval in self.avals]
        self._donated = frozenset(donated)
        self._devices = list(mesh.devices.flat)
        self._runs_alone = must_run_alone(mesh)
        self._spans_processes = not self.input_shardings[0].is_fully_addressable

        types = [(a.shape, a.dtype) for a in self.avals]

        def step(*leaves: Any) -> list[Any]:
            if [(leaf.shape, leaf.dtype) for leaf in leaves] != types:
                raise SignatureChanged
            return flat_fn(*leaves)

        step.__name__ = step.__qualname__ = plan.name
        self.jitted = jax.jit(
            step,
            in_shardings=self.input_shardings,
            out_shardings=self.output_shardings,
            donate_argnums=tuple(donated),
            keep_unused=True,
        )
        self._compiled: Any = None
        self.describe: Describe = describe_nothing
        self._described: StepDescription | None = None

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        recorder = recording.current
        if recorder is None or _jax.is_tracing():
            return self.run(leaves)
        if self._described is None:
            self._described = recording.whole_step(self.plan, [self.plan.name], [0])
        self.compiled  # noqa: B018  # which is no part of the step
        began_s = recording.clock()
        results = self.run(leaves)
        recorder.whole(recorder.begin(self._described), 0, 0, began_s, results)
        return results

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        if weak_types(leaves) != self._weak_types:
            raise SignatureChanged
        if _jax.is_tracing():  # a step inside of another program
            return self.jitted(*leaves)
        leaves = with_own_buffers(leaves, self._donated)
        if self._spans_processes:
            # All processes must do the same, so that what to do is not left to an error.
            if not has_types(leaves, self.avals):
                raise SignatureChanged
            return self._run(self.place(leaves))
        try:
            return self._run(leaves)
        except ValueError:
            # An argument committed to another place: move it as planned, then try once more.
            # Whatever else was wrong is raised again by the second call.
            return self._run(self.place(leaves))
        except TypeError as error:
            raise SignatureChanged from error

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        if self._runs_alone:
            return run_alone(self.compiled, leaves, self._devices)
        return self.compiled(*leaves)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put host or device arrays where the plan wants them."""
        return put(leaves, self.input_shardings)

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Put some arguments, by position, where the plan wants them. Their owner may change them
        afterwards."""
        return place_some(leaves, self.input_shardings)

    def _arguments(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
            for a, s in zip(self.avals, self.input_shardings, strict=True)
        ]

    @property
    def compiled(self) -> jax.stages.Compiled:
        if self._compiled is None:
            what = f"compiling {self.plan.name}"
            try:
                with Progress(what), logged(what):
                    self._compiled = self.jitted.lower(*self._arguments()).compile()
            except jax.errors.JaxRuntimeError as error:
                raise CompileError(
                    f"XLA could not compile {self.plan.name} for the mesh "
                    f"{self.plan.mesh_shape}: {error}"
                ) from error
        return self._compiled

    def hlo_text(self) -> str:
        """XLA's optimized HLO."""
        text = self.compiled.as_text()
        assert text is not None
        return text

    def collectives(self) -> tuple[CollectiveOp, ...]:
        """Every collective XLA will run, with bytes and group sizes."""
        return read_collectives(self.hlo_text())

    def memory_bytes(self) -> int:
        """XLA's own figure of peak bytes per device: arguments, outputs and temporaries, with
        donated buffers counted once."""
        stats = self.compiled.memory_analysis()
        assert stats is not None
        return int(
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )

    def dump_debug_info(self, directory: str | Path) -> None:
        """Write plan, programs, placement, strategies, the solver's problem and figures into a
        folder; its README.txt says what each file is."""
        dump(self, directory, program_files("step", self.annotated_text, self.hlo_text))

    def annotated_text(self) -> str:
        """The program as XLA gets it: StableHLO with shardings."""
        return self.jitted.lower(*self._arguments()).as_text()
