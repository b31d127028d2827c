"""Runs a command as n ranks on this host, and ends them together.

    command, Ranks → RankResult of every rank

Each rank gets the variables of its device (`shared_gpu`) and those of a process group. A plain
`jax.distributed.initialize()` finds the others: JAX reads the coordinator's address and the devices
from its own variables, and the number of processes and the process's index from those of Open MPI,
which are the only ones it reads without asking a scheduler. torchrun's RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set too.

If a rank fails, the others have a grace time to fail by themselves, since their errors may say why;
then they are ended. Whatever a rank has started in its process group ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import ClusterError
from autopar.runtime.ranks.shared_gpu import Guard, Ranks

GRACE_S = 15.0
_KILL_S = 5.0
_KEPT_LINES = 20_000  # of a rank's output
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class RankResult:
    """returncode: negative for a signal, as in `subprocess`.
    output:     the end of what it printed, standard output and standard error together.
    timed_out:  whether it was ended at the time limit.
    was_ended:  whether it was still running when ranks were ended, at the limit or because another
                rank had failed.
    """

    rank: int
    returncode: int
    output: str
    timed_out: bool = False
    was_ended: bool = False

    @property
    def failed(self) -> bool:
        return self.returncode != 0 or self.timed_out


class RankProcess:
    """A running rank. Calls `show` with every line that it prints."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: str | Path | None,
        show: Callable[[int, str], None] | None,
    ) -> None:
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        try:
            self.process = subprocess.Popen(
                command,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"launch: {command[0]!r} cannot be started: {error}.") from error
        self._reader = threading.Thread(target=self._read, args=(show,), daemon=True)
        self._reader.start()

    def _read(self, show: Callable[[int, str], None] | None) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self.lines.append(text)
                if show is not None:
                    show(self.rank, text)

    def signal(self, sent: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, sent)

    def result(self, timed_out: bool, was_ended: bool) -> RankResult:
        """After the process has ended. Something that it started may still hold the pipe."""
        self._reader.join(_KILL_S)
        text = "\n".join(self.lines)
        return RankResult(self.rank, self.process.returncode, text, timed_out, was_ended)


def run_ranks(
    command: Sequence[str],
    ranks: Ranks,
    *,
    limit_s: float | None,
    env: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    show: Callable[[int, str], None] | None = None,
    grace_s: float = GRACE_S,
) -> list[RankResult]:
    """Run the command once per rank, at the same time, and wait for all. `ranks` was entered.

    env:     variables for all ranks; they override the others.
    folder:  where the ranks run. Default: here.
    show:    is called with a rank and a line of its output as it appears.
    limit_s: after it, ranks that still run are ended. None: no limit.
    """
    guard = Guard()
    started: list[RankProcess] = []
    timed_out: set[int] = set()
    running: set[int] = set()
    try:
        with held_port() as port:
            for rank in range(ranks.num_ranks):
                own = {
                    **os.environ,
                    **ranks.environment(rank),
                    **group_environment(rank, ranks.num_ranks, port),
                    **(env or {}),
                }
                started.append(RankProcess(rank, command, own, folder, show))
                guard.add_group(started[-1].process.pid)
            timed_out = _wait(started, limit_s, grace_s)
            running = {one.rank for one in started if one.process.poll() is None}
    finally:
        _end(started)
        for one in started:
            guard.forget_group(one.process.pid)
        guard.close()
    results = [one.result(one.rank in timed_out, one.rank in running) for one in started]
    if any(result.failed for result in results):
        ranks.recover()
    return results


def group_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Variables by which a rank finds the others."""
    count, index = str(num_ranks), str(rank)
    return {
        "JAX_COORDINATOR_ADDRESS": f"{_HOST}:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"{_HOST}:{port}",
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{_HOST}:{port}",
        "OMPI_COMM_WORLD_SIZE": count,
        "OMPI_COMM_WORLD_RANK": index,
        "OMPI_COMM_WORLD_LOCAL_RANK": index,
        "WORLD_SIZE": count,
        "RANK": index,
        "LOCAL_RANK": index,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }


@contextmanager
def held_port() -> Iterator[int]:
    """A free port that no other program is given meanwhile. It is bound here without listening;
    the coordinator's server, which shares ports as gRPC does, can still listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((_HOST, 0))
        yield holder.getsockname()[1]


def _wait(started: Sequence[RankProcess], limit_s: float | None, grace_s: float) -> set[int]:
    """Wait until all have ended, one has failed and the grace time is over, or the limit is: then
    the ranks that still run."""
    began_s = time.monotonic()
    failed_s: float | None = None
    while True:
        codes = [one.process.poll() for one in started]
        if None not in codes:
            return set()
        now_s = time.monotonic()
        if failed_s is None and any(codes):
            failed_s = now_s
        if failed_s is not None and now_s - failed_s > grace_s:
            return set()
        if limit_s is not None and now_s - began_s > limit_s:
            return {one.rank for one, code in zip(started, codes, strict=True) if code is None}
        time.sleep(0.05)


def _end(started: Sequence[RankProcess]) -> None:
    """End the ranks that still run, and whatever the others have left behind."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        running = [one for one in started if one.process.poll() is None]
        for one in running if sent == signal.SIGTERM else started:
            one.signal(sent)
        until_s = time.monotonic() + _KILL_S
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, until_s - time.monotonic()))
