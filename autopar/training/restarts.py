"""When and on how many devices training starts again after a loss.

    WorkerError ── too many? ──▶ raise
        └ pause ──▶ restart on all devices ── not enough nodes ──▶ pause, again, up to `wait_s`
                                                 └ after `shrink_after_s`: on `min_devices` or more

While training runs on fewer devices than it began with, a thread looks for nodes that came back,
and for nodes that the cluster is about to take away. Every decision is logged.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

from autopar import session
from autopar.errors import ArgumentError, ClusterError, WorkerError
from autopar.progress import LOGGER
from autopar.runtime.remote.session import WorkerCluster
from autopar.training.metrics import Meter

_HOUR_S = 3600.0
_LOOK_EVERY_S = 2.0
_JOIN_S = 5.0


@dataclass(frozen=True)
class RestartPolicy:
    """How `run_training` starts again after the loss of workers or nodes.

    max_per_hour:   restarts within any hour; one more is an error.
    wait_s:         how long to wait for a cluster that can be started: nodes may take minutes to be
                    replaced.
    first_pause_s, max_pause_s: between two attempts; the pause doubles from the first to the last.
    min_devices:    go on with fewer devices than at the beginning, but not fewer than this. None:
                    only with as many.
    shrink_after_s: how long to wait for all devices before going on with fewer.
    grow:           restart from a new checkpoint when nodes are back, if training runs on fewer
                    devices than at the beginning.
    """

    max_per_hour: int = 20
    wait_s: float = 1800.0
    first_pause_s: float = 2.0
    max_pause_s: float = 60.0
    min_devices: int | None = None
    shrink_after_s: float = 120.0
    grow: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            is_whole = isinstance(given, int) and not isinstance(given, bool)
            if field.name == "grow":
                is_valid, needed = isinstance(given, bool), "True or False"
            elif field.name == "min_devices" and given is None:
                continue
            elif field.name in ("max_per_hour", "min_devices"):
                is_valid, needed = is_whole and given >= 1, "a whole number ≥ 1"
            else:
                is_valid = (isinstance(given, float) or is_whole) and given >= 0
                needed = "a number of seconds ≥ 0"
            if not is_valid:
                raise ArgumentError(f"RestartPolicy({field.name}={given!r}): needs {needed}.")


class PlannedRestart(Exception):
    """Training is saved and should start again, for the reason given."""


class Restarts:
    """The restarts of one training.

    count: how many there were.
    sleep: waits so many seconds; raises if training should end.
    """

    def __init__(
        self,
        policy: RestartPolicy | None,
        max_in_a_row: int,
        on_restart: Callable[[WorkerError | ClusterError], None] | None,
        sleep: Callable[[float], None],
        meter: Meter | None = None,
    ) -> None:
        self.count = 0
        self._meter = meter
        self.policy = policy or RestartPolicy()
        self._max_in_a_row, self._on_restart = max_in_a_row, on_restart
        self._sleep = sleep
        self._in_a_row = 0
        self._times_s: deque[float] = deque()

    def after_loss(self, error: WorkerError, has_new_checkpoint: bool) -> None:
        """Count a loss, and wait if it is not the first in a row; raises the error if there were
        too many."""
        policy = self.policy
        self._in_a_row = 1 if has_new_checkpoint else self._in_a_row + 1
        now_s = time.monotonic()
        while self._times_s and now_s - self._times_s[0] > _HOUR_S:
            self._times_s.popleft()
        self._times_s.append(now_s)
        if self._in_a_row > self._max_in_a_row:
            LOGGER.error(
                "Training ends: %d losses in a row without a new checkpoint (max_restarts=%d).",
                self._in_a_row,
                self._max_in_a_row,
            )
            raise error
        if len(self._times_s) > policy.max_per_hour:
            LOGGER.error(
                "Training ends: %d losses within an hour (RestartPolicy(max_per_hour=%d)).",
                len(self._times_s),
                policy.max_per_hour,
            )
            raise error
        self._add()
        pause_s = 0.0
        if self._in_a_row > 1:
            pause_s = min(policy.first_pause_s * 2.0 ** (self._in_a_row - 2), policy.max_pause_s)
        LOGGER.warning(
            "Restart %d, in %.0f s (%d in a row of at most %d, %d within an hour of at most %d): "
            "%s",
            self.count,
            pause_s,
            self._in_a_row,
            self._max_in_a_row,
            len(self._times_s),
            policy.max_per_hour,
            str(error).partition("\n")[0],
        )
        if self._on_restart is not None:
            self._on_restart(error)
        self._sleep(pause_s)

    def _add(self) -> None:
        self.count += 1
        if self._meter is not None:
            self._meter.restarts = self.count

    def planned(self, reason: PlannedRestart) -> None:
        """Count a restart that is no loss."""
        self._add()
        LOGGER.warning("Restart %d, from a checkpoint made for it: %s", self.count, reason)

    def start_again(self, load: Callable[[], None]) -> None:
        """Restart the cluster and load; repeated within the policy's time while the cluster cannot
        be started."""
        policy = self.policy
        begun_s, pause_s = time.monotonic(), policy.first_pause_s
        while True:
            waited_s = time.monotonic() - begun_s
            may_shrink = policy.min_devices is not None and waited_s >= policy.shrink_after_s
            try:
                session.restart(policy.min_devices if may_shrink else None)
                load()
            except ClusterError as error:
                self._failed(error, time.monotonic() - begun_s, pause_s)
                self._sleep(self._pause(pause_s, time.monotonic() - begun_s))
                pause_s = min(2 * pause_s, policy.max_pause_s)
            else:
                _log_size()
                return

    def _pause(self, pause_s: float, waited_s: float) -> float:
        """Not beyond the moment when fewer devices will do, nor beyond the end."""
        policy = self.policy
        limits = [policy.wait_s]
        if policy.min_devices is not None and waited_s < policy.shrink_after_s:
            limits.append(policy.shrink_after_s)
        return max(0.0, min(pause_s, min(limits) - waited_s))

    def _failed(self, error: ClusterError, waited_s: float, pause_s: float) -> None:
        first_line = str(error).partition("\n")[0]
        if self._on_restart is not None:
            self._on_restart(error)
        if waited_s >= self.policy.wait_s:
            LOGGER.error(
                "Training ends: no cluster within %.0f s (RestartPolicy(wait_s=…)): %s",
                self.policy.wait_s,
                first_line,
            )
            raise error
        LOGGER.warning(
            "No cluster after %.0f s of at most %.0f; the next attempt is in %.0f s: %s",
            waited_s,
            self.policy.wait_s,
            self._pause(pause_s, waited_s),
            first_line,
        )


def _log_size() -> None:
    here = session.current()
    if here.remote is None:
        return
    count, wanted = here.remote.cluster.spec.num_devices, here.wanted_devices
    if count < wanted:
        LOGGER.warning("Training goes on with %d devices of %d.", count, wanted)
    else:
        LOGGER.warning("Training goes on with %d devices.", count)


class ClusterWatch:
    """A thread that looks for reasons to restart a cluster that works.

    reason: why, in words; empty if there is none.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.reason = ""
        self._policy = policy
        self._ended = threading.Event()
        self._session: session.Session | None = None
        self._thread: threading.Thread | None = None
        if session.current().remote is not None:
            self._thread = threading.Thread(target=self._work, name="autopar-watch", daemon=True)
            self._thread.start()

    def __enter__(self) -> ClusterWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def watch(self) -> None:
        """From now on, watch the session that is current."""
        self.reason, self._session = "", session.current()

    def forget(self) -> None:
        """The session is about to end."""
        self.reason, self._session = "", None

    def _work(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            here = self._session
            if here is None or here.remote is None or self.reason:
                continue
            reason = self._look(here, here.remote.cluster)
            if self._session is here:
                self.reason = reason

    def _look(self, here: session.Session, cluster: WorkerCluster) -> str:
        if leaving := cluster.notice():
            return f"the cluster takes away {leaving}"
        now = cluster.spec.num_devices
        if self._policy.grow and now < here.wanted_devices:
            possible = cluster.possible_devices()
            if possible > now:
                return f"{possible} devices are there again; {now} are in use"
        return ""
