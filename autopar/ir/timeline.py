"""When what runs: predicted by the simulator, or measured while a step ran.

A `Timeline` is what reports and traces draw. `PipelineTimes` is what the simulator needs of a
pipeline, kept with the plan so that its timeline can be drawn from a plan file alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """`memory`: per mesh, (seconds, bytes on one device from then on); empty if not known."""

    events: tuple[Event, ...]
    step_s: float
    num_meshes: int
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()

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
class StageProgramTime:
    """A stage program of a pipeline and what one run of it takes; `phase` is the value of a
    `Phase`."""

    stage: int
    phase: str
    part: int
    seconds: float


@dataclass(frozen=True)
class MeshTransferTime:
    """Arrays that go from stage to stage together, for each micro-batch (`phase` "forward",
    "backward" …, that of the stage program which makes them) or once in a step (""): bytes of all
    arrays together, and seconds on the link, of which `latency_s` is paid once for all that is sent
    at a time.

    value:       equal for arrays that go to several stages, or on from one to the next.
    micro_batch: None for what there is once, −1 for one of each, or a micro-batch's number.
    writers, readers: the stage programs (numbers in `PipelineTimes.stage_programs`) that write it
    anywhere and read
                 it anywhere, and the micro-batch's array that they touch, as above (−1 for a stage
                 program that runs once: all of them).
    is_result:   it is a result of the step on the stage that it goes to.
    """

    source: int
    target: int
    phase: str
    num_bytes: float
    seconds: float
    latency_s: float = 0.0
    value: int = 0
    micro_batch: int | None = None
    writers: tuple[tuple[int, int | None], ...] = ()
    readers: tuple[tuple[int, int | None], ...] = ()
    is_result: bool = False


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds per stage (of one micro-batch; `update_s` once per step, what is prepared included),
    starting a stage program included, and of what crosses between stages. `weights_s`: gradients of
    weights where they are stage programs of their own, else empty.

    stage programs:     every stage program by itself, from which the step can be simulated.
    held_bytes: per stage, on one device: held all the time.
    kept_bytes: per stage, on one device: kept of each micro-batch until its last phase.
    working_bytes: per stage, on one device: held besides while a stage program runs.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...]
    update_s: tuple[float, ...]
    crossings: tuple[MeshTransferTime, ...]
    stage_programs: tuple[StageProgramTime, ...] = field(default=(), metadata={"key": "pieces"})
    held_bytes: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()
    working_bytes: tuple[float, ...] = ()
