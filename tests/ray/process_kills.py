"""Training in two processes of `jax.distributed` that are killed, stopped, cut off or asked to
end: what each process says, how long it takes, and whether losses are those of a run without.
`benchmarks/kills.py` uses it.

    kill     SIGKILL of a process at a random moment
    stop     SIGSTOP: it is silent
    cut      nothing reaches it any more, as behind a firewall
    sigterm  SIGTERM of one process: all save one checkpoint and end
    ctrl_c   SIGINT of one process, likewise

A launcher that knows nothing starts both, waits until the others have ended by themselves, ends the
victim if it still runs, and starts both again. JAX notices that a process is silent after its
heartbeat limit, which the program sets to `HEARTBEAT_LIMIT_S`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.ray.network import cut_network

PROGRAM = Path(__file__).parents[1] / "unit" / "training" / "stopped_training.py"
NUM_PROCESSES = 2
CHECKPOINT_EVERY = 5
HEARTBEAT_LIMIT_S = 10
GRACE_S = 20.0  # of the program
# Twice JAX's limit: it looks for silence once per limit.
STATED_S = {
    "kill": 2.0 * HEARTBEAT_LIMIT_S + 5.0,
    "stop": 2.0 * HEARTBEAT_LIMIT_S + 5.0,
    "cut": 2.0 * HEARTBEAT_LIMIT_S + 5.0,
    "sigterm": GRACE_S + 2.0,
    "ctrl_c": GRACE_S + 2.0,
}
_START_LIMIT_S = 120.0
_END_LIMIT_S = 120.0
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "sigterm": signal.SIGTERM,
    "ctrl_c": signal.SIGINT,
}
_CODES = {"sigterm": 143, "ctrl_c": -signal.SIGINT}


def process_mixture(num_kills: int, seed: int) -> list[str]:
    """What to do, in a random order."""
    kinds = ["kill", "sigterm", "stop", "kill", "ctrl_c", "cut"]
    whats = [kinds[n % len(kinds)] for n in range(num_kills)]
    random.Random(seed).shuffle(whats)
    return whats


def losses_in(path: Path) -> list[tuple[int, str]]:
    """(step, loss), complete lines only: a process may be killed while it writes one."""
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


class Launch:
    """The processes of one start."""

    def __init__(self, folder: Path, losses: Path, num_steps: int, number: int) -> None:
        self.losses = losses
        self._logs = [losses.with_name(f"log_{number}_{rank}") for rank in range(NUM_PROCESSES)]
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        env = {
            **os.environ,
            "AUTOPAR_TEST_CHECKPOINT_EVERY": str(CHECKPOINT_EVERY),
            "AUTOPAR_TEST_HEARTBEAT_S": str(HEARTBEAT_LIMIT_S),
        }
        self.processes = []
        for rank, log in enumerate(self._logs):
            told = [str(folder), str(losses), str(num_steps), str(rank), str(NUM_PROCESSES)]
            with open(log, "wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(PROGRAM), *told, str(port)],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=env,
                        # Shells have background jobs ignore Ctrl-C, and so would these.
                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                    )
                )

    def wait_for_steps(self, more: int) -> None:
        """Until so many steps were done by this start."""
        before = len(losses_in(self.losses))
        until_s = time.monotonic() + _START_LIMIT_S
        while len(losses_in(self.losses)) < before + more:
            if any(p.poll() is not None for p in self.processes):
                break
            if time.monotonic() > until_s:
                raise TimeoutError(f"no step within {_START_LIMIT_S} s: {self.said()}")
            time.sleep(0.01)

    def end_of(self, ranks: list[int], limit_s: float = _END_LIMIT_S) -> bool:
        """Wait for these processes; whether all ended."""
        until_s = time.monotonic() + limit_s
        for rank in ranks:
            try:
                self.processes[rank].wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def said(self, rank: int | None = None) -> str:
        """What processes wrote, the last lines."""
        logs = self._logs if rank is None else [self._logs[rank]]
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(30)


class ProcessSoak:
    """One training, started again after each fault; `num_steps` is the fewest steps of a start
    that nothing ends."""

    def __init__(self, folder: Path, seed: int, num_steps: int = 60) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self._num_steps, self._number = num_steps, 0
        self._seen: dict[int, str] = {}

    def fault(self, what: str) -> dict[str, Any]:
        """Train until a fault, and a few steps after the next start. The row of the results."""
        losses, checkpoints = self._folder / "losses", self._folder / "checkpoints"
        many = 10**6
        launch = Launch(checkpoints, losses, many, self._number)
        self._number += 1
        victim = self._rng.randrange(NUM_PROCESSES)
        wrong: list[str] = []
        try:
            launch.wait_for_steps(CHECKPOINT_EVERY + 1)
            time.sleep(self._rng.uniform(0, 0.5))
            hit_s = time.monotonic()
            if what == "cut":
                cut_network(launch.processes[victim].pid)
            else:
                launch.processes[victim].send_signal(_SIGNALS[what])
            is_asked = what in _CODES
            waited = [rank for rank in range(NUM_PROCESSES) if is_asked or rank != victim]
            if not launch.end_of(waited):
                wrong.append(f"still runs after {_END_LIMIT_S} s")
            error_s = time.monotonic() - hit_s
            codes = [launch.processes[rank].poll() for rank in waited]
            asked = [_CODES.get(what) if rank == victim else 143 for rank in waited]
            if is_asked and codes != asked:
                wrong.append(f"exit codes {codes}: {launch.said()}")
            if not is_asked and 0 in codes:
                wrong.append(f"a process whose peer was lost ended with {codes}")
            named = _named(launch.said(waited[0]))
            if not named:
                wrong.append(f"says nothing of the cause: {launch.said(waited[0])}")
        finally:
            launch.close()
        if error_s > STATED_S[what]:
            wrong.append(f"ended after {error_s:.1f} s")
        before = losses_in(losses)
        done = max(step for step, _ in before)
        next_step_s, num_again = self._go_on(checkpoints, losses, done, hit_s, wrong)
        if what in _CODES and num_again > 0:
            wrong.append(f"{num_again} steps were done again")
        return {
            "number": self._number,
            "what": what,
            "where": f"{NUM_PROCESSES} processes of jax.distributed",
            "workers": [victim],
            "named": named,
            "error_s": round(error_s, 2),
            "next_step_s": round(next_step_s, 2),
            "num_again": num_again,
            "exact": self._is_exact(losses),
            "driver_bytes": 0,
            "worker_bytes": 0,
            "wrong": "; ".join(wrong),
        }

    def _go_on(
        self, checkpoints: Path, losses: Path, done: int, hit_s: float, wrong: list[str]
    ) -> tuple[float, int]:
        """Start again, up to a few steps past the fault. Seconds from the fault to the first step,
        and how many steps were done again."""
        count = len(losses_in(losses))
        launch = Launch(checkpoints, losses, done + CHECKPOINT_EVERY, self._number)
        self._number += 1
        try:
            launch.wait_for_steps(1)
            next_step_s = time.monotonic() - hit_s
            launch.end_of(list(range(NUM_PROCESSES)))
            codes = [process.poll() for process in launch.processes]
            if codes != [0] * NUM_PROCESSES:
                wrong.append(f"did not go on: {codes}: {launch.said()}")
        finally:
            launch.close()
        new = losses_in(losses)[count:]
        return next_step_s, done - new[0][0] + 1 if new else 0

    def _is_exact(self, losses: Path) -> bool:
        """Every loss is that of a run without faults, however often its step was done."""
        told = losses_in(losses)
        last = max(step for step, _ in told)
        if last not in self._seen:
            whole = self._folder / f"whole_{self._number}"
            launch = Launch(self._folder / f"other_{self._number}", whole, last + 500, self._number)
            self._number += 1
            try:
                launch.end_of(list(range(NUM_PROCESSES)))
            finally:
                launch.close()
            self._seen = dict(losses_in(whole))
        return last in self._seen and all(self._seen[step] == loss for step, loss in told)


def _named(text: str) -> str:
    """The line in which a process says why it ends."""
    signs = ("training ended after", "training should end", "heartbeat", "unavailable", "Preempted")
    signs += ("disconnected", "Connection", "autopar:", "WorkerError", "is gone", "terminat")
    for line in text.splitlines():
        if any(sign.lower() in line.lower() for sign in signs):
            return line.strip()[:300]
    return ""
