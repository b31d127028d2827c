"""Instructions as Python functions on a list of slots, one slot per buffer of each mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

Slots = list[Any]
Operation = Callable[[Slots], None]


def run_operation(program: Any, reads: Sequence[int], writes: Sequence[int]) -> Operation:
    def operation(slots: Slots) -> None:
        results = program(*[slots[slot] for slot in reads])
        for slot, result in zip(writes, results, strict=True):
            slots[slot] = result

    return operation


def run_alone_operation(
    program: Any,
    reads: Sequence[int],
    writes: Sequence[int],
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
        arguments = [slots[slot] for slot in reads]
        before = latest[mesh]
        if before is not None and not before.is_deleted():
            before.block_until_ready()
        jax.block_until_ready(arguments)
        results = program(*arguments)
        for slot, result in zip(writes, results, strict=True):
            slots[slot] = result
        latest[mesh] = results[witness] if results else None

    return operation


def send_operation(
    send: Callable[[list[Any]], list[Any]], sources: Sequence[int], targets: Sequence[int]
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
