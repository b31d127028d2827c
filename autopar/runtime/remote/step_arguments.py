"""Arguments of a step on a cluster: from the leaves of a call to numbers of arrays on each mesh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.ir.remote import BoundBuffer, ShardedType
from autopar.runtime.remote.arrays import DistributedArray
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


@dataclass
class StepArguments:
    """Gathers the arguments of one call, mesh by mesh. `donated`: positions of the arguments that
    the step uses up."""

    session: RemoteSession
    leaves: Sequence[Any]
    donated: Collection[int]
    num_calls: int = 0  # remote procedure calls made so far
    uploaded_bytes: int = 0
    _used_up: set[int] = field(default_factory=set)  # numbers of arrays
    _taken: list[DistributedArray] = field(default_factory=list)

    def gather(self, mesh: RemoteMesh, arguments: Sequence[BoundBuffer]) -> MeshArguments:
        numbers: dict[int, int] = {}  # by place among the arguments
        dropped: list[int] = []
        copies: list[tuple[int, int, ShardedType]] = []
        # Donated arguments come last: others may read the same array.
        in_order = sorted(enumerate(arguments), key=lambda entry: self._is_donated(entry[1]))
        for place, argument in in_order:
            leaf = self.leaves[argument.position]
            if not isinstance(leaf, DistributedArray):
                continue
            is_donated = self._is_donated(argument)
            number = _copy_on(leaf, mesh, argument.type)
            if number is None:
                number = move(self.session, leaf, mesh, argument.type)
                if not is_donated:
                    dropped.append(number)
            elif is_donated and (number in self._used_up or number in numbers.values()):
                source, number = number, self.session.new_number(mesh)
                copies.append((source, number, argument.type))
            numbers[place] = number
            if is_donated:
                self._used_up.add(number)
                self._taken.append(leaf)
        puts = self._upload(mesh, arguments, numbers, dropped)
        if copies:
            mesh.submit("reshard", copies, fatal=True)
            self.num_calls += len(mesh.places)
        mesh.group.num_arrays -= len(dropped) + sum(map(self._is_donated, arguments))
        in_list = tuple(numbers[place] for place in range(len(arguments)))
        return MeshArguments(in_list, tuple(dropped), puts)

    def _is_donated(self, argument: BoundBuffer) -> bool:
        return argument.position in self.donated

    def _upload(
        self,
        mesh: RemoteMesh,
        arguments: Sequence[BoundBuffer],
        numbers: dict[int, int],
        dropped: list[int],
    ) -> Sequence[tuple[Put, ...]]:
        """Send the values that no worker holds yet; adds to `numbers` and `dropped`."""
        new = [(place, a) for place, a in enumerate(arguments) if place not in numbers]
        if not new:
            return [()] * len(mesh.places)
        values = [(self.leaves[argument.position], argument.type) for _, argument in new]
        uploaded, puts = self.session.upload(mesh, values)
        self.uploaded_bytes += sum(argument.type.nbytes for _, argument in new)
        for (place, argument), number in zip(new, uploaded, strict=True):
            numbers[place] = number
            if not self._is_donated(argument):
                dropped.append(number)
        return puts

    def use_up(self) -> None:
        """Empty the handles of donated arguments. Copies of them that the step did not use, because
        it wanted them elsewhere or in another layout, are freed."""
        for leaf in self._taken:
            for copy in leaf.take():
                if copy.number not in self._used_up:
                    copy.mesh.release(copy.number)


def _copy_on(leaf: DistributedArray, mesh: RemoteMesh, type_: ShardedType) -> int | None:
    """The number of the array's copy on a mesh, if it has the wanted shards."""
    for copy in leaf.copies:
        if copy.mesh is mesh and same_shards(copy.type, type_):
            return copy.number
    return None
