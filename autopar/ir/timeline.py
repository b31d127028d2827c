"""What runs when in a step: predicted by the simulator, or measured.

Reports and traces draw a `Timeline`. `PipelineTimes` is the simulator's input for a pipeline, kept
in the plan so that a plan file alone gives its timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """One instruction on one mesh. `kind` is "run", "send", "recv", "update" …; `phase` that of a
    run ("forward", "backward", "weights", "update" or ""). Times are since the step's start."""

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
    """`memory`: per mesh, (seconds, bytes on one device from then on); empty if unknown."""

    events: tuple[Event, ...]
    step_s: float
    num_meshes: int
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()

    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each mesh computes."""
        busy = [0.0] * self.num_meshes
        for event in self.events:
            if event.kind == "run":
                busy[event.mesh] += event.end_s - event.start_s
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The average share of the step in which meshes do not compute."""
        whole_s = self.step_s * self.num_meshes
        return 1.0 - sum(self.busy_s()) / whole_s if whole_s else 0.0


@dataclass(frozen=True)
class StageProgramTime:
    """The seconds of one run of a stage program; `phase` is the value of a `Phase`."""

    stage: int
    phase: str
    part: int
    seconds: float


@dataclass(frozen=True)
class MeshTransferTime:
    """Arrays that are sent from stage to stage together, for each micro-batch (`phase` is that of
    the stage program that produces them) or once per step (""): their bytes, and seconds on the
    link, of which `latency_s` is paid once for everything sent at a time.

    value:       equal for arrays that go to several stages, or on from one to the next.
    micro_batch: None for an array that exists once, −1 for one per micro-batch, or a number.
    writers, readers: (stage program as an index into `PipelineTimes.stage_programs`, micro-batch
                 as above) that write and read it, on any stage; −1 of a stage program that runs
                 once means all micro-batches.
    is_result:   it is a result of the step on the target stage.
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
    """Seconds per stage and of transfers between stages. Stages count one micro-batch, `update_s`
    one step with its preparation; launching stage programs is included. `weights_s`: gradients of
    weights where they are separate stage programs, else empty.

    stage_programs: each stage program, for the simulator.
    held_bytes:     per stage, on one device: held all the time.
    kept_bytes:     per stage, on one device: kept per micro-batch until its last phase.
    working_bytes:  per stage, on one device: held additionally while a stage program runs.
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
