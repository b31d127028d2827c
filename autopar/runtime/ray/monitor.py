"""One thread of the driver that watches workers and, when one fails, ends the session with its
reason.

Every `heartbeat_s` each worker and each node's agent is asked for a sign of life. Trouble also
comes in through replies: a call whose actor died, a step that raised. Then, within stated limits,
agents tell what is left of every process, the cause is found (`faults.py`), everything is killed
and everyone who waits is woken.

From the death of a process to the error: at most `heartbeat_s` to notice (at once if a reply is
awaited), and SETTLE_S + REPORT_LIMIT_S + KILL_LIMIT_S to find out and clean up: under 10 s with the
default.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError, WorkerError
from autopar.runtime.ray.faults import Sighting, Trouble, error_about
from autopar.runtime.ray.group import MeshGroup, Reply
from autopar.runtime.ray.session import NodeHandle, Session, Worker
from autopar.runtime.ray.worker import Beat
from autopar.runtime.remote.progress import decode

SETTLE_S = 0.5
REPORT_LIMIT_S = 3.0
KILL_LIMIT_S = 3.0
PATIENCE_S = 1.0  # for processes to end when Ray tells them to


@dataclass(frozen=True)
class _Report:
    """Something that went wrong with a worker, or with an agent's node."""

    worker: Worker | None
    node: NodeHandle | None
    trouble: Trouble
    detail: str = ""
    error: AutoparError | None = None
    seconds: float = 0.0


@dataclass
class _Watched:
    group: MeshGroup
    worker: Worker
    heard_s: float
    asked: bool = False
    beat: Beat | None = None


