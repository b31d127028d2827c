"""From the sightings of all workers after a failure to the one error that explains it.

One worker is the cause; others may have ended because of it. JAX ends a process whose peers are
gone and logs that, collectives raise when a connection breaks, and processes that share a GPU may
lose its MPS server when one of them dies: such workers are consequences.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from autopar.errors import AutoparError, WorkerError
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import NOWHERE, State

NUM_LOG_LINES = 20
NOT_BEGUN = State()
STOPPED = ("T", "t")  # the kernel's letters for processes stopped by a signal or a debugger
# Logged by JAX's coordination service when it ends a process, and by collectives and sockets that
# have lost the other side.
_ENDED_BY_JAX = re.compile(
    r"JAX distributed service detected fatal errors|CoordinationServiceAgent|"
    r"coordination service",
    re.IGNORECASE,
)
# CUDA's errors in the processes that shared a GPU with one that has died.
_MPS = r"CUDA_ERROR_MPS_\w+|MPS (client|server)"
_ENDED_BY_MPS = re.compile(_MPS)
_LOST_A_PEER = re.compile(
    r"gloo|connection (reset|closed|refused)|broken pipe|coordination service|"
    r"endpoint is not connected|socket closed|(recv|send)\(\) failed|"
    r"peer|remote (process|host)|nccl(Remote|System|Internal)Error|ConnectionError|EOFError|"
    rf"{_MPS}",
    re.IGNORECASE,
)
_LOW_ON_MEMORY = (
    "low on memory"  # in Ray's messages about processes that its memory monitor has killed
)
_RAY_NOTES = (":job_id:", ":actor_name:", ":task_name:")


class Trouble(IntEnum):
    """How a worker was found, in the order of the likeliest cause."""

    NODE_LOST = 0
    DIED = 1
    RAISED = 2
    SILENT = 3
    HUNG = 4
    AGENT_LOST = 5
    CONSEQUENCE = 6
    NONE = 7


@dataclass(frozen=True)
class Sighting:
    """What is known about one worker.

    reported:   the number of its report, in their order; None without a report.
    trouble:    the kind of the report.
    process:    the kernel's letter for its process, empty if it has ended; None if unknown.
    detail:     Ray's message, or the exception.
    command:    the name of the command that it was running, if known.
    error:      what it raised.
    agent_gone: Ray's message about the end of its node's agent, if that has ended.
    oom_kills:  processes that the kernel killed to free memory on its node in this session.
    seconds:    of silence or of standstill.
    """

    place: WorkerPlace
    mesh: int
    node_alive: bool
    process: str | None
    log: str = ""
    state: State = NOT_BEGUN
    command: str = ""
    reported: int | None = None
    trouble: Trouble = Trouble.NONE
    detail: str = ""
    error: AutoparError | None = None
    agent_gone: str | None = None
    oom_kills: int = 0
    rss_bytes: int = 0
    seconds: float = 0.0

    def kind(self) -> Trouble:
        if not self.node_alive:
            return Trouble.NODE_LOST
        if self.process in STOPPED:
            return Trouble.SILENT
        if self.trouble is Trouble.RAISED and self.process != "":
            lost_peer = _LOST_A_PEER.search(self.detail)
            return Trouble.CONSEQUENCE if lost_peer else Trouble.RAISED
        if self.process == "" or self.trouble is Trouble.DIED:
            is_consequence = _ENDED_BY_JAX.search(self.log) or _ENDED_BY_MPS.search(self.log)
            return Trouble.CONSEQUENCE if is_consequence else Trouble.DIED
        if self.trouble is Trouble.NONE and self.agent_gone is not None:
            return Trouble.AGENT_LOST
        return self.trouble

    def short_of_memory(self) -> bool:
        """Whether Ray reports that it killed the worker, or the agent beside it, to free memory."""
        return any(_LOW_ON_MEMORY in said for said in (self.detail, self.agent_gone or ""))


def cause_of(sightings: Sequence[Sighting]) -> Sighting:
    """The worker that caused the failure: by kind of trouble, then by the first report; among
    hanging workers, the one that stopped first."""

    def order(sighting: Sighting) -> tuple[float, ...]:
        kind = sighting.kind()
        reported = float("inf") if sighting.reported is None else sighting.reported
        if kind is Trouble.HUNG:
            return kind, sighting.state.time_s, reported
        return kind, reported, sighting.state.time_s

    return min(sightings, key=order)


def error_about(
    sightings: Sequence[Sighting],
    describe: Callable[[WorkerPlace, State], tuple[int | None, str]],
) -> WorkerError:
    """The driver's error: first the cause, then the other workers."""
    cause = cause_of(sightings)
    place = cause.place
    stage, instruction = None, ""
    if cause.state.count:
        with contextlib.suppress(Exception):  # a less detailed error is better than none
            stage, instruction = describe(place, cause.state)
        if cause.state.command == NOWHERE:
            last = f"; the last instruction was: {instruction}" if instruction else ""
            instruction = f"between commands{last}"
        elif not instruction and cause.command:
            instruction = f"the command {cause.command!r}"
    where = f"host {place.host} ({place.node}), mesh {cause.mesh}"
    if stage is not None:
        where += f", stage {stage}"
    if instruction:
        where += f", at: {instruction}"
        if cause.process is None:
            where += " (by its last heartbeat)"
    lines = [f"Worker {place.worker} {_what_happened(cause)}", f"  {where}"]
    lines += [
        f"  worker {other.place.worker} (host {other.place.host}, mesh {other.mesh}) "
        f"{_what_followed(other)}"
        for other in sightings
        if other is not cause and other.kind() is not Trouble.NONE
    ]
    lines.append(
        "All workers of the session were ended. Call autopar.shutdown() and autopar.init(…), and "
        "go on from a checkpoint; autopar.run_training does so by itself."
    )
    tail = log_lines(cause.log)
    if tail:
        lines += ["The last lines of its log:", *(f"  | {line}" for line in tail)]
    elif cause.process is not None:
        lines.append("It has written nothing to its log.")
    else:
        lines.append("Its log cannot be read.")
    error = WorkerError(
        "\n".join(lines),
        host=place.node,
        mesh=cause.mesh,
        stage=stage,
        instruction=instruction,
        log_tail="\n".join(tail),
    )
    error.__cause__ = cause.error
    return error


