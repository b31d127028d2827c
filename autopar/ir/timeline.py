"""When what runs: predicted by the simulator, or measured while a step ran.

A `Timeline` is what reports and traces draw. `PipelineTimes` is what the simulator needs of a
pipeline, kept with the plan so that its timeline can be drawn from a plan file alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One instruction on one mesh. `kind` is "run", "send", "recv", "update" …; `phase` that of a
    run ("forward", "backward", "weights", "update" or ""). Seconds count from the step's start."""

    mesh: int
    kind: str
    name: str
    stage: int
    micro_batch: int | None
    start_s: float
    end_s: float
    phase: str = ""
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Timeline:
    events: tuple[Event, ...]
    step_s: float
    num_meshes: int

    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each mesh computes."""
        busy = [0.0] * self.num_meshes
        for event in self.events:
            if event.kind == "run":
                busy[event.mesh] += event.end_s - event.start_s
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The share of the step in which meshes do not compute, on average."""
        whole_s = self.step_s * self.num_meshes
        return 1.0 - sum(self.busy_s()) / whole_s if whole_s else 0.0


@dataclass(frozen=True)
class CrossingTime:
    """What goes from stage to stage after a phase, for each micro-batch (`phase` "forward" or
    "backward") or once in a step (""): bytes of all arrays together, and seconds on the link."""

    source: int
    target: int
    phase: str
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds per stage (of one micro-batch; `update_s` once per step), starting a piece included,
    and of what crosses between stages. `weights_s`: gradients of weights where they are pieces of
    their own, else empty."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...]
    update_s: tuple[float, ...]
    crossings: tuple[CrossingTime, ...]
