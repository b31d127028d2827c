"""The programs of a step with state in host memory, as data between lowering and running.

Programs hand arrays to each other by slots, which have a type and a place. The first slots are the
step's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

HOST_KIND = "pinned_host"  # JAX's name for the memory


@dataclass(frozen=True)
class HostProgram:
    """One program: a function from what it reads to what it writes, both slots on the device.

    fetches: (slot in host memory, slot that the program reads): moved before it runs.
    stores:  (slot that the program writes, slot in host memory): moved after it has run.
    used_up: slots that nothing reads later, and that the step may overwrite or free.
    """

    name: str
    function: Callable[..., list[Any]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fetches: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    used_up: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostPrograms:
    """programs: in the order in which they run.
    slots:    type and place of every slot.
    outputs:  the slot of every result.
    on_host:  the slots in host memory.
    main:     position of the program with forward and backward pass.
    """

    programs: tuple[HostProgram, ...]
    slots: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[int, ...]
    on_host: frozenset[int]
    main: int = 0

    def is_on_host(self, slot: int) -> bool:
        return slot in self.on_host
