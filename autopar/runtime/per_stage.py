"""A function whose results are made by several stages: one program per stage, and no transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from autopar import _jax
from autopar.ir.plan import ParallelPlan
from autopar.runtime import recording
from autopar.runtime.debug import Describe, describe_nothing, dump, program_files
from autopar.runtime.hlo import CollectiveOp
from autopar.runtime.local import LocalExecutable


class PartsExecutable:
    """What `create_state.last_executable` gives beside a pipelined train step.

    parts: the program of every stage, which takes all arguments.
    whole: the function as it is, for when it is called inside of another program.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        parts: Sequence[LocalExecutable],
        whole: Callable[..., Sequence[Any]],
    ) -> None:
        self.plan = plan
        self.parts = tuple(parts)
        self._whole = whole
        self.describe: Describe = describe_nothing
        self._owners = [tensor.stages[0] for tensor in plan.outputs]
        self.input_shardings = self.parts[0].input_shardings
        self.output_shardings = self._in_order([part.output_shardings for part in self.parts])

    def _in_order(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """What each part has for its own results, in the order of all results."""
        left = [iter(own) for own in results]
        return [next(left[stage]) for stage in self._owners]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        if _jax.is_tracing():
            return list(self._whole(*leaves))
        recorder = recording.current
        if recorder is None:
            return self._in_order([part.run(leaves) for part in self.parts])
        return self._recorded(recorder, leaves)

    def _recorded(self, recorder: recording.Recorder, leaves: Sequence[Any]) -> list[Any]:
        meshes = [stage.mesh for stage in self.plan.stages]
        names = list(self.compiled)
        step = recorder.begin(recording.whole_step(self.plan, names, meshes))
        results = []
        for number, (part, mesh) in enumerate(zip(self.parts, meshes, strict=True)):
            began_s = recording.clock()
            results.append(part.run(leaves))
            place = meshes[:number].count(mesh)
            recorder.whole(step, mesh, place, began_s, results[-1])
        return self._in_order(results)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put host or device arrays where the first stage wants them."""
        return self.parts[0].place(leaves)

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Put some arguments, by position, where the plan wants them. Their owner may change them
        afterwards."""
        return self.parts[0].place_inputs(leaves)

    @property
    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The compiled programs by name, such as `stage0_results`."""
        return {f"stage{n}_results": part.compiled for n, part in enumerate(self.parts)}

    def hlo_text(self) -> str:
        """XLA's optimized HLO of every program, each under its name."""
        texts = [f"// {name}\n\n{one.as_text()}" for name, one in self.compiled.items()]
        return "\n\n".join(texts)

    def collectives(self) -> tuple[CollectiveOp, ...]:
        """Every collective that XLA will run, with bytes and group sizes."""
        return tuple(op for part in self.parts for op in part.collectives())

    def mesh_memory_bytes(self) -> tuple[int, ...]:
        """XLA's figure of peak bytes per device, by mesh. Stages that share one come after each
        other, and the results of all stay."""
        peaks: dict[int, int] = {}
        for part, stage in zip(self.parts, self.plan.stages, strict=True):
            peaks[stage.mesh] = peaks.get(stage.mesh, 0) + part.memory_bytes()
        return tuple(peaks[mesh] for mesh in range(len(peaks)))

    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(self.mesh_memory_bytes())

    def dump_debug_info(self, directory: str | Path) -> None:
        """Write plan, programs, placement, strategies, the solver's problems and figures into a
        folder; its README.txt says what each file is."""
        programs = [
            file
            for n, part in enumerate(self.parts)
            for file in program_files(f"stage{n}_results", part.annotated_text, part.hlo_text)
        ]
        dump(self, directory, programs, mesh_memory_bytes=self.mesh_memory_bytes())
