"""The base of all executables: from a plan and the leaves of a call to the leaves of its results.

LocalExecutable      one program on one mesh of this process        (runtime/local.py)
HostMemoryExecutable one mesh, with state in host memory            (runtime/host_memory.py)
PipelineExecutable   stage programs on meshes of this process       (runtime/pipeline.py)
RemoteExecutable     stage programs on meshes of a cluster          (runtime/remote/executable.py)

The last two follow lists of instructions: they share `InstructionExecutable`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax

from autopar import _jax
from autopar.ir.live import sizes_over_time
from autopar.ir.pipeline import PipelinePrograms, Run
from autopar.ir.plan import ParallelPlan
from autopar.runtime import recording
from autopar.runtime.arguments import SignatureChanged, has_types
from autopar.runtime.debug import DebugFile, write_folder
from autopar.runtime.hlo import CollectiveOp, read_collectives
from autopar.runtime.order import Buffer, interleave, peak_bytes, peak_live_bytes
from autopar.runtime.timestamps import ProgramLabel, StepDescription

FlatFunction = Callable[..., Sequence[Any]]


def describe_nothing(executable: Executable) -> Iterable[DebugFile]:
    return ()


class Executable(ABC):
    """What `step.last_executable` gives: a compiled step, and ways to look into it.

    names:    of its compiled programs.
    avals:    types of the step's arguments.
    whole:    the step as one flat function, for calls inside another traced program.
    describe: makes further files for `dump_debug_info`.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        names: Sequence[str],
        avals: Sequence[Any],
        whole: FlatFunction,
    ) -> None:
        self.plan = plan
        self.names = tuple(names)
        self.avals = tuple(avals)
        self.describe: Callable[[Executable], Iterable[DebugFile]] = describe_nothing
        self._whole = whole

    # -- running

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the step. Raises `SignatureChanged` for arguments of other types."""
        if _jax.is_tracing():
            # JAX would first check that the plan's shardings divide the arguments, of any shape.
            if not has_types(leaves, self.avals):
                raise SignatureChanged
            return list(self._whole(*leaves))
        self._check_types(leaves)
        return self._run(leaves, recording.current)

    def _check_types(self, leaves: Sequence[Any]) -> None:
        if not has_types(leaves, self.avals):
            raise SignatureChanged

    @abstractmethod
    def _run(self, leaves: Sequence[Any], recorder: recording.Recorder | None) -> list[Any]:
        """Run the step on leaves of the right types."""

    @cached_property
    def description(self) -> StepDescription:
        """The step as `autopar.trace` records it."""
        return self._make_description()

    @abstractmethod
    def _make_description(self) -> StepDescription: ...

    @abstractmethod
    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Put some arguments, by position, where the plan wants them. Afterwards the caller may
        change what was given."""

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put all arguments where the plan wants them."""
        placed = self.place_inputs(dict(enumerate(leaves)))
        return [placed[position] for position in range(len(leaves))]

    # -- inspection

    @abstractmethod
    def hlo_texts(self) -> dict[str, str]:
        """XLA's optimized HLO of every program, by name."""

    @abstractmethod
    def annotated_text(self, name: str) -> str:
        """The program of that name as XLA receives it: StableHLO with shardings."""

    @abstractmethod
    def mesh_memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes per device, by mesh."""

    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(self.mesh_memory_bytes())

    def hlo_text(self) -> str:
        """XLA's optimized HLO of every program, each under its name."""
        return "\n\n".join(f"// {name}\n\n{text}" for name, text in self.hlo_texts().items())

    def num_runs(self) -> dict[str, int]:
        """How often a step runs each program."""
        return dict.fromkeys(self.names, 1)

    def collectives(self) -> tuple[CollectiveOp, ...]:
        """Every collective that XLA runs in a step, with bytes and group sizes. Excludes transfers
        between meshes."""
        num_runs = self.num_runs()
        return tuple(
            replace(op, trips=op.trips * num_runs[name])
            for name, text in self.hlo_texts().items()
            if name in num_runs
            for op in read_collectives(text)
        )

    def dump_debug_info(self, directory: str | Path) -> None:
        """Write plan, programs, placement, strategies, the solver's problems, transfers, schedule,
        instructions and costs into a folder; its README.txt explains each file."""
        files = (*self._plan_files(), *self._program_files(), *self.describe(self))
        write_folder(self.plan.name, directory, files)

    def _plan_files(self) -> Iterator[DebugFile]:
        plan = self.plan
        yield DebugFile("plan.json", "the plan, as ParallelPlan.load reads it", plan.to_json)
        yield DebugFile(
            "plan.txt",
            'the plan in words: plan.explain(detail="full")',
            lambda: plan.explain(detail="full") + "\n",
        )
        yield DebugFile(
            "figures.json",
            "memory as XLA and the plan count it",
            lambda: json.dumps(self._figures(), indent=1),
        )

    def _figures(self) -> dict[str, Any]:
        return {
            "memory_bytes": self.memory_bytes(),
            "estimated_peak_bytes": self.plan.estimated_peak_bytes,
            "jax": jax.__version__,
        }

    def _program_files(self) -> Iterator[DebugFile]:
        hlo_texts = cache(self.hlo_texts)
        for name in self.names:
            yield DebugFile(
                f"{name}.annotated.mlir",
                "StableHLO with the plan's shardings",
                partial(self.annotated_text, name),
            )
            yield DebugFile(
                f"{name}.optimized.hlo.txt",
                "XLA's optimized HLO, as it runs",
                lambda name=name: hlo_texts()[name],
            )


