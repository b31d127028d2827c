"""The driver's thread that watches workers and ends the session, with a reason, when one fails.

Every `heartbeat_s` it asks each worker and each node's agent for a sign of life. Replies report
failures too: a call whose actor died, a step that raised. Then, within stated limits, it finds out
the state of every process (`evidence.py`) and the cause (`faults.py`), kills everything and wakes
everyone who waits.

From the death of a process to the error: at most `heartbeat_s` to notice (nothing if a reply is
awaited), plus SETTLE_S + REPORT_LIMIT_S + NODES_LIMIT_S + KILL_LIMIT_S to find the cause and clean
up: under 10 s by default.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from autopar.errors import AutoparError, WorkerError
from autopar.runtime.ray.evidence import Report, Watched, sightings_of
from autopar.runtime.ray.faults import Trouble, error_about
from autopar.runtime.ray.group import MeshGroup, Reply
from autopar.runtime.ray.session import NodeHandle, RaySession, Worker
from autopar.runtime.ray.worker import Beat

SETTLE_S = 0.5
KILL_LIMIT_S = 2.5
PATIENCE_S = 1.0  # for processes to end at Ray's request


class Monitor:
    def __init__(self, session: RaySession) -> None:
        self._session = session
        self._events: queue.Queue[Callable[[], None] | Report | None] = queue.Queue()
        self._watched: dict[int, Watched] = {}
        self._replies: set[Reply] = set()
        self._agents_asked: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="autopar-monitor", daemon=True)
        self._thread.start()

    def watch(self, group: MeshGroup) -> None:
        with self._lock:
            for worker in group.workers:
                number = worker.place.worker
                self._watched[number] = Watched(group, worker, time.monotonic())

    def forget(self, group: MeshGroup, reason: AutoparError) -> None:
        """Its workers are ended on purpose; everyone who waits for one gets the reason."""
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
        self._events.put(Report(worker, None, Trouble.DIED, str(error)))

    def raised(self, worker: Worker, error: AutoparError) -> None:
        """A step has raised."""
        self._events.put(Report(worker, None, Trouble.RAISED, str(error), error))

    def stop(self, reason: AutoparError, limit_s: float) -> None:
        """Stop watching; everyone who still waits for a reply gets the reason."""
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
            if not isinstance(event, Report):
                event()
            elif self._concerns_us(event):
                try:
                    self._fail(event)
                except Exception as error:  # even with a bug of ours, nobody may wait forever
                    self._end(WorkerError(f"A worker failed: {event.detail}\n({error!r})"))
                return

    def _concerns_us(self, report: Report) -> bool:
        with self._lock:
            return report.worker is None or report.worker.place.worker in self._watched

    # -- signs of life

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
                    self._events.put(Report(None, node, Trouble.AGENT_LOST, str(error), lost=error))
                    continue
                call.add_done_callback(lambda call, node=node: self._agent_answered(node, call))

    def _answered(self, entry: Watched, call: Future[Beat]) -> None:
        error = call.exception()
        if error is not None:
            self.lost(entry.worker, error)
            return
        beat = call.result()
        self._events.put(lambda: self._heard(entry, beat))

    def _agent_answered(self, node: NodeHandle, call: Future[bool]) -> None:
        error = call.exception()
        if error is not None:
            self._events.put(Report(None, node, Trouble.AGENT_LOST, str(error), lost=error))
        else:
            self._events.put(lambda: self._agents_asked.discard(node.node_id))

    def _heard(self, entry: Watched, beat: Beat) -> None:
        entry.asked, entry.beat, entry.heard_s = False, beat, time.monotonic()
        still = beat.standstill
        if still and still.seconds > self._session.limits.of(still.command, still.is_step):
            option = "hang_limit_s" if still.is_step else "command_limit_s"
            detail = (
                f"{still.command!r}. If that is how long it takes, raise init({option}=…), which "
                f"is {self._session.limits.of('', still.is_step):g} s."
            )
            report = Report(entry.worker, None, Trouble.HUNG, detail, seconds=still.seconds)
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
            self._events.put(Report(entry.worker, None, Trouble.SILENT, seconds=seconds))

    # -- the end of a session

    def _fail(self, first: Report) -> None:
        reports = [first, *self._further_reports()]
        with self._lock:
            watched = list(self._watched.values())
        sightings = sightings_of(self._session, watched, reports)
        if sightings:
            error = error_about(sightings, self._session.describe)
        else:
            node = first.node.described() if first.node else ""
            error = WorkerError(f"The node {node} was lost: {first.detail}", host=node)
        self._end(error)

    def _further_reports(self) -> list[Report]:
        """Reports that arrive while the peers of a failed worker notice."""
        reports, until = [], time.monotonic() + SETTLE_S
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                if isinstance(event, Report):
                    reports.append(event)
        return reports

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


def kill_workers(session: RaySession, workers: Sequence[Worker], limit_s: float) -> None:
    """End processes: first by Ray, so that it expects their end, then by the agents."""
    if not session.ray.is_initialized():  # then Ray has ended them
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
