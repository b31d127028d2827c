"""From reports of failures and the agents' view of every process to a sighting of each worker.

Agents, and Ray for the nodes themselves, are asked before anything is killed, each within a limit,
since any of them may be what failed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.runtime.ray.faults import Sighting, Trouble
from autopar.runtime.ray.group import MeshGroup
from autopar.runtime.ray.session import Limits, NodeHandle, RaySession, Worker
from autopar.runtime.ray.worker import Beat
from autopar.runtime.remote.progress import decode

REPORT_LIMIT_S = 2.5
NODES_LIMIT_S = 2.0  # for Ray to notice that a node is gone, after its agent


@dataclass(frozen=True)
class Report:
    """A failure of a worker or of a node's agent. `error`: what a worker raised; `lost`: why Ray
    cannot call an agent."""

    worker: Worker | None
    node: NodeHandle | None
    trouble: Trouble
    detail: str = ""
    error: AutoparError | None = None
    lost: BaseException | None = None
    seconds: float = 0.0


@dataclass
class Watched:
    """A worker, when it last answered (`time.monotonic()`), and whether it was asked since."""

    group: MeshGroup
    worker: Worker
    heard_s: float
    asked: bool = False
    beat: Beat | None = None


@dataclass(frozen=True)
class _ProcessView:
    """What an agent reports about a process, and whether Ray runs on its node. `state` is None if
    unknown."""

    state: str | None = None
    log: str = ""
    progress: bytes = b""
    oom_kills: int = 0
    ray_runs: bool = True


def sightings_of(
    session: RaySession, watched: Sequence[Watched], reports: Sequence[Report]
) -> list[Sighting]:
    """What is known about each worker; its first report counts."""
    views, agents_gone = _ask_agents(session, watched)
    agents_gone |= {r.node.node_id: r.lost for r in reports if r.node and r.lost}
    unreachable = {
        node_id
        for node_id, error in agents_gone.items()
        if isinstance(error, session.ray.exceptions.ActorUnavailableError)
    }
    nodes_alive = _nodes_alive(session, agents_gone.keys() - unreachable)
    sightings = []
    for entry in watched:
        node_id = entry.worker.node.node_id
        known = views.get(entry.worker, _ProcessView())
        gone = agents_gone.get(node_id)
        state = decode(known.progress)
        if not state.count and entry.beat:
            state = entry.beat.state
        sighting = Sighting(
            entry.worker.place,
            entry.group.mesh,
            known.ray_runs
            and node_id not in unreachable
            and (nodes_alive is None or node_id in nodes_alive),
            known.state,
            known.log,
            state,
            entry.group.command_of(entry.worker, state.command),
            agent_gone=None if gone is None else str(gone),
            oom_kills=known.oom_kills,
            rss_bytes=entry.beat.rss_bytes if entry.beat else 0,
        )
        worker_reports = [
            (n, report) for n, report in enumerate(reports) if report.worker is entry.worker
        ]
        if worker_reports:
            number, report = worker_reports[0]
            trouble_fields = {
                "reported": number,
                "trouble": report.trouble,
                "detail": report.detail,
                "error": report.error,
                "seconds": report.seconds,
            }
        else:
            trouble_fields = _unreported(entry, reports[0], session.limits)
        sightings.append(replace(sighting, **trouble_fields))
    return sightings


def _unreported(entry: Watched, first: Report, limits: Limits) -> dict[str, Any]:
    """The sighting of a worker without a report: it may hang like the reported one, and for
    longer."""
    still = entry.beat.standstill if entry.beat else None
    nearly_s = limits.hang_s - 2 * limits.heartbeat_s
    if first.trouble is Trouble.HUNG and still and still.is_step and still.seconds > nearly_s:
        return {"trouble": Trouble.HUNG, "detail": still.command, "seconds": still.seconds}
    return {"seconds": time.monotonic() - entry.heard_s}


def _ask_agents(
    session: RaySession, watched: Sequence[Watched]
) -> tuple[dict[Worker, _ProcessView], dict[str, BaseException]]:
    """What agents report about their processes, and, by node, why Ray cannot call the others."""
    calls = {}
    gone: dict[str, BaseException] = {}
    for node in session.nodes:
        workers = [entry.worker for entry in watched if entry.worker.node is node]
        if workers:
            try:
                call = node.agent.report.remote([worker.described() for worker in workers])
            except Exception as error:
                gone[node.node_id] = error
                continue
            calls[call.future()] = workers
    views = {}
    for call in wait(calls, REPORT_LIMIT_S).done:
        error = call.exception()
        if error is not None:
            gone[calls[call][0].node.node_id] = error
            continue
        said = call.result()
        for worker, process in zip(calls[call], said["processes"], strict=True):
            views[worker] = _ProcessView(
                process["state"],
                process["log"],
                process["progress"],
                said["oom_kills"],
                said["ray_runs"],
            )
    return views, gone


def _nodes_alive(session: RaySession, agents_gone: Set[str]) -> set[str] | None:
    """Ray's live nodes. A node whose agent is gone may be gone too; Ray notices that a little
    later."""
    until_s = time.monotonic() + NODES_LIMIT_S
    while True:
        alive = within(until_s - time.monotonic(), lambda: _read_nodes(session))
        if not alive or not alive & agents_gone or time.monotonic() + 0.2 > until_s:
            return alive
        time.sleep(0.2)


def _read_nodes(session: RaySession) -> set[str]:
    return {node["NodeID"] for node in session.ray.nodes() if node["Alive"]}


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """The result of a call that may never return; None if it does not return or raises."""
    answer: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        value = None
        with contextlib.suppress(Exception):
            value = call()
        answer.put(value)

    threading.Thread(target=work, name="autopar-within", daemon=True).start()
    try:
        return answer.get(timeout=max(0.0, limit_s))
    except queue.Empty:
        return None
