"""From instructions to Python functions on a list of slots, one slot per buffer of each mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.runtime.threads import run_alone

Program = Callable[..., Sequence[jax.Array]]
Slots = list[Any]  # arrays, or None for empty slots
Operation = Callable[[Slots], None]


@dataclass(frozen=True)
class RunSlots:
    """The slots that a run reads and writes. Those that it uses up are empty afterwards, unless it
    writes them again."""

    reads: tuple[int, ...]
    used_up: tuple[int, ...]
    writes: tuple[int, ...]

    def fill(self, slots: Slots, results: Sequence[jax.Array]) -> None:
        for slot in self.used_up:
            slots[slot] = None
        for slot, result in zip(self.writes, results, strict=True):
            slots[slot] = result


def run_operation(program: Program, run: RunSlots) -> Operation:
    reads = run.reads

    def operation(slots: Slots) -> None:
        run.fill(slots, program(*[slots[slot] for slot in reads]))

    return operation


def run_alone_operation(program: Program, run: RunSlots, devices: Sequence[Any]) -> Operation:
    """A run on virtual CPU devices, alone on each (`threads.py`)."""

    def operation(slots: Slots) -> None:
        run.fill(slots, run_alone(program, [slots[slot] for slot in run.reads], devices))

    return operation


def send_operation(
    send: Callable[[list[jax.Array]], Sequence[jax.Array]],
    sources: Sequence[int],
    targets: Sequence[int],
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
