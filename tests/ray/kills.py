"""Training on Ray while workers and nodes are lost: what the driver is told each time, and whether
losses are those of a run without. `test_kills.py` and `benchmarks/kills.py` use it.

    kill        SIGKILL of a worker at a random moment; steps follow each other without a pause, so
                this is a random instruction
    stop        SIGSTOP of a worker: it is silent
    checkpoint  SIGKILL while a checkpoint is being written
    start       SIGKILL while workers read the checkpoint and compile
    node        a node of Ray goes, with its workers
    torn        SIGKILL of a worker, after the newest checkpoint lost half of its data
    network     the connections that carry data between the driver and a worker are closed
    cut         nothing reaches a worker any more, nor the driver from it, as behind a firewall
    clock       the wall clock of all processes jumps forward by up to two hours: nothing should
                come of it
    clock_back  it jumps back: JAX may end workers that were started since
    sigterm     SIGTERM of the driver, which starts training again
    ctrl_c      SIGINT of the driver, likewise
    disk        the disk with the checkpoints is full until training ends; it starts again
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import autopar
from autopar import Preempted, session
from autopar.errors import CheckpointError, ClusterError, WorkerError
from autopar.runtime.remote.sockets import hang_up
from tests.ray import clock
from tests.ray.network import cut_between, cut_network

WIDTH, ROWS, LAYERS = 64, 32, 4
CHECKPOINT_EVERY = 5
HEARTBEAT_S, SILENCE_LIMIT_S = 1.0, 10.0
GRACE_S = 30.0
# As the architecture page states them.
STATED_S = {
    "kill": 10.0,
    "checkpoint": 10.0,
    "start": 10.0,
    "stop": SILENCE_LIMIT_S + 10.0,
    "node": SILENCE_LIMIT_S + 10.0,
    "torn": 10.0,
    "network": SILENCE_LIMIT_S + 20.0,
    "cut": SILENCE_LIMIT_S + 10.0,
    "clock": 0.0,
    "clock_back": SILENCE_LIMIT_S + 10.0,
    "sigterm": GRACE_S + 2.0,
    "ctrl_c": GRACE_S + 2.0,
    "disk": 60.0,
}
QUIET_S = SILENCE_LIMIT_S + 3.0  # after a jump of the clock
OF_DRIVER = {"sigterm": Preempted, "ctrl_c": KeyboardInterrupt, "disk": CheckpointError}
METHODS = {
    "2 meshes of 2 processes": autopar.PipeshardParallel(4, stages=autopar.UniformStages(2)),
    "1 mesh of 4 processes": autopar.Zero3Parallel(),
}

_IN_STEPS = ("taking", "running", "sending", "receiving", "freeing", "between commands;")

optimizer = optax.adam(1e-3)


def make_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5} for k in keys]
    return {"params": params, "opt": optimizer.init(params), "key": jax.random.key(1)}


def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    key, dropout = jax.random.split(state["key"])

    def loss_of(params: Any) -> jax.Array:
        x = batch["x"] * jax.random.bernoulli(dropout, 0.9, batch["x"].shape)
        for layer in params:
            x = jax.numpy.tanh(x @ layer["w"])
        return jax.numpy.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, loss


def batch_of(index: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(index)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


def batches_from(first: int, num_steps: int) -> Iterator[dict[str, np.ndarray]]:
    return (batch_of(index) for index in range(first, num_steps))


def options(cache: Path) -> dict[str, Any]:
    """For `autopar.init`: limits, and a cache of programs that spares most of a restart."""
    return {
        "cluster": "ray",
        "heartbeat_s": HEARTBEAT_S,
        "silence_limit_s": SILENCE_LIMIT_S,
        "env": {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
    }


def mixture(num_kills: int, seed: int, has_disk: bool = False) -> list[str]:
    """What to do, in a random order: of about twenty, five kills, two signals of each kind, and
    one of each other kind. The clock can jump if this process was started so."""
    kinds = ["kill", "sigterm", "stop", "kill", "ctrl_c", "node", "kill", "torn", "checkpoint"]
    kinds += ["kill", "sigterm", "start", "network", "kill", "ctrl_c", *["disk"] * has_disk]
    kinds += ["cut", *["clock", "clock_back"] * clock.can_jump()]
    whats = [kinds[n % len(kinds)] for n in range(num_kills)]
    random.Random(seed).shuffle(whats)
    return whats


def kill(worker: Any, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.hello.pid, number)


def memory_bytes(pid: int | str) -> int:
    """The resident memory of a process of this machine; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _largest_bytes(those: Sequence[Any]) -> int:
    return max((memory_bytes(worker.hello.pid) for worker in those), default=0)


