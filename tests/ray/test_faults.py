"""Workers that die, stop, hang or raise on a real local Ray: what the driver is told."""

import os
import signal
import time

import pytest

from autopar.errors import DataError, WorkerError
from autopar.runtime.ray.worker import progress_path
from autopar.runtime.remote.progress import WorkerProgress
from tests.ray.conftest import is_running

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


def check_kill(cluster, victim):
    """One mesh of two processes and one of its own, all at work; one process is killed."""
    cluster.describe = describe
    groups = cluster.groups([(0, 2), (1,)])
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


@pytest.mark.ci
def test_a_killed_worker_is_named_and_another_session_works(toy_cluster):
    failed = toy_cluster(2, 2)
    check_kill(failed, 1)
    failed.close()
    again = toy_cluster(1, 1)
    assert again.failure is None
    group = again.groups([(0,)])[0]
    assert group.submit("sum_over_mesh", [()])[0].result(30) == 0.0

    # An exception in a step ends a session too.
    with pytest.raises(
        WorkerError, match=r"(?s)raised an exception in a step.*ValueError.*in fail"
    ):
        group.submit("fail", [()], fatal=True)[0].result(WITHIN_S)
    check_all_ended(again, [group])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2], ids=["coordinator", "alone"])
def test_any_worker_can_be_killed(toy_cluster, victim):
    check_kill(toy_cluster(2, 2), victim)


@pytest.mark.slow
def test_a_worker_that_nobody_waits_for_is_missed(toy_cluster):
    cluster = toy_cluster(1, 1, heartbeat_s=0.5)
    group = cluster.groups([(0,)])[0]
    os.kill(group.workers[0].hello.pid, signal.SIGKILL)
    assert "died" in str(cluster.wait_for_failure(WITHIN_S))
    check_all_ended(cluster, [group])


@pytest.mark.slow
def test_a_stopped_worker_is_silent(toy_cluster):
    cluster = toy_cluster(2, 1, heartbeat_s=0.5, silence_limit_s=3)
    group = cluster.groups([(0, 1)])[0]
    replies = working(group)
    stopped = group.workers[1]
    os.kill(stopped.hello.pid, signal.SIGSTOP)
    error = failure_of(replies)
    assert str(error).startswith(f"Worker {stopped.place.worker} has not answered for")
    assert "SIGSTOP" in str(error)
    check_all_ended(cluster, [group])


@pytest.mark.slow
def test_a_step_without_progress_hangs(toy_cluster):
    cluster = toy_cluster(2, 1, heartbeat_s=0.5, hang_limit_s=3)
    cluster.describe = describe
    group = cluster.groups([(0, 1)])[0]
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


@pytest.mark.slow
def test_a_later_answer_that_never_comes_hangs_too(toy_cluster):
    cluster = toy_cluster(1, 1, heartbeat_s=0.5, hang_limit_s=2)
    group = cluster.groups([(0,)])[0]
    replies = group.submit("later", [(0, 3600)], fatal=True)
    assert "hangs" in str(failure_of(replies))


@pytest.mark.slow
def test_other_commands_have_a_limit(toy_cluster):
    cluster = toy_cluster(1, 1, heartbeat_s=0.5, hang_limit_s=0.5, command_limit_s=3)
    group = cluster.groups([(0,)])[0]
    assert group.submit("sleep", [(1.5,)])[0].result(30) is None
    assert "hangs" in str(failure_of(group.submit("sleep", [(3600,)])))


@pytest.mark.slow
def test_errors_of_ours_are_the_cause_of_a_failure(toy_cluster):
    cluster = toy_cluster(1, 1)
    group = cluster.groups([(0,)])[0]
    with pytest.raises(WorkerError, match="cannot be taken") as caught:
        group.submit("refuse", [()], fatal=True)[0].result(WITHIN_S)
    assert isinstance(caught.value.__cause__, DataError)


@pytest.mark.slow
def test_out_of_memory_on_a_device_is_said(toy_cluster):
    cluster = toy_cluster(1, 1)
    group = cluster.groups([(0,)])[0]
    with pytest.raises(WorkerError, match=r"out of memory on a device"):
        group.submit("exhaust", [()], fatal=True)[0].result(WITHIN_S)
