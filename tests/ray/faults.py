"""Workers that are lost while others wait for them: toys on CPUs (`test_faults.py`), steps on CPUs
(`test_lost_while_waiting.py`), and both inside NCCL, on GPUs or shares of one
(`tests/gpu/test_ray_faults_gpu.py`)."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.errors import WorkerError
from autopar.runtime.ray.worker import progress_path
from autopar.runtime.remote.progress import WorkerProgress
from tests.ray import kills, training
from tests.ray.conftest import is_running
from tests.ray.training import Near

WITHIN_S = 40  # nothing waits for ever; what users are told is shorter, and measured elsewhere


def describe(place, state):
    return 5, f"instruction {state.instruction} of program {state.program}"


def working(group):
    """Replies of workers that do nothing but collectives, and have begun to."""
    replies = group.submit("sums_for_ever", [()] * len(group.workers), fatal=True)
    wait_until(lambda: all(state_of(worker).instruction > 2 for worker in group.workers))
    return replies


def state_of(worker):
    return WorkerProgress.read(progress_path(worker.place))


def wait_until(condition):
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until, "no progress"
        time.sleep(0.02)


def failure_of(replies):
    """What all of these replies say; every one of them says it."""
    errors = []
    for reply in replies:
        with pytest.raises(WorkerError) as caught:
            reply.result(WITHIN_S)
        errors.append(caught.value)
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def check_all_ended(cluster, groups):
    assert not any(is_running(w.hello.pid) for group in groups for w in group.workers)
    assert cluster.failure is not None
    with pytest.raises(WorkerError):
        cluster.check()
    with pytest.raises(WorkerError):
        groups[0].submit("add", [(1, 1)] * len(groups[0].workers))
    with pytest.raises(WorkerError):
        cluster.groups([groups[0].devices])


def check_kill(cluster, meshes, victim):
    """A mesh of two processes and one of its own, all at work; one process is killed."""
    cluster.describe = describe
    groups = cluster.groups(meshes)
    replies = [reply for group in groups for reply in working(group)]
    worker = [w for group in groups for w in group.workers][victim]
    os.kill(worker.hello.pid, signal.SIGKILL)
    error = failure_of(replies)
    assert str(error).startswith(f"Worker {worker.place.worker} died")
    assert error.host == worker.place.node
    assert error.mesh == (0, 0, 1)[victim]
    assert error.stage == 5
    assert error.instruction.endswith("of program 0")
    assert f"host {worker.place.host}" in str(error)
    assert error.log_tail in str(error).replace("  | ", "")
    check_all_ended(cluster, groups)


def check_stop(cluster, mesh):
    """All processes of a mesh are at work; one is stopped, so that it is silent."""
    group = cluster.groups([mesh])[0]
    replies = working(group)
    stopped = group.workers[1]
    os.kill(stopped.hello.pid, signal.SIGSTOP)
    error = failure_of(replies)
    assert str(error).startswith(f"Worker {stopped.place.worker} has not answered for")
    assert "SIGSTOP" in str(error)
    check_all_ended(cluster, [group])


def check_hang(cluster, mesh):
    """One process of a mesh of two does not come to a collective in which the other waits."""
    cluster.describe = describe
    group = cluster.groups([mesh])[0]
    assert group.submit("sleep", [(4,), None])[0].result(30) is None  # no step: it may take longer
    replies = group.submit("sleep", [(3600,), None], fatal=True)
    wait_until(lambda: state_of(group.workers[0]).command == 2)
    replies += group.submit("sum_over_mesh", [None, ()], fatal=True)
    error = failure_of(replies)
    assert "hangs: no progress" in str(error)
    assert "'sleep'" in str(error)
    assert error.instruction == "instruction 7 of program 2"
    assert "worker 0 sleeps" in error.log_tail
    check_all_ended(cluster, [group])


# -- in steps

# Where the others wait: in a collective of a program, or for tiles from another mesh.
WHERE = {"collective": autopar.Zero3Parallel(), "transfer": training.PIPELINE}
HOW = {"kill": "died", "stop": "has not answered for"}
STILL_S = 1.0


def check_training(method: Any, near: Near) -> tuple[Any, Any]:
    """Two steps of training in this session, which are those of one device: its communicators work.
    Returns the step and the state."""
    step, state = autopar.parallelize(training.train, method=method), training.make_state(0)
    for index in range(2):
        state, results = step(state, training.batch_of(index))
        near.check(results, training.wanted()[index][1], f"step {index}")
    return step, state


def check_lost_while_others_wait(where: str, how: str, near: Near) -> None:
    """In a session that works, a worker does not come to the next step. When the others wait for
    it, it is killed, or stays silent. The driver is told which worker it was, and nothing is left
    running."""
    step, state = check_training(WHERE[where], near)
    places = [place for mesh in step.last_executable.meshes for place in mesh.places]
    lost = next(w for w in kills.workers() if w.place.worker == places[-1].worker)
    others = [w for w in kills.workers() if w is not lost]
    pids = [worker.hello.pid for worker in kills.workers()]
    np.asarray(state["step"])  # nothing is under way
    counts = counts_of(others)
    os.kill(lost.hello.pid, signal.SIGSTOP)
    _, results = step(state, training.batch_of(2))
    wait_until(lambda: all(a < b for a, b in zip(counts, counts_of(others), strict=True)))
    wait_until_still(others)
    replies = step.last_executable._ahead[-1]
    waiting = [reply for reply in replies if reply.worker is not lost and not reply.done()]
    assert waiting, "nobody waits for it"
    if how == "kill":
        os.kill(lost.hello.pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        np.asarray(results["loss"])
    print(f"{where}, {how}: told after {time.monotonic() - began_s:.1f} s")
    assert time.monotonic() - began_s < WITHIN_S
    said = str(caught.value)
    assert said.startswith(f"Worker {lost.place.worker} {HOW[how]}"), said
    assert caught.value.host == lost.place.node
    assert caught.value.mesh is not None
    with pytest.raises(WorkerError):
        step(training.make_state(0), training.batch_of(0))
    wait_until(lambda: not any(map(is_running, pids)))


def counts_of(workers: list[Any]) -> list[int]:
    """How many times each of them has got on."""
    return [state_of(worker).count for worker in workers]


def wait_until_still(workers: list[Any]) -> None:
    """Wait until none of these workers has got on for a while. A worker on a GPU may have handed
    everything to the device, where it waits."""
    seen, since_s, until_s = counts_of(workers), time.monotonic(), time.monotonic() + WITHIN_S
    while time.monotonic() - since_s < STILL_S:
        assert time.monotonic() < until_s, "the others do not wait"
        now = counts_of(workers)
        if now != seen:
            seen, since_s = now, time.monotonic()
        time.sleep(0.05)
