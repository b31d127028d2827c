"""What a worker process does: compiles programs, holds arrays by number, runs its mesh's lists.

Every public method is a command of the driver (`commands.CommandName`); they run in order, on one
thread. The driver numbers the arrays and says when to free them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from autopar.errors import WorkerError
from autopar.ir.remote import MeshTask, ShardedType
from autopar.runtime.checkpoints.format import RowsFrom, read_manifest
from autopar.runtime.checkpoints.objects import location
from autopar.runtime.checkpoints.read import read_arrays
from autopar.runtime.checkpoints.write import snapshot, write_parts
from autopar.runtime.ranks.failures import is_out_of_memory
from autopar.runtime.recording import clock
from autopar.runtime.remote.channel import ChannelServer
from autopar.runtime.remote.commands import Put, StepCall, StepDone
from autopar.runtime.remote.exporting import compile_stage_program, sharding_of, struct_of
from autopar.runtime.remote.place import Later, WorkerPlace
from autopar.runtime.remote.recording import WorkerRecord
from autopar.runtime.remote.task import WorkerTask, array_in
from autopar.runtime.remote.transfers import shards_by_device
from autopar.runtime.stage_programs import occupy, program_bytes
from autopar.runtime.threads import must_run_alone
from autopar.runtime.transfers import copier
from autopar.runtime.transports.base import Link, Transport
from autopar.runtime.transports.choose import available_transports, make_transport

_DATA_LIMIT_S = 120.0  # for data to arrive that the driver has announced
_MAX_COMPILE_THREADS = 8
_PIECE_BYTES = 2**30  # memory need not be free in one piece


class ProgressSink(Protocol):
    def at(self, program: int, instruction: int, micro_batch: int) -> None: ...


class DataChannel(Protocol):
    """A worker's end of what carries arrays from the driver and back."""

    @property
    def address(self) -> tuple[str, int]: ...

    def take(self, key: int, limit_s: float) -> list[np.ndarray]: ...

    def offer(self, key: int, arrays: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


class Executor:
    """`channel`: default: one that the driver can connect to from another process."""

    def __init__(
        self, place: WorkerPlace, progress: ProgressSink, channel: DataChannel | None = None
    ) -> None:
        self._place = place
        self._progress = progress
        self._devices = place.all_devices()
        self._local = place.local_devices()
        if len(self._devices) != len(place.mesh_devices):
            raise WorkerError(
                f"worker {place.worker} on {place.node} sees {len(self._devices)} devices of its "
                f"mesh, which has {len(place.mesh_devices)}.",
                host=place.node,
            )
        self._arrays: dict[int, jax.Array] = {}
        self._tasks: dict[int, WorkerTask] = {}
        self._compiling: dict[int, dict[int, Future[jax.stages.Compiled]]] = {}
        self._announced: dict[int, MeshTask] = {}
        self._record: WorkerRecord | None = None
        self._channel = channel or ChannelServer(place.address, place.token)
        self._transport: Transport | None = None
        mesh = sharding_of(_scalar_on(len(self._devices)), self._devices).mesh
        self._runs_alone = isinstance(mesh, jax.sharding.Mesh) and must_run_alone(mesh)
        # Donating a buffer frees it, even if no result can reuse it.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        threads = max(1, min(_MAX_COMPILE_THREADS, os.cpu_count() or 1))
        self._compilers = ThreadPoolExecutor(threads, thread_name_prefix="compile")

    # -- connections

    def transports(self) -> tuple[str, ...]:
        """Names of the transports that this worker could use."""
        return available_transports(self._place.platform)

    def open(self, transport: str) -> dict[str, Any]:
        """The addresses at which the driver and other workers reach this one."""
        if self._transport is None:
            self._transport = make_transport(transport, self._place)
        return {"channel": self._channel.address, "transport": self._transport.address()}

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        assert self._transport is not None
        others = {w: address for w, address in addresses.items() if w != self._place.worker}
        self._transport.connect(others)

    # -- programs

    def announce(self, task: MeshTask, key: int) -> None:
        """Receive a step's lists, and the code of its stage programs under `key`; compile them."""
        programs = self._channel.take(key, _DATA_LIMIT_S)
        self._announced[task.number] = task
        self._compiling[task.number] = {
            number: self._compilers.submit(
                compile_stage_program,
                f"{task.name}_{spec.name}",
                spec,
                program.tobytes(),
                self._devices,
            )
            for (number, spec), program in zip(task.stage_programs.items(), programs, strict=True)
        }

    def compiled(self, task: int, stage_program: int) -> Later:
        """Answers when a stage program is compiled, with its peak bytes per device."""
        future = self._compiling[task][stage_program]
        return Later(lambda: program_bytes(future.result()))

    def load(self, task: int) -> list[Link]:
        """Make a step ready to run; answers the links that it sends and receives on."""
        stage_programs = {n: future.result() for n, future in self._compiling.pop(task).items()}
        announced = self._announced.pop(task)
        loaded = WorkerTask(
            announced,
            stage_programs,
            self._devices,
            self._place.worker,
            self._transport,
            self._runs_alone,
        )
        loaded.warm_up()
        self._tasks[task] = loaded
        return loaded.links()

    def prepare(self, links: Sequence[Link]) -> None:
        """Create communicators, in an order that all workers share."""
        assert self._transport is not None
        self._transport.prepare(links)

    def unload(self, tasks: Sequence[int]) -> None:
        for task in tasks:
            self._tasks.pop(task, None)
            self._announced.pop(task, None)
            self._compiling.pop(task, None)

    def hlo_texts(self, task: int) -> dict[int, str]:
        """XLA's optimized HLO of this mesh's stage programs, by number."""
        return {
            n: stage_program.as_text() or ""
            for n, stage_program in self._tasks[task].stage_programs.items()
        }

    # -- steps

    def has_room(self, num_bytes: int) -> bool:
        """Whether each device of this worker could allocate so much beside its arrays."""
        self.wait()
        whole, rest = divmod(num_bytes, _PIECE_BYTES)
        try:
            occupy([_PIECE_BYTES] * whole + [rest], self._local)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def step(self, call: StepCall) -> Later:
        self._progress.at(call.task, -1, -1)
        self._place_all(call.puts)
        self.free(call.freed)
        loaded = self._tasks[call.task]
        program = loaded.task.program
        slots: list[Any] = [None] * program.num_buffers
        for (_, buffer), number in zip(program.inputs, call.inputs, strict=True):
            slots[buffer] = self._arrays[number]
        for place in loaded.task.used_up:
            self._arrays.pop(call.inputs[place], None)

        def at(place: int, micro_batch: int) -> None:
            self._progress.at(call.task, place, micro_batch)

        if self._record is None:
            loaded.run(slots, call.first_tag, at)
        else:
            loaded.run_recorded(slots, call.first_tag, at, self._record.begin(call.first_tag))
        for (_, buffer), number in zip(program.outputs, call.outputs, strict=True):
            self._arrays[number] = array_in(slots, buffer)
        del slots
        self.free(call.dropped)
        shards = {
            place: self._arrays[call.outputs[place]].addressable_shards[0].data
            for place in call.watched
        }
        smallest = None
        if loaded.smallest_output is not None:
            smallest = self._arrays[call.outputs[loaded.smallest_output]]
        watched = shards if self._place.rank == 0 else {}

        def wait() -> StepDone:
            found = {place: _unless_used_up(np.asarray, shard) for place, shard in watched.items()}
            values = {place: value for place, value in found.items() if value is not None}
            if not values and smallest is not None:
                _unless_used_up(jax.block_until_ready, smallest)
            self._check_transfers()
            return StepDone(values)

        return Later(wait)

    # -- arrays

    def put(self, puts: Sequence[Put]) -> None:
        self._place_all(puts)

    def _place_all(self, puts: Sequence[Put]) -> None:
        taken: dict[int, list[np.ndarray]] = {}
        for put in puts:
            if put.key not in taken:
                taken[put.key] = self._channel.take(put.key, _DATA_LIMIT_S)
            shards = jax.device_put([taken[put.key][n] for n in put.shards], self._local)
            self._arrays[put.array] = jax.make_array_from_single_device_arrays(
                put.type.shape, sharding_of(put.type, self._devices), shards, dtype=put.type.dtype
            )

    def free(self, arrays: Sequence[int]) -> None:
        for number in arrays:
            self._arrays.pop(number, None)

    def fetch(self, wanted: Sequence[tuple[int, int]], key: int) -> None:
        """Offer shards to the driver under `key`: (array, place of this worker's device)."""
        shards = [
            shards_by_device(self._arrays[number], self._local)[device] for number, device in wanted
        ]
        values = [np.asarray(shard) for shard in shards]
        self._check_transfers()
        self._channel.offer(key, values)

    def _check_transfers(self) -> None:
        """Raise if what was just read may come from a transfer that failed."""
        if self._transport is not None:
            self._transport.check()

    def reshard(self, moved: Sequence[tuple[int, int, ShardedType]]) -> None:
        """Copy arrays into other shardings on this mesh: (array, number of the copy, its type)."""
        for number, copy, type_ in moved:
            target = sharding_of(type_, self._devices)
            self._arrays[copy] = copier(target)(self._arrays[number])

    # -- checkpoints

    def save(self, folder: str, items: Sequence[tuple[str, int, tuple[int, ...]]]) -> Later:
        """Write this worker's shards of arrays, (key, array, where it starts in the leaf), in the
        background: when the command returns, the arrays may be used up. Answers where each shard
        was written."""
        shards = snapshot(
            [(key, RowsFrom(first_row, self._arrays[number])) for key, number, first_row in items]
        )
        self._check_transfers()
        return Later(lambda: write_parts(folder, f"worker_{self._place.worker:05d}", shards))

    def restore(
        self, folder: str, items: Sequence[tuple[str, int, ShardedType, tuple[int, ...]]]
    ) -> None:
        """Read the shards of this worker's devices: (key, array, its type, where it
        starts in the leaf)."""
        manifest = read_manifest(location(folder))
        wanted = [
            (key, RowsFrom(first_row, struct_of(type_, self._devices)))
            for key, _, type_, first_row in items
        ]
        arrays = read_arrays(folder, manifest, wanted)
        for (_, number, _, _), array in zip(items, arrays, strict=True):
            self._arrays[number] = array

    # -- recording

    def clock(self) -> float:
        return clock()

    def record(self, max_events: int) -> None:
        """From now on, record when the instructions of steps run."""
        if self._record is None:
            self._record = WorkerRecord(max_events)

    def recorded(self, limit_s: float) -> Later:
        """Stop recording; answers the marks when all are known or the limit is over."""
        record, self._record = self._record, None
        return Later(lambda: None if record is None else record.finished(limit_s))

    def start_profile(self, folder: str) -> None:
        """Start `jax.profiler` for this process; it writes into a folder of this host."""
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        jax.profiler.stop_trace()

    # -- inspection

    def wait(self) -> None:
        """Answers when every array is ready."""
        jax.block_until_ready(list(self._arrays.values()))

    def stats(self) -> dict[str, Any]:
        """What this worker holds, to find leaks."""
        memory = [d.memory_stats() or {} for d in self._local]
        return {
            "num_arrays": len(self._arrays),
            "array_bytes": sum(
                shard.data.nbytes for a in self._arrays.values() for shard in a.addressable_shards
            ),
            "num_live": len(jax.live_arrays()),
            "tasks": sorted(self._tasks),
            "device_bytes": [int(m.get("bytes_in_use", 0)) for m in memory],
        }

    def close(self) -> None:
        self._tasks.clear()
        self._arrays.clear()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._transport is not None:
            self._transport.close()
        self._channel.close()


def _unless_used_up(wait: Callable[[jax.Array], Any], array: jax.Array) -> Any:
    """`wait(array)`; or None if a later step has used the array up, at any moment."""
    try:
        return wait(array)
    except RuntimeError:
        if not array.is_deleted():
            raise
        return None


def _scalar_on(num_devices: int) -> ShardedType:
    return ShardedType(
        (), np.dtype(np.int32), (num_devices,), ("x",), (-1,), tuple(range(num_devices))
    )
