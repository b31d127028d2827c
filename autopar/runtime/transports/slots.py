"""Staging memory that is taken once and used again: from sizes to slots.

There are as many slots as are in use at a time. A slot is given to what fits into it best; only if
nothing does, memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SMALLEST = 2 * 2**20  # what CUDA allocates at least for memory that other processes map


@dataclass(frozen=True)
class StagingSlot:
    """pointer: in this process; handle: by which other processes map it."""

    pointer: int
    num_bytes: int
    handle: str


class StagingSlots:
    """`allocate` takes a number of bytes and answers pointer and handle."""

    def __init__(self, allocate: Callable[[int], tuple[int, str]]) -> None:
        self._allocate = allocate
        self._free: list[StagingSlot] = []
        self._all: list[StagingSlot] = []

    def take(self, num_bytes: int) -> StagingSlot:
        fitting = [slot for slot in self._free if slot.num_bytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.num_bytes)
            self._free.remove(slot)
            return slot
        size = _SMALLEST
        while size < num_bytes:
            size *= 2
        slot = StagingSlot(*self._place(size))
        self._all.append(slot)
        return slot

    def give_back(self, slot: StagingSlot) -> None:
        self._free.append(slot)

    def drain(self) -> list[StagingSlot]:
        """All slots, which are no longer its own."""
        slots, self._all, self._free = self._all, [], []
        return slots

    def _place(self, size: int) -> tuple[int, int, str]:
        pointer, handle = self._allocate(size)
        return pointer, size, handle
