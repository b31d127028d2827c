"""Instructions as Python functions on a list of slots, one slot per buffer of each mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

Slots = list[Any]
Operation = Callable[[Slots], None]


@dataclass(frozen=True)
class RunSlots:
    """What a run reads and writes. Those it may use up are empty afterwards, or written again."""

    reads: tuple[int, ...]
    used_up: tuple[int, ...]
    writes: tuple[int, ...]

    def fill(self, slots: Slots, results: Sequence[Any]) -> None:
        for slot in self.used_up:
            slots[slot] = None
        for slot, result in zip(self.writes, results, strict=True):
            slots[slot] = result


def run_operation(program: Any, own: RunSlots) -> Operation:
    reads = own.reads

    def operation(slots: Slots) -> None:
        own.fill(slots, program(*[slots[slot] for slot in reads]))

    return operation


def run_alone_operation(
    program: Any,
    own: RunSlots,
    latest: list[Any],
    mesh: int,
    witness: int,
) -> Operation:
    """Virtual CPU devices share a pool of threads: programs that run ahead of each other can each
    hold threads the other's collectives wait for, and XLA then ends the process. So a program with
    collectives starts when its arguments are there and the one before it on its mesh is done.

    latest:  per mesh, a result of the last such program. It tells whether that is done.
    witness: which result of this one to keep for that; a small one.
    """

    def operation(slots: Slots) -> None:
        arguments = [slots[slot] for slot in own.reads]
        before = latest[mesh]
        if before is not None and not before.is_deleted():
            before.block_until_ready()
        jax.block_until_ready(arguments)
        results = program(*arguments)
        own.fill(slots, results)
        latest[mesh] = results[witness] if results else None

    return operation


def send_operation(
    send: Callable[[list[Any]], Sequence[Any]], sources: Sequence[int], targets: Sequence[int]
) -> Operation:
    def operation(slots: Slots) -> None:
        arrays = send([slots[slot] for slot in sources])
        for slot, array in zip(targets, arrays, strict=True):
            slots[slot] = array

    return operation


def free_operation(freed: Sequence[int]) -> Operation:
    def operation(slots: Slots) -> None:
        for slot in freed:
            slots[slot] = None

    return operation