def _what_happened(cause: Sighting) -> str:
    match cause.kind():
        case Trouble.NODE_LOST:
            return "was lost with its node, which Ray cannot reach any more."
        case Trouble.DIED | Trouble.AGENT_LOST if cause.short_of_memory():
            return (
                "was ended by Ray's memory monitor, since its node was low on memory. Use less "
                "memory on the host, fewer workers per node, or larger nodes."
            )
        case Trouble.DIED if cause.oom_kills:
            return (
                "was ended, most likely by the kernel for want of memory: the kernel has ended "
                f"{cause.oom_kills} process(es) on that node during this session. The worker last "
                f"held {cause.rss_bytes / 2**30:.1f} GiB. Use less memory on the host, fewer "
                "workers per node, or larger nodes."
            )
        case Trouble.DIED:
            return "died: its process has ended by a signal or a crash, without saying why to Ray."
        case Trouble.RAISED:
            return f"raised an exception in a step.\n{cause.detail.rstrip()}"
        case Trouble.SILENT:
            if cause.process is None:
                more = ", and its node does not answer either"
            elif cause.process in STOPPED:
                more = ": its process is stopped (SIGSTOP)"
            else:
                more = ""
            return f"has not answered for {cause.seconds:.0f} s{more}."
        case Trouble.HUNG:
            return f"hangs: no progress for {cause.seconds:.0f} s in {cause.detail}"
        case Trouble.AGENT_LOST:
            return f"lost its node's agent: {_first_line(cause.agent_gone or '')}"
        case Trouble.CONSEQUENCE if cause.trouble is Trouble.RAISED:
            return f"lost a peer in a step.\n{cause.detail.rstrip()}"
        case _:
            return "was ended by JAX, since a process of its mesh was gone."


def _what_followed(other: Sighting) -> str:
    match other.kind():
        case Trouble.NODE_LOST:
            return "was lost with its node."
        case Trouble.DIED:
            return "died too."
        case Trouble.RAISED:
            return f"raised too: {_first_line(other.detail)}"
        case Trouble.SILENT:
            return f"has not answered for {other.seconds:.0f} s either."
        case Trouble.HUNG:
            return f"has made no progress for {other.seconds:.0f} s either."
        case Trouble.AGENT_LOST:
            return "lost its node's agent."
        case _:
            return "ended or raised as a consequence: it lost another process."


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")


def log_lines(log: str) -> list[str]:
    lines = [line for line in log.splitlines() if not line.startswith(_RAY_NOTES)]
    return lines[-NUM_LOG_LINES:]
