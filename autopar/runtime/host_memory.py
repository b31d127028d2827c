"""A step with state in host memory, on one mesh of this process: `HostMemoryExecutable`.

Programs are dispatched one after the other, and a program starts when the one before it is done.
While a group of state is updated and stored, the next one is fetched: both directions of the link
to the host are used at once. Three groups at most are on the device, since JAX allocates the
results of programs and copies when they are dispatched.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from autopar import _jax
from autopar.errors import CompileError, MeshError
from autopar.ir.host_programs import HOST_KIND, HostProgram, HostPrograms
from autopar.ir.pipeline import MeshProgram, PipelinePrograms, Run
from autopar.ir.plan import ParallelPlan
from autopar.ir.xla_options import compiler_options
from autopar.progress import Progress, logged
from autopar.runtime.arguments import place_some, put, without_aliases
from autopar.runtime.executable import Executable, FlatFunction
from autopar.runtime.recording import Recorder, clock
from autopar.runtime.threads import must_run_alone, run_alone
from autopar.runtime.timestamps import ProgramLabel, StepDescription

_IN_FLIGHT = 2


class HostMemoryExecutable(Executable):
    """The programs of a step that keeps state in host memory; compiled when first needed."""

    def __init__(
        self,
        plan: ParallelPlan,
        programs: HostPrograms,
        avals: Sequence[Any],
        donated: Sequence[int],
        mesh: Mesh,
        whole: FlatFunction,
    ) -> None:
        check_host_memory(plan.name, mesh)
        self.mesh = mesh
        self.programs = programs
        self.input_shardings = [slot.sharding for slot in programs.slots[: len(avals)]]
        self.output_shardings = [programs.slots[slot].sharding for slot in programs.outputs]
        self._donated = frozenset(donated)
        self._devices = list(mesh.devices.flat)
        self._runs_alone = must_run_alone(mesh)
        super().__init__(plan, [p.name for p in programs.programs], avals, whole)

    # -- running

    def _run(self, leaves: Sequence[Any], recorder: Recorder | None) -> list[Any]:
        compiled = self.compiled
        arguments = without_aliases(leaves, self._donated)
        slots: list[Any] = self.place(arguments)
        self._free_moved(leaves, slots)
        slots += [None] * (len(self.programs.slots) - len(slots))
        log = None if recorder is None else recorder.begin(self.description).logs[0]
        programs, main = self.programs.programs, self.programs.main
        self._move(slots, programs[0].fetches)
        for number, program in enumerate(programs):
            done = number - (1 if number == main else _IN_FLIGHT)
            if done >= 0:
                jax.block_until_ready(self._watched(slots, done))
            upcoming = programs[number + 1].fetches if number + 1 < len(programs) else ()
            if number != main:
                self._move(slots, upcoming)
            began_s = clock()
            results = self._dispatch(compiled[program.name], [slots[s] for s in program.reads])
            for slot, result in zip(program.writes, results, strict=True):
                slots[slot] = result
            if number == main:  # while it runs there may be no room for state
                self._move(slots, upcoming)
            self._move(slots, program.stores)
            for slot in program.used_up:
                if not slots[slot].is_deleted():
                    slots[slot].delete()
                slots[slot] = None
            if log is not None:
                log.began(number, began_s)
                log.ends_with(number, self._watched(slots, number), may_vanish=True)
        return [slots[slot] for slot in self.programs.outputs]

    def _move(self, slots: list[Any], moves: Sequence[tuple[int, int]]) -> None:
        """Begin to copy arrays from one memory to the other."""
        places = [self.programs.slots[to].sharding for _, to in moves]
        for (_, to), copy in zip(
            moves, jax.device_put([slots[s] for s, _ in moves], places), strict=True
        ):
            slots[to] = copy

    def _watched(self, slots: Sequence[Any], number: int) -> list[Any]:
        """What is ready when a program and its stores are done, and not used up by the next: what
        it stores, or else its smallest result that the step returns or the next program has."""
        program = self.programs.programs[number]
        if program.stores:
            return [slots[to] for _, to in program.stores]
        returned = set(self.programs.outputs)
        there = [s for s in program.writes if slots[s] is not None]
        best = [s for s in there if s in returned] or there
        return [min((slots[s] for s in best), key=lambda array: array.size)] if best else []

    def _dispatch(self, program: jax.stages.Compiled, arguments: Sequence[Any]) -> list[Any]:
        if self._runs_alone:
            return run_alone(program, arguments, self._devices)
        return program(*arguments)

    def _free_moved(self, leaves: Sequence[Any], placed: Sequence[Any]) -> None:
        """Free donated arrays that were moved to host memory: on the device they would take the
        room that was made. All others JAX frees."""
        moved = [
            (leaf, array)
            for index, (leaf, array) in enumerate(zip(leaves, placed[: len(leaves)], strict=True))
            if index in self._donated
            and self.programs.is_on_host(index)
            and isinstance(leaf, jax.Array)
            and leaf is not array
        ]
        jax.block_until_ready([array for _, array in moved])
        for leaf, _ in moved:
            if leaf.sharding.memory_kind != HOST_KIND and not leaf.is_deleted():
                leaf.delete()

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return put(leaves, self.input_shardings)

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        return place_some(leaves, self.input_shardings)

    def _make_description(self) -> StepDescription:
        runs = tuple(Run(n, None, (), ()) for n in range(len(self.names)))
        programs = PipelinePrograms((MeshProgram(runs, (), (), 0),), ((),) * len(runs))
        return StepDescription(
            self.plan, programs, tuple(ProgramLabel(name, 0) for name in self.names)
        )

    # -- compiling

    @cached_property
    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """By name. Equal layers have equal updates: such a program is compiled once."""
        known: dict[str, jax.stages.Compiled] = {}
        compiled = {}
        what = f"compiling {self.plan.name}"
        with Progress(what, len(self.names)) as progress, logged(what):
            for program in self.programs.programs:
                try:
                    lowered = self._lower(program)
                    text = lowered.as_text()
                    if text not in known:
                        known[text] = lowered.compile(compiler_options(self.plan.xla_options))
                except jax.errors.JaxRuntimeError as error:
                    raise CompileError(
                        f"XLA could not compile {program.name} of {self.plan.name}, which keeps "
                        f"state in host memory, for the mesh {self.plan.mesh_shape}: {error}"
                    ) from error
                compiled[program.name] = known[text]
                progress.step()
        return compiled

    def _lower(self, program: HostProgram) -> jax.stages.Lowered:
        slots = self.programs.slots
        reads = [slots[s] for s in program.reads]

        def run(*arrays: Any) -> list[Any]:
            return list(program.function(*arrays))

        # Equal programs must have equal names, to be seen as equal.
        name = program.name.partition("_")[0]
        run.__name__ = run.__qualname__ = f"{self.plan.name}_{name}"
        jitted = jax.jit(
            run,
            in_shardings=[slot.sharding for slot in reads],
            out_shardings=[slots[s].sharding for s in program.writes],
            donate_argnums=self._overwritten(program),
            keep_unused=True,
        )
        with warnings.catch_warnings():
            # Donating a buffer frees it, even if no result can reuse it.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return _jax.lowered(
                jitted,
                *(
                    jax.ShapeDtypeStruct(
                        s.shape, s.dtype, sharding=s.sharding, weak_type=s.weak_type
                    )
                    for s in reads
                ),
            )

    def _overwritten(self, program: HostProgram) -> tuple[int, ...]:
        """Arguments of the step and fetched state whose buffers its results may take over, by
        position among its reads."""
        fetched = {slot for _, slot in program.fetches}
        return tuple(
            position
            for position, slot in enumerate(program.reads)
            if slot in program.used_up and (slot < len(self.avals) or slot in fetched)
        )

    # -- inspection

    def hlo_texts(self) -> dict[str, str]:
        return {name: program.as_text() or "" for name, program in self.compiled.items()}

    def annotated_text(self, name: str) -> str:
        """The program of that name as XLA receives it: StableHLO with shardings."""
        program = next(p for p in self.programs.programs if p.name == name)
        return self._lower(program).as_text()

    def mesh_memory_bytes(self) -> tuple[int]:
        """Peak bytes per device: of each program by XLA, with the arrays on the device that it does
        not touch."""
        on_host, programs = self.programs.is_on_host, self.programs.programs
        alive = {s for s in range(len(self.avals)) if not on_host(s)}
        peak, storing = 0, set[int]()
        for number, program in enumerate(programs):
            fetches_next = number not in (self.programs.main, len(programs) - 1)
            after = programs[number + 1].fetches if fetches_next else ()
            alive |= {slot for _, slot in (*program.fetches, *after)}
            apart = sum(self._bytes(s) for s in (alive | storing) - set(program.reads))
            peak = max(peak, apart + self._device_bytes(program))
            storing = {slot for slot, _ in program.stores}
            alive |= set(program.writes)
            alive -= set(program.used_up)
        return (peak,)

    def host_bytes(self) -> int:
        """State in host memory, per device."""
        return sum(self._bytes(s) for s in range(len(self.avals)) if self.programs.is_on_host(s))

    def _bytes(self, slot: int) -> int:
        info = self.programs.slots[slot]
        shard = info.sharding.shard_shape(info.shape)
        size = 1
        for length in shard:
            size *= length
        return size * (getattr(info.dtype, "itemsize", 0) or 0)

    def _device_bytes(self, program: HostProgram) -> int:
        """XLA's bytes of a program."""
        stats = self.compiled[program.name].memory_analysis()
        assert stats is not None
        total = stats.argument_size_in_bytes + stats.output_size_in_bytes
        return int(total + stats.temp_size_in_bytes - stats.alias_size_in_bytes)


def check_host_memory(name: str, mesh: Mesh) -> None:
    """`MeshError` unless programs on the mesh can use host memory."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_KIND not in kinds:
        raise MeshError(
            f"{name}: its plan keeps state in host memory, and {device} has no {HOST_KIND!r}, only "
            f"{', '.join(kinds)}. Plan with ShardingOptions(host_memory='never')."
        )