def show(record: Record) -> None:
    print(json.dumps(record.as_row()), flush=True)


def workers() -> list[Any]:
    """Those of the session that runs now."""
    remote = session.current().remote
    return [w for group in remote.cluster._groups for w in group.workers] if remote else []


@dataclass(frozen=True)
class Uninterrupted:
    """What a method gives when nothing goes wrong: losses by step, from 1 on, and the state."""

    losses: dict[int, float]
    state: Any


def uninterrupted(method: Any, num_steps: int) -> Uninterrupted:
    step, state = autopar.parallelize(train, method=method), make_state()
    losses: dict[int, Any] = {}
    for index in range(num_steps):
        state, loss = step(state, batch_of(index))
        losses[index + 1] = loss
        if index:  # one step late, so that the next is already on its way
            losses[index] = float(losses[index])
    return Uninterrupted({n: float(loss) for n, loss in losses.items()}, fetched(state))


def on_one_device(num_steps: int) -> list[float]:
    step, state, losses = jax.jit(train), make_state(), []
    for index in range(num_steps):
        state, loss = step(state, batch_of(index))
        losses.append(float(loss))
    return losses


def fetched(tree: Any) -> list[np.ndarray]:
    def raw(x: Any) -> np.ndarray:
        value = x.fetch()
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(value) if is_key else value)

    return [raw(x) for x in jax.tree.leaves(tree)]


@dataclass
class Record:
    """One kill and what came of it.

    named:       the first line of the error.
    wrong:       what is not as it should be, in words; empty if nothing.
    error_s:     from the kill to the error in the driver.
    next_step_s: from the kill to the next step that was done.
    num_again:   steps that were done again.
    also:        starts that failed before one succeeded.
    driver_bytes, worker_bytes: memory of the driver, and of the largest worker, afterwards.
    worker_bytes_before: of the largest worker just before the kill.
    steps_done:  before the kill, in all rounds.
    """

    number: int
    what: str
    where: str
    mesh: int | None = None
    stage: int | None = None
    workers: tuple[int, ...] = ()
    nodes_at_restart: int | None = None
    named: str = ""
    instruction: str = ""
    log_lines: int = 0
    error_s: float | None = None
    next_step_s: float | None = None
    num_again: int | None = None
    exact: bool | None = None
    also: str = ""
    driver_bytes: int = 0
    worker_bytes: int = 0
    worker_bytes_before: int = 0
    steps_done: int = 0
    wrong: str = ""

    def as_row(self) -> dict[str, Any]:
        row = asdict(self)
        return {n: round(v, 2) if isinstance(v, float) else v for n, v in row.items()}


def names_the_lost(record: Record, said: str) -> bool:
    """Whether an error names the workers that were hit: first one of them, or of a lost node, which
    may have workers of other meshes too, all."""
    if any(said.startswith(f"Worker {number} ") for number in record.workers):
        return True
    lost = re.findall(r"orker (\d+) [^\n]*was lost with its node", said)
    return record.what == "node" and set(map(str, record.workers)) <= set(lost)


