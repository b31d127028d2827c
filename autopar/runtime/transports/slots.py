"""Staging memory that is allocated once and reused: from sizes to slots.

The smallest free slot that is large enough is used; if there is none, a new one is allocated. So
there are never more slots than were in use at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SMALLEST = 2 * 2**20  # CUDA's minimum for memory that other processes map


@dataclass(frozen=True)
class StagingSlot:
    """`pointer`: the address in this process; `handle`: other processes map the memory by it."""

    pointer: int
    num_bytes: int
    handle: str


class StagingSlots:
    """`allocate` takes a number of bytes and returns a pointer and a handle."""

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
        """Remove and return all slots."""
        slots, self._all, self._free = self._all, [], []
        return slots

    def _place(self, size: int) -> tuple[int, int, str]:
        pointer, handle = self._allocate(size)
        return pointer, size, handle
