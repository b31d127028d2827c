"""State in host memory: how a step's program is cut for it, and what a plan says of it.

The optimizer's state is read by nothing but the update. It can lie in the memory of the host, if
the update runs as programs of its own, group by group: while one group is updated and stored, the
next one is fetched, and only these two are on the device. A parameter that is computed with in a
narrower type is read by its cast as well: it is fetched once more, group by group, at the start of
the step, and between the two only the narrow copy is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class HostGroup:
    """State that one program takes from host memory: to cast it, or to update it and put it back.

    inputs:    of the step, by index.
    equations: of the step's program that read it, with what belongs to them: a half-open range.
    """

    inputs: tuple[int, ...]
    equations: tuple[int, int]


@dataclass(frozen=True)
class HostCut:
    """A program whose equations are in the order in which they run: casts of parameters in host
    memory, all that needs nothing from there, then the update.

    groups:      of the update.
    num_bytes:   of all inputs in host memory.
    group_bytes: of the largest group.
    casts:       groups of casts.
    """

    groups: tuple[HostGroup, ...]
    num_bytes: float
    group_bytes: float
    casts: tuple[HostGroup, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """All inputs in host memory, by index, in the order of their groups."""
        return tuple(i for group in self.groups for i in group.inputs)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Those of the inputs that are cast before the update."""
        return tuple(i for group in self.casts for i in group.inputs)

    @property
    def early(self) -> tuple[int, int]:
        """The equations between casts and update: a half-open range."""
        start = self.casts[-1].equations[1] if self.casts else 0
        return start, self.groups[0].equations[0]


@dataclass(frozen=True)
class HostMemory:
    """What a plan keeps in host memory.

    inputs, outputs: of the step, by index: its state, old and new.
    num_groups:      of the update; 0 for a function that only makes or takes such arrays.
    num_bytes:       in host memory, per device.
    transfer_s:      to fetch them, while others are stored, in every step.
    parameters:      inputs that the step computes with in a narrower type.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    num_groups: int = 0
    num_bytes: float = 0.0
    transfer_s: float = 0.0
    parameters: tuple[int, ...] = ()

    def fault(self, num_inputs: int, num_outputs: int) -> str | None:
        """What is wrong with it, beside so many inputs and outputs; None if nothing is."""
        for name, indices, count in (
            ("inputs", self.inputs, num_inputs),
            ("outputs", self.outputs, num_outputs),
        ):
            if len(set(indices)) != len(indices) or not all(0 <= i < count for i in indices):
                return f"{name}: {indices!r:.60}"
        if not set(self.parameters) <= set(self.inputs):
            return f"parameters: {self.parameters!r:.60}"
        if self.num_groups < 0 or bool(self.num_groups) > bool(self.inputs):
            return f"num_groups: {self.num_groups}"
        for name in ("num_bytes", "transfer_s"):
            if not 0 <= getattr(self, name) < inf:
                return f"{name}: {getattr(self, name)}"
        return None
