"""`restore_checkpoint`: from a checkpoint to the state of a step, sharded as its plan wants it.

A step's plan knows the pytrees of its arguments and the sharding of each array. The checkpoint
holds one argument, or a tuple of the first few that are state: the one whose leaves have the saved
names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import SequenceKey

from autopar import _jax, session
from autopar.api import ParallelFunction, local_devices
from autopar.errors import ArgumentError, CheckpointError, PlanError
from autopar.ir.objects.nnx import merge_objects
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.lower.lower_step import check_devices
from autopar.progress import LOGGER
from autopar.runtime.checkpoints.backends import place_at
from autopar.runtime.checkpoints.controllers import num_processes
from autopar.runtime.checkpoints.find import (
    FoundCheckpoint,
    FoundOrbax,
    checkpoint_steps,
    find_checkpoint,
)
from autopar.runtime.checkpoints.objects import Location, ObjectPath, UnreachableStoreError
from autopar.runtime.checkpoints.orbax import OrbaxSource
from autopar.runtime.checkpoints.restore import (
    OtherModelError,
    OwnSource,
    difference_text,
    differing,
    restore_nested,
    restore_tree,
)
from autopar.runtime.ranks.consensus import Consensus, planning_limit_s
from autopar.runtime.remote.save import input_places
from autopar.runtime.stacks import RowShardings, stack_sharding


def restore_checkpoint(
    directory: str | Location, target: Any = None, step: int | None = None
) -> Any:
    """Read the checkpoint of `step`, or the newest, from a folder.

    directory: the folder of checkpoints, or a URL in an object store.
    target:    decides how the state comes back.
               A parallelized function that was called or planned, or a plan: as that argument, in
               the plan's shardings, whatever plan and devices it was saved from; as a tuple if it
               was saved as several arguments, `(model, optimizer)`.
               A pytree of arrays or `jax.ShapeDtypeStruct`s: in this structure, each array with the
               sharding of its counterpart, if that has one.
               None: as dicts and lists of NumPy arrays.
    step:      which checkpoint; None for the newest that is in order: one that is damaged is left
               out, with a warning.

    Returns the state. Raises `CheckpointError` if there is no checkpoint, if it is damaged or
    incomplete, or, naming the first differences, if its leaves are not those of the target.
    """
    if step is None and len(checkpoint_steps(directory)) > 1:
        return restore_newest(directory, target)[1]
    return _restored(find_checkpoint(directory, step), target)


def restore_newest(directory: str | Location, target: Any) -> tuple[int, Any, tuple[int, ...]]:
    """(step, state) of the newest checkpoint that is in order, and the steps of damaged ones that
    are newer. Every damaged one is an error in the log and a warning."""
    damaged: list[int] = []
    first: CheckpointError | PlanError | None = None
    for step in reversed(checkpoint_steps(directory)):
        try:
            return step, _restored_by_all(find_checkpoint(directory, step), target), tuple(damaged)
        except (OtherModelError, UnreachableStoreError):
            raise
        except (CheckpointError, PlanError) as error:
            text = f"THE CHECKPOINT OF STEP {step} IS DAMAGED and is left out: {error}"
            LOGGER.error("%s", text)
            warnings.warn(text, stacklevel=3)
            damaged.append(step)
            first = first or error
    assert first is not None, f"{directory} has no checkpoint"
    raise CheckpointError(
        f"{directory}: none of the checkpoints of steps {damaged} can be restored; of the newest: "
        f"{first}"
    ) from first


def restore_step(directory: Location, target: Any, step: int) -> Any:
    """The state of one checkpoint, if all processes can read their parts."""
    return _restored_by_all(find_checkpoint(directory, step), target)


def _restored_by_all(checkpoint: FoundCheckpoint | FoundOrbax, target: Any) -> Any:
    """The state, if all processes can read their parts."""
    if num_processes() == 1:
        return _restored(checkpoint, target)
    result: list[Any] = []
    unreachable: list[UnreachableStoreError] = []

    def restore() -> dict[str, Any]:
        try:
            result.append(_restored(checkpoint, target))
        except UnreachableStoreError as error:  # says nothing about the checkpoint
            unreachable.append(error)
        return {}

    name = f"restoring {checkpoint.path}"
    Consensus(name).agree("reading", restore, planning_limit_s())
    if isinstance(checkpoint.path, ObjectPath):
        _reached_by_all(name, unreachable)
    return result[0]


def _reached_by_all(name: str, unreachable: Sequence[UnreachableStoreError]) -> None:
    """Raises in all processes if one of them could not reach the store."""
    try:
        Consensus(name).agree("store", lambda: {"reached": not unreachable}, planning_limit_s())
    except PlanError as error:
        raise UnreachableStoreError(f"{name}: not every process reached the store: {error}") from (
            unreachable[0] if unreachable else error
        )
    if unreachable:
        raise unreachable[0]


def _restored(checkpoint: FoundCheckpoint | FoundOrbax, target: Any) -> Any:
    if isinstance(checkpoint, FoundOrbax):
        source = OrbaxSource(checkpoint.path)
    else:
        source = OwnSource(checkpoint.path)
    if target is None:
        return restore_nested(source)
    if not isinstance(target, (ParallelFunction, ParallelPlan)):
        return restore_tree(source, target)
    arguments = arguments_of(target, source.name)
    differences = [differing(source.manifest, argument.wanted) for argument in arguments]
    chosen = next((i for i, lines in enumerate(differences) if not lines), 0)
    if differences[chosen]:
        raise OtherModelError(difference_text(checkpoint.path, differences[chosen]))
    argument = arguments[chosen]
    return argument.rebuilt(source.leaves(argument.wanted))


@dataclass(frozen=True)
class Argument:
    """An argument of a planned step, or a tuple of several.

    name:   its position, or its name if it was passed by name; of a tuple, all of them.
    wanted: (path inside it, place) of its array leaves.
    """

    name: int | str | tuple[int | str, ...]
    wanted: tuple[tuple[str, Any], ...]
    _call: Any
    _positions: tuple[int, ...]

    def rebuilt(self, leaves: Sequence[Any]) -> Any:
        """The argument with these array leaves, and its other leaves as they were."""
        everything: list[Any] = [None] * len(self._call.leaves)
        for position, leaf in zip(self._positions, leaves, strict=True):
            everything[position] = leaf
        args, kwargs = merge_objects(self._call.rebuild(everything))
        if isinstance(self.name, tuple):
            return tuple(args[n] if isinstance(n, int) else kwargs[n] for n in self.name)
        return args[self.name] if isinstance(self.name, int) else kwargs[self.name]


def arguments_of(
    target: ParallelFunction | ParallelPlan, name_of: Callable[[Sequence[Any]], str]
) -> list[Argument]:
    """The arguments of a planned step that hold arrays, state first, and tuples of them. `name_of`:
    from a path to its name in the checkpoint."""
    plan = _plan_of(target)
    if plan.in_tree is None:
        raise ArgumentError(
            f"restore_checkpoint(target={plan.name!r}): a plan read from a file does not know the "
            "structure of the step's arguments. Give the parallelized function, after "
            "step.plan(state, batch), or the plan that it returned."
        )
    call = plan.in_tree[1]
    places = _places(plan, call.leaves)
    arguments = []
    for name in dict.fromkeys(call.argument):
        positions = tuple(i for i, owner in enumerate(call.argument) if owner == name)
        wanted = tuple((name_of(call.key_paths[i]), places[i]) for i in positions)
        arguments.append(Argument(name, wanted, call, positions))
    state = [call.argument[i] for i, tensor in enumerate(plan.inputs) if tensor.role == "state"]
    arguments.sort(key=lambda argument: argument.name not in state)
    names = tuple(dict.fromkeys(state))
    for count in range(2, len(names) + 1):
        positions = [i for name in names[:count] for i, o in enumerate(call.argument) if o == name]
        wanted = tuple(
            (name_of((SequenceKey(names.index(call.argument[i])), *call.key_paths[i])), places[i])
            for i in positions
        )
        arguments.append(Argument(names[:count], wanted, call, tuple(positions)))
    return arguments


def _plan_of(target: ParallelFunction | ParallelPlan) -> ParallelPlan:
    if isinstance(target, ParallelPlan):
        return target
    if target.last_planned is None:
        raise ArgumentError(
            f"restore_checkpoint(target={target!r}): has no plan yet, which gives the shardings of "
            "the state. Call step.plan(state, batch) first; jax.ShapeDtypeStructs will do for "
            "arguments."
        )
    return target.last_planned.plan


def _places(plan: ParallelPlan, leaves: Sequence[Any]) -> list[Any]:
    """Where to place each array of the arguments."""
    types = [
        leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf) for leaf in leaves
    ]
    remote = session.current().remote
    if remote is None and plan.is_pipeline and num_processes() > 1:
        remote = session.process_session()
    if remote is not None:
        return list(input_places(plan, types, remote))
    return [
        place_at(type_.shape, type_.dtype, sharding, bool(getattr(type_, "weak_type", False)))
        for type_, sharding in zip(types, input_shardings(plan, local_devices()), strict=True)
    ]


def input_shardings(
    plan: ParallelPlan, devices: Sequence[Any]
) -> list[NamedSharding | RowShardings]:
    """The sharding of each input of the plan, on the given devices."""
    check_devices(plan, devices)
    meshes = []
    for stage in plan.stages:
        stage_plan = stage.plan or plan
        numbers = stage.devices if stage.plan else range(plan.num_devices)
        grid = np.array([devices[d] for d in numbers], dtype=object).reshape(stage_plan.mesh_shape)
        meshes.append(_jax.fresh_mesh(grid, stage_plan.axis_names))

    def sharding(tensor: Tensor) -> NamedSharding | RowShardings:
        held = zip(tensor.holders(), plan.held_specs(tensor), strict=True)
        parts = [NamedSharding(meshes[stage], spec) for stage, spec in held]
        rows = [one for one in tensor.rows() if one is not None]
        return parts[0] if tensor.split is None else stack_sharding(rows, parts)

    return [sharding(tensor) for tensor in plan.inputs]