class Nodes:
    """Ray nodes on this machine, of which some can be lost and others added. The head has no CPUs,
    so that no worker lies there."""

    def __init__(self, num_nodes: int, cpus_per_node: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_worker_niceness", "0")  # not behind all else on the machine
        self._cpus = cpus_per_node
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False},
        )
        self._nodes = [self._cluster.add_node(num_cpus=cpus_per_node) for _ in range(num_nodes)]
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def lose(self, node_id: str) -> None:
        lost = next(node for node in self._nodes if node.node_id == node_id)
        self._nodes.remove(lost)
        self._cluster.remove_node(lost, allow_graceful=False)

    def add(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        self._nodes.append(self._cluster.add_node(num_cpus=self._cpus))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray takes it: it thinks that we are a node
        self._cluster.wait_for_nodes()

    def __len__(self) -> int:
        return len(self._nodes)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def _tear(folder: Path) -> None:
    """Half of a data file is gone, if the checkpoint is not deleted just now."""
    with contextlib.suppress(FileNotFoundError):
        data = sorted(folder.glob("*.data"))[0]
        os.truncate(data, data.stat().st_size // 2)


def _fill(path: Path) -> None:
    """Write until there is no room."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


class Soak:
    """Kills, one after another, in rounds of training of `num_steps` steps each.

    whats: what to do, in order.
    where: names of METHODS, which rounds take in turn.
    nodes: for the loss of nodes.
    disk:  a folder on a small file system, for checkpoints, which may be filled.
    every: the fewest steps between two faults of a round.
    checkpoint_every: steps between checkpoints.
    tell:  is given each record when it is complete.
    """

    def __init__(
        self,
        whats: Sequence[str],
        where: Sequence[str],
        folder: Path,
        seed: int,
        *,
        num_steps: int = 60,
        nodes: Nodes | None = None,
        disk: Path | None = None,
        every: int = 0,
        checkpoint_every: int = CHECKPOINT_EVERY,
        tell: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.records: list[Record] = []
        self._whats = deque(whats)
        self._where, self._folder, self._num_steps = where, folder, num_steps
        self._nodes, self._disk, self._every = nodes, disk, every
        self._checkpoint_every = checkpoint_every
        self._not_before = every  # the step
        self._num_nodes = len(nodes) if nodes else 0
        self._tell = tell
        self._rng = random.Random(seed)
        self._wanted: dict[str, Uninterrupted] = {}
        self._now = ""  # the method of this round
        self._steps = {n: autopar.parallelize(train, method=METHODS[n]) for n in where}
        self._step: Any = None
        self._checkpoints = folder
        self._pending: deque[tuple[int, Any]] = deque()
        self._last_done = self._steps_before = 0
        self._thread: threading.Thread | None = None
        self._open: list[tuple[Record, float]] = []  # kills without a step since, and when
        self._ended = threading.Event()

    def run(self) -> list[Record]:
        """All kills, and the rest of the last round."""
        for name in self._where:
            self._wanted[name] = uninterrupted(METHODS[name], self._num_steps)
        try:
            number = 0
            while self._whats or self._open:
                self._round(number, self._where[number % len(self._where)])
                number += 1
        finally:
            self._ended.set()
            if self._thread is not None:
                self._thread.join(60)
        return self.records

    def _round(self, number: int, name: str) -> None:
        self._now = name
        self._checkpoints = (self._disk or self._folder) / f"round_{number}"
        self._pending.clear()
        self._last_done, self._not_before = 0, self._every
        self._steps_before = number * self._num_steps
        self._step = self._steps[name]
        while True:
            try:
                state, _ = autopar.run_training(
                    self._step,
                    make_state(),
                    lambda first: batches_from(first, self._num_steps),
                    checkpoint_dir=self._checkpoints,
                    checkpoint_every=self._checkpoint_every,
                    max_restarts=20,
                    restart_policy=autopar.RestartPolicy(max_per_hour=10_000),
                    on_step=self._on_step,
                    on_restart=self._on_restart,
                    grace_s=GRACE_S,
                )
                break
            except (Preempted, KeyboardInterrupt, CheckpointError) as error:
                self._on_end(error)
        self._came_too_late()
        while self._pending:
            self._check_loss(*self._pending.popleft())
        if self._disk is not None:
            shutil.rmtree(self._checkpoints)
        want = self._wanted[name].state
        same = [np.array_equal(a, b) for a, b in zip(fetched(state), want, strict=True)]
        if not all(same):
            self._complain(f"the last state differs in {same.count(False)} leaves")

    # What training tells.

    def _on_step(self, number: int, loss: Any) -> None:
        self._pending.append((number, loss))
        if number == self._num_steps and self._thread is not None:
            self._thread.join(60)  # so that nothing is killed between rounds
        if len(self._pending) > 1:
            done, value = self._pending.popleft()
            self._check_loss(done, value)
            self._step_was_done(done)

    def _on_end(self, error: BaseException) -> None:
        """Training ended, as it should after a signal, or without room on the disk."""
        seen_s = time.monotonic()
        record, killed_s = self._open[-1] if self._open else (None, 0.0)
        if record is None or not isinstance(error, OF_DRIVER.get(record.what, ())):
            raise error
        if self._thread is not None:
            self._thread.join(60)
            self._thread = None
        record.error_s, record.named = seen_s - killed_s, str(error).partition("\n")[0]
        if record.what == "disk":
            self._pending.clear()
            self._fill_path().unlink()
            if "No space left" not in str(error) and "full" not in str(error):
                record.wrong = f"does not say that the disk is full: {error}"
        elif record.error_s > STATED_S[record.what]:
            record.wrong = f"ended after {record.error_s} s"

    def _came_too_late(self) -> None:
        """A signal that came after the last step ended nothing."""
        for record, killed_s in list(self._open):
            if record.what in OF_DRIVER and record.error_s is None:
                record.named, record.error_s, record.exact = "training had ended", 0.0, True
                record.next_step_s, record.num_again = time.monotonic() - killed_s, 0
                self._open.remove((record, killed_s))
                if record.what == "disk":
                    self._fill_path().unlink(missing_ok=True)
                self._tell(record)
        self._thread = None if self._open == [] else self._thread

    def _fill_path(self) -> Path:
        assert self._disk is not None
        return self._disk / "filled"

    def _check_loss(self, number: int, loss: Any) -> None:
        want = self._wanted[self._now].losses[number]
        if float(loss) != want:
            self._complain(f"loss {number} is {float(loss)!r} instead of {want!r}")

    def _step_was_done(self, number: int) -> None:
        for record, killed_s in list(self._open):
            is_clock = record.what in ("clock", "clock_back")
            if is_clock and record.error_s is None and time.monotonic() - killed_s > QUIET_S:
                record.named, record.error_s = "training went on", 0.0
                self._thread = None
            if record.error_s is None:  # a step that was done before anybody noticed
                continue
            record.next_step_s = time.monotonic() - killed_s
            record.num_again = self._last_done - number + 1
            record.exact = True
            if record.what in ("sigterm", "ctrl_c", "clock") and record.num_again > 0:
                record.wrong += f"{record.num_again} steps were done again"
            self._open.remove((record, killed_s))
            record.driver_bytes = memory_bytes("self")
            record.worker_bytes = _largest_bytes(workers())
            self._tell(record)
        self._last_done = number
        if self._nodes is not None and len(self._nodes) < self._num_nodes:
            self._nodes.add()
        if self._open or number < self._not_before:  # of the driver, without an end yet
            return
        last = self._num_steps - 2 * self._checkpoint_every
        if self._thread is None and self._whats and number < last:
            if self._whats[0] == "start":  # needs an end before
                self._whats.rotate(-1) if set(self._whats) != {"start"} else self._whats.popleft()
            else:
                self._not_before = number + self._every
                self._begin(self._whats.popleft())

    def _on_restart(self, error: Any) -> None:
        seen_s = time.monotonic()
        self._pending.clear()
        if self._thread is None:
            if isinstance(error, ClusterError) and self._open:
                self._open[-1][0].also += f"{error}\n"
            else:
                self._complain(f"an error that nobody caused: {error}")
            return
        self._thread.join(60)
        self._thread = None
        if not self._open or not isinstance(error, WorkerError):
            self._complain(f"{type(error).__name__}: {error}")
            return
        record, killed_s = self._open[-1]
        record.error_s = seen_s - killed_s
        self._describe(record, error)
        if self._nodes is not None:
            if len(self._nodes) < self._num_nodes and self._rng.random() < 0.5:
                self._nodes.add()
            record.nodes_at_restart = len(self._nodes)
        if self._whats and self._whats[0] == "start":
            self._begin(self._whats.popleft())

    def _describe(self, record: Record, error: WorkerError) -> None:
        said = str(error)
        record.named = said.splitlines()[0]
        record.mesh, record.stage = error.mesh, error.stage
        record.instruction = error.instruction
        record.log_lines = len(error.log_tail.splitlines())
        wrong: list[str] = []
        if record.error_s is None or record.error_s > STATED_S[record.what]:
            wrong.append(f"told after {record.error_s} s")
        if record.what not in ("network", "clock_back") and not names_the_lost(record, said):
            wrong.append("names another worker")
        if record.what == "network":
            if "connection to a worker is lost" not in said or wrong:
                record.wrong = "; ".join([*wrong, said])
            return
        words = {"stop": "has not answered", "node": "lost with its node"}
        words |= {"cut": words["stop"], "clock_back": "was ended by JAX|lost a peer"}
        if not re.search(words.get(record.what, "died"), record.named):
            wrong.append("tells something else")
        if not error.host or error.host not in said or error.mesh is None:
            wrong.append("names no host or mesh")
        if not error.instruction or error.instruction not in said:
            wrong.append("names no instruction")
        if error.stage is None and error.instruction.startswith(_IN_STEPS):
            wrong.append("names no stage")
        if " log" not in said or (error.log_tail and "The last lines of its log" not in said):
            wrong.append("says nothing of its log")
        if wrong:
            record.wrong = "; ".join(filter(None, [record.wrong, *wrong])) + f"\n{said}"

    def _complain(self, what: str) -> None:
        if not self.records:
            self.records.append(Record(0, "nothing", self._now))
        record = self.records[-1]
        record.wrong = "; ".join(filter(None, [record.wrong, what]))
        if record.exact:
            record.exact = "loss" not in what and "state" not in what
        self._tell(record)

    # The killing.

    def _begin(self, what: str) -> None:
        before = {worker.hello.pid for worker in workers()} if what == "start" else set()
        delay_s = self._rng.uniform(0, 1.5)
        self._thread = threading.Thread(target=self._act, args=(what, delay_s, before), daemon=True)
        self._thread.start()

    def _act(self, what: str, delay_s: float, before: set[int]) -> None:
        if what == "checkpoint":
            self._wait_for(lambda: any(self._checkpoints.glob(".step_*.tmp-*")))
        elif what == "start":
            self._wait_for(lambda: any(w.hello.pid not in before for w in workers()))
            time.sleep(delay_s)
        elif what == "torn":
            self._wait_for(lambda: len(list(self._checkpoints.glob("step_*"))) > 1)
        else:
            time.sleep(delay_s)
        there = self._at_work() or workers()
        if self._ended.is_set() or not there:
            return
        victim = self._rng.choice(there)
        hit = [victim]
        if what == "node":
            hit = [w for w in workers() if w.node.node_id == victim.node.node_id]
        record = Record(len(self.records), what, self._now)
        record.workers = tuple(w.place.worker for w in hit)
        record.worker_bytes_before = _largest_bytes(there)
        record.steps_done = self._steps_before + self._last_done
        self.records.append(record)
        self._open.append((record, time.monotonic()))
        if what == "node":
            assert self._nodes is not None
            self._nodes.lose(victim.node.node_id)
        elif what == "network":
            for sock in self._connections(victim):
                hang_up(sock)
        elif what == "cut":
            for sock in self._connections(victim):
                cut_between(sock)
            cut_network(victim.hello.pid)
        elif what == "clock":
            clock.jump(self._rng.randrange(60, 7200))
        elif what == "clock_back":  # not far: Ray starts no worker until its clock has caught up
            clock.jump(-self._rng.randrange(5, 60))
        elif what == "disk":
            self._fill_path().write_bytes(b"")
            _fill(self._fill_path())
        elif what in OF_DRIVER:
            os.kill(os.getpid(), signal.SIGTERM if what == "sigterm" else signal.SIGINT)
        else:
            if what == "torn":
                _tear(max(self._checkpoints.glob("step_*")))
            kill(victim, signal.SIGSTOP if what == "stop" else signal.SIGKILL)

    def _connections(self, victim: Any) -> list[Any]:
        """Of the driver, with data of a worker."""
        return [
            sock
            for mesh in self._step.last_executable.meshes
            for place, channel in zip(mesh.places, mesh.channels, strict=True)
            if place.worker == victim.place.worker
            for sock in (channel._up, channel._down)
        ]

    def _at_work(self) -> list[Any]:
        """Workers of this round's meshes; others may be left of rounds before."""
        executable = self._step.last_executable
        meshes = {mesh.devices for mesh in executable.meshes} if executable else set()
        return [worker for worker in workers() if worker.place.mesh_devices in meshes]

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._ended.is_set():
            time.sleep(0.0005)