class Monitor:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._events: queue.Queue[Callable[[], None] | _Report | None] = queue.Queue()
        self._watched: dict[int, _Watched] = {}
        self._replies: set[Reply] = set()
        self._agents_asked: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="autopar-monitor", daemon=True)
        self._thread.start()

    def watch(self, group: MeshGroup) -> None:
        with self._lock:
            for worker in group.workers:
                number = worker.place.worker
                self._watched[number] = _Watched(group, worker, time.monotonic())

    def forget(self, group: MeshGroup, reason: AutoparError) -> None:
        """Its workers are about to be ended on purpose; whoever waits for one gets the reason."""
        with self._lock:
            for worker in group.workers:
                self._watched.pop(worker.place.worker, None)
            replies = [reply for reply in self._replies if reply.worker in group.workers]
        for reply in replies:
            reply.fail(reason)

    def expect(self, reply: Reply) -> None:
        with self._lock:
            self._replies.add(reply)

    def settled(self, reply: Reply) -> None:
        with self._lock:
            self._replies.discard(reply)

    def lost(self, worker: Worker, error: BaseException) -> None:
        """A call to a worker has failed in Ray."""
        self._events.put(_Report(worker, None, Trouble.DIED, str(error)))

    def raised(self, worker: Worker, error: AutoparError) -> None:
        """A step has raised."""
        self._events.put(_Report(worker, None, Trouble.RAISED, str(error), error))

    def stop(self, reason: AutoparError, limit_s: float) -> None:
        """Watch no more; whoever still waits for a reply gets the reason."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)
        self._wake(reason)

    def _work(self) -> None:
        ask_s = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=max(0.0, ask_s - time.monotonic()))
            except queue.Empty:
                ask_s = time.monotonic() + self._session.limits.heartbeat_s
                if not self._session.ray.is_initialized():
                    self._end(WorkerError("Ray was shut down while workers were in use."))
                    return
                self._ask()
                self._look_for_silence()
                continue
            if event is None:
                return
            if not isinstance(event, _Report):
                event()
            elif self._concerns_us(event):
                try:
                    self._fail(event)
                except Exception as error:  # a bug of ours must not leave anybody waiting
                    self._end(WorkerError(f"A worker failed: {event.detail}\n({error!r})"))
                return

    def _concerns_us(self, report: _Report) -> bool:
        with self._lock:
            return report.worker is None or report.worker.place.worker in self._watched

    # Signs of life.

    def _ask(self) -> None:
        with self._lock:
            watched = [entry for entry in self._watched.values() if not entry.asked]
        for entry in watched:
            entry.asked = True
            try:
                call = entry.worker.actor.heartbeat.remote().future()
            except Exception as error:
                self.lost(entry.worker, error)
                continue
            call.add_done_callback(lambda call, entry=entry: self._answered(entry, call))
        for node in self._session.nodes:
            if node.node_id not in self._agents_asked:
                self._agents_asked.add(node.node_id)
                try:
                    call = node.agent.alive.remote().future()
                except Exception as error:
                    self._events.put(_Report(None, node, Trouble.NODE_LOST, str(error)))
                    continue
                call.add_done_callback(lambda call, node=node: self._agent_answered(node, call))

    def _answered(self, entry: _Watched, call: Future[Beat]) -> None:
        error = call.exception()
        if error is not None:
            self.lost(entry.worker, error)
            return
        beat = call.result()
        self._events.put(lambda: self._heard(entry, beat))

    def _agent_answered(self, node: NodeHandle, call: Future[bool]) -> None:
        error = call.exception()
        if error is not None:
            self._events.put(_Report(None, node, Trouble.NODE_LOST, str(error)))
        else:
            self._events.put(lambda: self._agents_asked.discard(node.node_id))

    def _heard(self, entry: _Watched, beat: Beat) -> None:
        entry.asked, entry.beat, entry.heard_s = False, beat, time.monotonic()
        still = beat.standstill
        limits = self._session.limits
        if still and still.seconds > (limits.hang_s if still.is_step else limits.command_s):
            report = _Report(entry.worker, None, Trouble.HUNG, still.command, seconds=still.seconds)
            self._events.put(report)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        with self._lock:
            silent = [
                (entry, now - entry.heard_s)
                for entry in self._watched.values()
                if now - entry.heard_s > self._session.limits.silence_s
            ]
        for entry, seconds in silent:
            self._events.put(_Report(entry.worker, None, Trouble.SILENT, seconds=seconds))

    # The end of a session.

    def _fail(self, first: _Report) -> None:
        reports = [first, *self._further_reports()]
        with self._lock:
            watched = list(self._watched.values())
        sightings = self._sightings(watched, reports)
        if sightings:
            error = error_about(sightings, self._session.describe)
        else:
            node = first.node.described() if first.node else ""
            error = WorkerError(f"The node {node} was lost: {first.detail}", host=node)
        self._end(error)

    def _further_reports(self) -> list[_Report]:
        """What else is reported while peers of a failed worker notice."""
        reports, until = [], time.monotonic() + SETTLE_S
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                if isinstance(event, _Report):
                    reports.append(event)
        return reports

    def _sightings(self, watched: Sequence[_Watched], reports: Sequence[_Report]) -> list[Sighting]:
        told, lost = self._tell_of(watched)
        lost |= {report.node.node_id for report in reports if report.node is not None}
        alive = _within(REPORT_LIMIT_S, self._nodes_alive)
        sightings = []
        for entry in watched:
            node_id = entry.worker.node.node_id
            process, oom_kills = told.get(entry.worker.place.worker, ({}, 0))
            node_alive = node_id not in lost and (alive is None or node_id in alive)
            sighting = Sighting(
                entry.worker.place,
                entry.group.mesh,
                node_alive,
                process.get("state"),
                process.get("log", ""),
                decode(process.get("progress", b"")),
                oom_kills=oom_kills,
                rss_bytes=entry.beat.rss_bytes if entry.beat else 0,
            )
            for number, report in enumerate(reports):
                if report.worker is entry.worker:
                    sighting = replace(
                        sighting,
                        reported=number,
                        trouble=report.trouble,
                        detail=report.detail,
                        error=report.error,
                        seconds=report.seconds,
                    )
                    break
            else:
                sighting = replace(sighting, **self._unreported(entry, reports[0]))
            sightings.append(sighting)
        return sightings

    def _unreported(self, entry: _Watched, first: _Report) -> dict[str, Any]:
        """What is known of a worker that nothing was reported of: it may stand still like the one
        that was reported, and have done so for longer."""
        still = entry.beat.standstill if entry.beat else None
        limits = self._session.limits
        nearly_s = limits.hang_s - 2 * limits.heartbeat_s
        if first.trouble is Trouble.HUNG and still and still.is_step and still.seconds > nearly_s:
            return {"trouble": Trouble.HUNG, "detail": still.command, "seconds": still.seconds}
        return {"seconds": time.monotonic() - entry.heard_s}

    def _tell_of(
        self, watched: Sequence[_Watched]
    ) -> tuple[dict[int, tuple[dict[str, Any], int]], set[str]]:
        """What agents say of processes, by the worker's number, without those that do not answer;
        and the nodes whose agents are gone."""
        calls = {}
        for node in self._session.nodes:
            workers = [entry.worker for entry in watched if entry.worker.node is node]
            if workers:
                call = node.agent.report.remote([worker.described() for worker in workers])
                calls[call.future()] = workers
        told, lost = {}, set()
        for call in wait(calls, REPORT_LIMIT_S).done:
            workers = calls[call]
            if call.exception() is not None:
                lost.add(workers[0].node.node_id)
                continue
            said = call.result()
            for worker, process in zip(workers, said["processes"], strict=True):
                told[worker.place.worker] = process, said["oom_kills"]
        return told, lost

    def _nodes_alive(self) -> set[str]:
        return {node["NodeID"] for node in self._session.ray.nodes() if node["Alive"]}

    def _end(self, error: WorkerError) -> None:
        with self._lock:
            workers = [entry.worker for entry in self._watched.values()]
        with self._session.lock:
            self._session.failure = error
        kill_workers(self._session, workers, KILL_LIMIT_S)
        self._wake(error)

    def _wake(self, error: AutoparError) -> None:
        with self._lock:
            replies = list(self._replies)
        for reply in replies:
            reply.fail(error)


def kill_workers(session: Session, workers: Sequence[Worker], limit_s: float) -> None:
    """End processes: by Ray first, so that it does not wonder, then by the agents."""
    if not session.ray.is_initialized():  # it has ended them
        return
    for worker in workers:
        with contextlib.suppress(Exception):
            session.ray.kill(worker.actor)
    calls = []
    for node in session.nodes:
        processes = [(w.hello.pid, w.hello.started) for w in workers if w.node is node]
        if processes:
            with contextlib.suppress(Exception):
                calls.append(node.agent.end.remote(processes, PATIENCE_S, limit_s).future())
    wait(calls, limit_s)


def _within(limit_s: float, call: Callable[[], Any]) -> Any:
    """A call that may never return; None if it does not, or raises."""
    answer: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        with contextlib.suppress(Exception):
            answer.put(call())

    threading.Thread(target=work, daemon=True).start()
    try:
        return answer.get(timeout=limit_s)
    except queue.Empty:
        return None
