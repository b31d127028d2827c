"""Arguments of a step on a cluster: from the leaves of a call to numbers of arrays on each mesh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.remote import BoundBuffer, ShardedType
from autopar.ir.rows import Rows, take_rows
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.commands import Put
from autopar.runtime.remote.mesh import RemoteMesh
from autopar.runtime.remote.move import move
from autopar.runtime.remote.session import RemoteSession, same_shards


class MeshArguments(NamedTuple):
    """The arguments that one mesh needs: the numbers of their arrays, the arrays among them to drop
    after the step, and what each worker has to put on its devices first."""

    numbers: tuple[int, ...]
    dropped: tuple[int, ...]
    puts: Sequence[tuple[Put, ...]]


class WantedArguments:
    """What one mesh needs in every call. `donated`: positions of the arguments that the step uses
    up."""

    def __init__(self, buffers: Sequence[BoundBuffer], donated: Collection[int]) -> None:
        self.buffers = tuple(buffers)
        entries = [(place, one, one.position in donated) for place, one in enumerate(buffers)]
        # (place, buffer, whether it is used up). Those that are come last: others may read the
        # same array.
        self.in_order = sorted(entries, key=lambda entry: entry[2])
        self.num_donated = sum(is_donated for _, _, is_donated in entries)

    def bytes_there(self, mesh: RemoteMesh, leaves: Sequence[Any]) -> int:
        """Per device, of those that are on the mesh as the step wants them."""
        there: dict[int | None, int] = {}
        for one in self.buffers:
            leaf = leaves[one.position]
            copies = leaf.copies if isinstance(leaf, DistributedArray) else ()
            there[_copy_on(copies, mesh, one)] = one.type.shard_bytes
        return sum(size for number, size in there.items() if number is not None)


@dataclass
class StepArguments:
    """Gathers the arguments of one call, mesh by mesh. `donated`: positions of the arguments that
    the step uses up."""

    session: RemoteSession
    leaves: Sequence[Any]
    donated: Collection[int]
    num_calls: int = 0  # remote procedure calls made so far
    uploaded_bytes: int = 0
    _given: set[int] = field(default_factory=set)  # numbers of arrays that meshes get
    _used_up: set[int] = field(default_factory=set)  # those among them that the step uses up
    _taken: list[DistributedArray] = field(default_factory=list)
    _fetched: dict[int, Any] = field(default_factory=dict)  # values, by position

    def gather(self, mesh: RemoteMesh, wanted: WantedArguments) -> MeshArguments:
        numbers: dict[int, int] = {}  # by place among the arguments
        dropped: list[int] = []
        copies: list[tuple[int, int, ShardedType]] = []
        new: list[tuple[int, BoundBuffer, bool]] = []  # what no worker holds yet
        leaves, given, used_up = self.leaves, self._given, self._used_up
        for entry in wanted.in_order:
            place, argument, is_donated = entry
            leaf = leaves[argument.position]
            found = leaf.copies if isinstance(leaf, DistributedArray) else ()
            if not found:
                new.append(entry)
                continue
            number = _copy_on(found, mesh, argument)
            if number is None and (leaf.is_in_parts or argument.rows is not None):
                self._fetch(argument.position, leaf)
                new.append(entry)
                continue
            if number is None:
                number = move(self.session, leaf, mesh, argument.type)
                if not is_donated:
                    dropped.append(number)
            elif is_donated and number in given:
                source, number = number, self.session.new_number(mesh)
                copies.append((source, number, argument.type))
            numbers[place] = number
            given.add(number)
            if is_donated:
                used_up.add(number)
                self._taken.append(leaf)
        puts = self._upload(mesh, new, numbers, dropped)
        if copies:
            mesh.submit("reshard", copies, fatal=True)
            self.num_calls += len(mesh.places)
        mesh.group.num_arrays -= len(dropped) + wanted.num_donated
        in_list = tuple([numbers[place] for place in range(len(wanted.buffers))])
        return MeshArguments(in_list, tuple(dropped), puts)

    def _fetch(self, position: int, leaf: DistributedArray) -> None:
        """Bring a value here, to be sent where it is needed: of a stack that is split otherwise."""
        if position not in self._fetched:
            self._fetched[position] = leaf.fetch()
            if position in self.donated:
                self._taken.append(leaf)

    def _value(self, position: int) -> Any:
        return self._fetched[position] if position in self._fetched else self.leaves[position]

    def _upload(
        self,
        mesh: RemoteMesh,
        new: Sequence[tuple[int, BoundBuffer, bool]],
        numbers: dict[int, int],
        dropped: list[int],
    ) -> Sequence[tuple[Put, ...]]:
        """Send the values that no worker holds yet; adds to `numbers` and `dropped`."""
        if not new:
            return [()] * len(mesh.places)
        values = [(rows_of(self._value(one.position), one.rows), one.type) for _, one, _ in new]
        uploaded, puts = self.session.upload(mesh, values)
        self.uploaded_bytes += sum(argument.type.nbytes for _, argument, _ in new)
        for (place, _, is_donated), number in zip(new, uploaded, strict=True):
            numbers[place] = number
            if not is_donated:
                dropped.append(number)
        return puts

    def use_up(self) -> None:
        """Empty the handles of donated arguments. Copies of them that the step did not use, because
        it wanted them elsewhere or in another layout, are freed."""
        for leaf in self._taken:
            for copy in leaf.take():
                if copy.number not in self._used_up:
                    copy.mesh.release(copy.number)


def _copy_on(copies: Sequence[Copy], mesh: RemoteMesh, argument: BoundBuffer) -> int | None:
    """The number of an array's copy on a mesh, if it has the wanted rows and shards."""
    type_, rows = argument.type, argument.rows
    for copy in copies:
        is_there = copy.mesh is mesh and copy.rows == rows
        if is_there and (copy.type is type_ or same_shards(copy.type, type_)):
            return copy.number
    return None


def rows_of(value: Any, rows: Rows | None) -> Any:
    """Rows of a value; None for all."""
    if rows is None:
        return value
    return take_rows(np.asarray(value) if isinstance(value, DistributedArray) else value, rows)
