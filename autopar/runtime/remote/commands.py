"""Commands of the driver to workers, with their arguments and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.ir.remote import ShardedType

# The methods of `Executor` that carry them out.
CommandName = Literal[
    "announce",
    "clock",
    "compiled",
    "connect",
    "fetch",
    "free",
    "has_room",
    "hlo_texts",
    "load",
    "open",
    "prepare",
    "put",
    "record",
    "recorded",
    "reshard",
    "restore",
    "save",
    "start_profile",
    "stats",
    "step",
    "stop_profile",
    "transports",
    "unload",
    "wait",
]


@dataclass(frozen=True)
class Put:
    """An array that the driver sends: its number and type, and for each of this worker's devices
    which of the arrays under `key` is its shard."""

    array: int
    type: ShardedType
    key: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class StepCall:
    """One run of a step.

    inputs, outputs: numbers of arrays, in the order of the mesh's list; outputs are new.
    puts:            arrays that the driver has sent for it, under their numbers.
    freed:           arrays that nobody needs any more.
    dropped:         arrays that nobody needs after the step.
    first_tag:       tags of the step's transfers count from here.
    watched:         outputs, by place, whose values the driver gets with the answer.
    """

    task: int
    inputs: tuple[int, ...]
    outputs: Sequence[int]
    puts: tuple[Put, ...]
    freed: tuple[int, ...]
    dropped: tuple[int, ...]
    first_tag: int
    watched: tuple[int, ...]


@dataclass(frozen=True)
class StepDone:
    """The answer to a `StepCall`: values of watched outputs, by place, from the mesh's first
    worker."""

    values: dict[int, np.ndarray]
