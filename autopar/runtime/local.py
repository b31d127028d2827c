"""A compiled step on one mesh of this process: from an annotated function to `LocalExecutable`.

The program takes flat array leaves, so a warm call is: flatten, look up, JAX's own dispatch,
unflatten. It is compiled once, for arguments placed as planned, and called directly: `jax.jit`
would compile again for arguments from the host, because an array's type includes its mesh. JAX
itself checks the types and shardings of the arguments; only when it rejects them does the slow path
run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar import _jax
from autopar.errors import AutoparError, CompileError
from autopar.ir.host_memory import HostMemory
from autopar.ir.host_programs import HOST_KIND
from autopar.ir.pipeline import MeshProgram, PipelinePrograms, Run
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.xla_options import compiler_options
from autopar.progress import Progress, logged
from autopar.runtime.arguments import (
    SignatureChanged,
    has_types,
    place_some,
    put,
    weak_types,
    without_aliases,
)
from autopar.runtime.executable import Executable, FlatFunction
from autopar.runtime.ranks.failures import failure_watch
from autopar.runtime.recording import Recorder, clock
from autopar.runtime.stacks import StackedArray
from autopar.runtime.stage_programs import bytes_beside_arguments, occupy, program_bytes
from autopar.runtime.threads import must_run_alone, run_alone
from autopar.runtime.timestamps import ProgramLabel, StepDescription


class LocalExecutable(Executable):
    """One program on one mesh, compiled when it is first needed."""

    def __init__(
        self,
        plan: ParallelPlan,
        flat_fn: FlatFunction,
        avals: Sequence[Any],
        donated: Sequence[int],
        mesh: Mesh,
    ) -> None:
        self.mesh = mesh
        host = plan.host or HostMemory()
        self.input_shardings = _shardings(plan, plan.inputs, host.inputs, mesh)
        self.output_shardings = _shardings(plan, plan.outputs, host.outputs, mesh)
        self._weak_types = [aval.weak_type for aval in avals]
        self._donated = frozenset(donated)
        self._devices = list(mesh.devices.flat)
        self._runs_alone = must_run_alone(mesh)
        self._spans_processes = not self.input_shardings[0].is_fully_addressable

        types = [(a.shape, a.dtype) for a in avals]

        def step(*leaves: Any) -> Sequence[Any]:
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
        sizes = [prod(tensor.shape) for tensor in plan.outputs]
        self._smallest = min(range(len(sizes)), key=sizes.__getitem__, default=0)
        super().__init__(plan, ["step"], avals, self.jitted)

    def _check_types(self, leaves: Sequence[Any]) -> None:
        """JAX checks the rest."""
        if weak_types(leaves) != self._weak_types:
            raise SignatureChanged

    def _run(self, leaves: Sequence[Any], recorder: Recorder | None) -> list[Any]:
        if recorder is None:
            return self._run_placed(leaves)
        self.compiled  # noqa: B018  # not part of the step
        began_s = clock()
        results = self._run_placed(leaves)
        log = recorder.begin(self.description).logs[0]
        log.began(0, began_s)
        if results:
            smallest = min(results, key=lambda array: array.size)
            log.ends_with(0, [smallest], may_vanish=True)
        else:
            log.ended(0, clock())
        return results

    def _make_description(self) -> StepDescription:
        programs = PipelinePrograms((MeshProgram((Run(0, None, (), ()),), (), (), 0),), ((),))
        return StepDescription(self.plan, programs, (ProgramLabel(self.plan.name, 0),))

    def _run_placed(self, leaves: Sequence[Any]) -> list[Any]:
        leaves = without_aliases(leaves, self._donated)
        if self._spans_processes:
            # All processes must take the same path, so it must not depend on a local error.
            if not has_types(leaves, self.avals):
                raise SignatureChanged
            return failure_watch().run(
                self.plan.name, lambda: self._dispatch(self.place(leaves)), self._smallest
            )
        self.compiled  # noqa: B018  # a failure to compile is no objection to the arguments
        try:
            return self._dispatch(leaves)
        except ValueError:
            # An argument is committed to another place: move it as planned, then try once more.
            # The second call raises whatever else was wrong.
            return self._dispatch(self.place(leaves))
        except TypeError as error:
            if any(isinstance(leaf, StackedArray) for leaf in leaves):
                return self._dispatch(self.place(leaves))
            raise SignatureChanged from error

    def _dispatch(self, leaves: Sequence[Any]) -> list[Any]:
        if self._runs_alone:
            return run_alone(self.compiled, leaves, self._devices)
        return self.compiled(*leaves)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return put(leaves, self.input_shardings)

    def place_with_room(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments where the plan wants them, beside which every device of this process had room
        for all that a run makes; else JAX's error that memory is short. Nothing runs: processes
        that run a step together can so agree whether to begin."""
        placed = self.place(leaves)
        mine = [d for d in self._devices if d.process_index == jax.process_index()]
        occupy(bytes_beside_arguments(self.compiled), mine)
        return placed

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        return place_some(leaves, self.input_shardings)

    # -- compiling

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        what = f"compiling {self.plan.name}"
        try:
            with Progress(what), logged(what):
                return self._lower_step().compile(compiler_options(self.plan.xla_options))
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(
                f"XLA could not compile {self.plan.name} for the mesh "
                f"{self.plan.mesh_shape}: {error}"
            ) from error

    def _lower_step(self) -> jax.stages.Lowered:
        try:
            return self._lower()
        except AutoparError:
            raise
        except (TypeError, ValueError, NotImplementedError) as error:
            raise CompileError(
                f"JAX could not lower {self.plan.name} for the mesh {self.plan.mesh_shape}: "
                f"{error}\nIf jax.jit compiles the function, this is a fault of autopar: please "
                "report it."
            ) from error

    def _lower(self) -> jax.stages.Lowered:
        arguments = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
            for a, s in zip(self.avals, self.input_shardings, strict=True)
        ]
        return _jax.lowered(self.jitted, *arguments)

    # -- inspection

    def hlo_text(self) -> str:
        """XLA's optimized HLO."""
        return self.compiled.as_text() or ""

    def hlo_texts(self) -> dict[str, str]:
        return {"step": self.hlo_text()}

    def annotated_text(self, name: str = "step") -> str:
        """The program as XLA receives it: StableHLO with shardings."""
        return self._lower().as_text()

    def mesh_memory_bytes(self) -> tuple[int]:
        return (program_bytes(self.compiled),)


def _shardings(
    plan: ParallelPlan, tensors: Sequence[Tensor], on_host: Collection[int], mesh: Mesh
) -> list[NamedSharding]:
    kinds = [HOST_KIND if index in on_host else None for index in range(len(tensors))]
    return [
        NamedSharding(mesh, plan.spec_of(tensor), memory_kind=kind)
        for tensor, kind in zip(tensors, kinds, strict=True)
    ]
