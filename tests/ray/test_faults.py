"""Workers that die, stop, hang or raise on a real local Ray: what the driver is told."""

import os
import signal

import pytest

from autopar.errors import DataError, WorkerError
from tests.ray.faults import (
    WITHIN_S,
    check_all_ended,
    check_hang,
    check_kill,
    check_stop,
    failure_of,
)

MESHES = [(0, 2), (1,)]


@pytest.mark.ci
def test_a_killed_worker_is_named_and_another_session_works(toy_cluster):
    failed = toy_cluster(2, 2)
    check_kill(failed, MESHES, 1)
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
    check_kill(toy_cluster(2, 2), MESHES, victim)


@pytest.mark.slow
def test_a_worker_that_nobody_waits_for_is_missed(toy_cluster):
    cluster = toy_cluster(1, 1, heartbeat_s=0.5)
    group = cluster.groups([(0,)])[0]
    os.kill(group.workers[0].hello.pid, signal.SIGKILL)
    assert "died" in str(cluster.wait_for_failure(WITHIN_S))
    check_all_ended(cluster, [group])


@pytest.mark.slow
def test_a_stopped_worker_is_silent(toy_cluster):
    check_stop(toy_cluster(2, 1, heartbeat_s=0.5, silence_limit_s=3), (0, 1))


@pytest.mark.slow
def test_a_step_without_progress_hangs(toy_cluster):
    check_hang(toy_cluster(2, 1, heartbeat_s=0.5, hang_limit_s=3), (0, 1))


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
    said = str(failure_of(group.submit("sleep", [(3600,)])))
    assert "hangs" in said and "raise init(command_limit_s=…), which is 3 s" in said


class CtrlC:
    """An argument during whose sending the user presses Ctrl-C."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return (int, ())


@pytest.mark.ci
def test_an_interrupted_command_reaches_every_worker(toy_cluster):
    """Nor is a number used twice: then the next command would wait for ever."""
    cluster = toy_cluster(2, 1)
    (group,) = cluster.groups([(0, 1)])
    with pytest.raises(KeyboardInterrupt):
        group.submit("note", [(CtrlC(),), (0,)], fatal=True)
    replies = group.submit("note", [(1,), (1,)], fatal=True)
    assert [reply.result(30) for reply in replies] == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_two_interrupts_end_the_session_without_a_hang(toy_cluster):
    cluster = toy_cluster(2, 1)
    (group,) = cluster.groups([(0, 1)])
    with pytest.raises(KeyboardInterrupt):
        group.submit("note", [((CtrlC(), CtrlC()),), (0,)])
    assert "was not sent" in str(cluster.wait_for_failure(WITHIN_S))
    with pytest.raises(WorkerError):
        group.submit("note", [(1,), (1,)])


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