class InstructionExecutable(Executable):
    """Runs stage programs by one static list of instructions per mesh.

    transfer_sizes: per transfer, source stage, target stage and bytes.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        programs: PipelinePrograms,
        stage_programs: Sequence[ProgramLabel],
        transfer_sizes: Mapping[int, tuple[int, int, float]],
        avals: Sequence[Any],
        whole: FlatFunction,
    ) -> None:
        super().__init__(plan, [program.name for program in stage_programs], avals, whole)
        self.programs = programs
        self._stage_programs = tuple(stage_programs)
        self._transfer_sizes = transfer_sizes
        self._order = interleave(programs)

    @abstractmethod
    def _bytes_of(self, buffer: Buffer) -> int:
        """Bytes of a buffer on one device."""

    @abstractmethod
    def _program_bytes(self) -> list[int]:
        """XLA's peak bytes per device, by stage program: arguments, results and temporaries."""

    def _make_description(self) -> StepDescription:
        live = tuple(
            sizes_over_time(program, lambda buffer, m=mesh: self._bytes_of((m, buffer)))
            for mesh, program in enumerate(self.programs.meshes)
        )
        return StepDescription(
            self.plan, self.programs, self._stage_programs, self._transfer_sizes, live
        )

    def live_bytes(self) -> tuple[int, ...]:
        """Peak bytes in buffers between instructions, per device, by mesh."""
        return peak_live_bytes(self._order, self.programs, self._bytes_of)

    def mesh_memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes per device, by mesh: while a stage program runs, XLA's figure for it plus the
        buffers that it does not touch."""
        return peak_bytes(self._order, self.programs, self._bytes_of, self._program_bytes())

    def num_runs(self) -> dict[str, int]:
        runs = (o.instruction for o in self._order)
        return dict(Counter(self.names[run.stage_program] for run in runs if isinstance(run, Run)))

    def num_instructions(self) -> dict[str, int]:
        """How many instructions of each kind a step has, on all meshes together."""
        kinds = [type(i).__name__ for program in self.programs.meshes for i in program.instructions]
        return dict(Counter(kinds))

    def _figures(self) -> dict[str, Any]:
        return {
            **super()._figures(),
            "mesh_memory_bytes": self.mesh_memory_bytes(),
            "live_bytes": self.live_bytes(),
            "num_instructions": self.num_instructions(),
        }

    def _program_files(self) -> Iterator[DebugFile]:
        yield from super()._program_files()
        for mesh, program in enumerate(self.programs.meshes):
            text = "".join(f"{instruction}\n" for instruction in program.instructions)
            yield DebugFile(
                f"instructions_mesh{mesh}.txt",
                f"what mesh {mesh} runs in every step, in order",
                lambda text=text: text,
            )
