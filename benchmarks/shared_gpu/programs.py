"""Programs that all ranks run together: from a plan or an expert to a compiled step with its state.

Every program takes and returns flat leaves: (state, batch) → (state, loss). One rank traces, lowers
and compiles it and writes the executable to a file, from which the others load it: eight ranks
compile eight programs at once, and all run the same binary. The state of a model is created once
per rank, on its own device; `Program.begin` cuts a rank's shards out of it, so that every sample
starts from the same state and no other program's state takes memory.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.compiler import plan_step
from autopar.executables import make_executable
from autopar.ir.files import write_whole
from autopar.ir.plan import ParallelPlan
from autopar.runtime.local import LocalExecutable
from autopar.runtime.stage_programs import program_bytes
from benchmarks.experts.grid import plain_experts
from examples.models import Example


def compile_plan(example: Example, text: str, devices: Sequence[Any], preset: str) -> Any:
    """The plan as autopar compiles it. The plan is bound to a new trace, which must be of the
    program that was planned."""
    cluster = autopar.ClusterSpec(1, len(devices), preset)
    arguments = (example.abstract_state(), example.abstract_batch())
    plan = ParallelPlan.from_json(text)
    planned = plan_step(example.train_step, arguments, {}, cluster=cluster, method=plan)
    executable = make_executable(planned, devices)
    assert isinstance(executable, LocalExecutable)
    return executable.compiled


def compile_expert(example: Example, name: str, devices: Sequence[Any]) -> Any:
    """The expert's step on flat leaves."""
    found = {expert.name: expert for expert in plain_experts(example, len(devices))}
    step, state, batch = found[name].step(example, devices)
    leaves, treedef = jax.tree.flatten((state, batch))
    num_state = len(jax.tree.leaves(state))
    places = [leaf.sharding for leaf in leaves]

    def flat(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(step(*jax.tree.unflatten(treedef, arrays))))

    whole = NamedSharding(places[0].mesh, PartitionSpec())
    jitted = jax.jit(
        flat,
        in_shardings=places,
        out_shardings=(*places[:num_state], whole),
        donate_argnums=tuple(range(num_state)),
        keep_unused=True,
    )
    return jitted.lower(*leaves).compile()


def save_compiled(path: Path, compiled: Any) -> None:
    payload, _, _ = serialize_executable.serialize(compiled)
    write_whole(path, pickle.dumps(payload))


def load_compiled(path: Path, num_leaves: int, num_results: int, kind: type) -> Any:
    """`kind`: whether results are a list (autopar's) or a tuple."""
    in_tree = jax.tree.structure(((0,) * num_leaves, {}))
    out_tree = jax.tree.structure(kind([0] * num_results))
    payload = pickle.loads(path.read_bytes())
    return serialize_executable.deserialize_and_load(payload, in_tree, out_tree)


class ModelState:
    """The initial state and the batch of a model, whole, on this rank's device."""

    def __init__(self, example: Example) -> None:
        state, batch = example.create_state(), example.make_batch()
        self.num_state = len(jax.tree.leaves(state))
        self.leaves = jax.tree.leaves((state, batch))
        jax.block_until_ready(self.leaves)

    def placed(self, number: int, sharding: Any) -> jax.Array:
        """A leaf as an array on the devices of all ranks, copied from this rank's whole one."""
        leaf = self.leaves[number]
        ((device, index),) = sharding.addressable_devices_indices_map(leaf.shape).items()
        bounds = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
        starts = tuple(start for start, _ in bounds)
        sizes = tuple(stop - start for start, stop in bounds)
        shard = jax.device_put(_cut(leaf, starts, sizes), device)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [shard])


@functools.partial(jax.jit, static_argnums=2)
def _cut(leaf: jax.Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(leaf, starts, sizes) if sizes else leaf.copy()


class Program:
    """A compiled step; `begin` gives it a state, `advance` runs it once."""

    def __init__(self, name: str, compiled: Any, model: ModelState) -> None:
        self.name = name
        self._compiled, self._model = compiled, model
        self._places = list(compiled.input_shardings[0])
        self._batch: list[jax.Array] = []
        self._state: list[jax.Array] = []
        self.xla_bytes = program_bytes(compiled)

    def begin(self) -> None:
        """A new state, and a first step, so that what follows finds a running program."""
        num_state = self._model.num_state
        self._batch = [self._placed(i) for i in range(num_state, len(self._places))]
        self._state = [self._placed(i) for i in range(num_state)]
        jax.block_until_ready(self.advance())

    def advance(self) -> jax.Array:
        *self._state, loss = self._compiled(*self._state, *self._batch)
        return loss

    def end(self) -> None:
        """Free its arrays."""
        self._state, self._batch = [], []

    def first_losses(self, num: int = 2) -> list[float]:
        num_state = self._model.num_state
        self._batch = [self._placed(i) for i in range(num_state, len(self._places))]
        self._state = [self._placed(i) for i in range(num_state)]
        return [float(self.advance()) for _ in range(num)]

    def peak_bytes(self) -> int | None:
        """The most bytes that this rank's device has had in use so far, without the model's own
        arrays; None if the device does not tell."""
        device = self._model.leaves[0].devices().pop()
        own = sum(leaf.nbytes for leaf in self._model.leaves)
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return None if peak is None else peak - own

    def _placed(self, number: int) -> jax.Array:
        return self._model.placed(number, self._places[number])
