"""What the driver tells workers, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.remote import ShardedType


@dataclass(frozen=True)
class Put:
    """An array that the driver sends: its number, how it lies, and for each of this worker's
    devices which of the arrays under `key` is its shard."""

    array: int
    held: ShardedType
    key: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class StepCall:
    """One run of a step.

    inputs, outputs: numbers of arrays, in the order of the mesh's list; outputs are new.
    puts:            arrays that the driver has sent for it, under their numbers.
    freed:           arrays that nobody needs any more.
    dropped:         arrays that nobody needs after the step.
    first_tag:       tags of the step's transfers are counted from here.
    watched:         outputs (by place) whose values the driver gets with the answer.
    """

    task: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    puts: tuple[Put, ...]
    freed: tuple[int, ...]
    dropped: tuple[int, ...]
    first_tag: int
    watched: tuple[int, ...]


@dataclass(frozen=True)
class StepDone:
    values: dict[int, np.ndarray]  # by place among the outputs; of the mesh's first worker only
