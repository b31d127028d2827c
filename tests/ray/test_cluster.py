"""Clusters, groups and commands on a real local Ray, with toy executors."""

import os
import socket
import time
from dataclasses import replace

import pytest

from autopar.errors import ClusterError, DataError, WorkerError
from autopar.ir.mesh import ClusterSpec
from autopar.runtime.ray import starting
from autopar.runtime.ray.cluster import RayCluster
from tests.ray.conftest import NUM_CPUS, TOY, is_running, own_ports

pytestmark = pytest.mark.ci  # test_two_hosts stands for sessions on Ray

MESHES = [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayCluster(
        None, 2, 4, env={"TOY_GREETING": "hello"}, start_limit_s=90, executor=TOY
    ) as made:
        yield made


@pytest.fixture(scope="module")
def groups(cluster):
    return cluster.groups(MESHES)


def results(replies):
    return [reply.result(30) for reply in replies]


def test_hosts_and_devices_are_those_asked_for(cluster):
    assert cluster.spec == ClusterSpec(2, 4, "cpu")
    assert cluster.platform == "cpu"
    assert cluster.failure is None


def test_every_mesh_is_one_jax_group(groups):
    for group, devices in zip(groups, MESHES, strict=True):
        assert group.devices == devices
        assert results(group.submit("sum_over_mesh", [(), ()])) == [sum(devices)] * 2


def test_workers_stand_where_the_devices_say(groups):
    for group, devices in zip(groups, MESHES, strict=True):
        for rank, (place, pid, processes, local) in enumerate(
            results(group.submit("where", [(), ()]))
        ):
            assert place == group.workers[rank].place
            assert pid == group.workers[rank].hello.pid
            assert (place.rank, place.num_processes, place.host) == (rank, 2, rank)
            assert (processes, local) == (2, 2)
            assert place.devices == devices[2 * rank : 2 * rank + 2]
            assert place.mesh_devices == devices
    numbers = [worker.place.worker for group in groups for worker in group.workers]
    assert len(set(numbers)) == 4


def test_commands_are_carried_out_in_the_order_of_their_submission(groups):
    replies = [groups[0].submit("note", [(i,), (i,)]) for i in range(200)]
    assert results(replies[-1]) == [list(range(200))] * 2


def test_an_answer_that_comes_later_holds_nobody_up(groups):
    later = groups[0].submit("later", [("late", 1.5)] * 2)
    assert results(groups[0].submit("add", [(1, 2), (3, 4)])) == [3, 7]
    assert not any(reply.done() for reply in later)
    assert results(later) == ["late", "late"]


def test_a_command_can_be_for_some_workers(groups):
    assert results(groups[1].submit("add", [None, (20, 1)])) == [21]
    assert results(groups[1].submit("add", [(1, 1), (2, 2)])) == [2, 4]


def test_an_answer_that_does_not_come_in_time(groups):
    reply = groups[0].submit("later", [("late", 1.0), None])[0]
    with pytest.raises(WorkerError, match=r"'later' on worker .* no answer within 0\.05 s") as late:
        reply.result(0.05)
    assert isinstance(late.value, TimeoutError) and late.value.host
    assert reply.result(30) == "late"


def test_exceptions_of_commands_arrive_and_leave_the_session_alone(cluster, groups):
    group = groups[0]
    with pytest.raises(DataError, match="cannot be taken"):
        group.submit("refuse", [(), None])[0].result(30)
    with pytest.raises(WorkerError, match=r"(?s)host 1.*ValueError.*in fail") as caught:
        group.submit("fail", [None, ()])[0].result(30)
    assert "command_thread" not in str(caught.value)
    with pytest.raises(WorkerError, match=r"out of memory on a device.*RESOURCE_EXHAUSTED"):
        group.submit("exhaust", [(), None])[0].result(30)
    with pytest.raises(WorkerError, match="StopIteration"):
        group.submit("stop_iterating", [(), None])[0].result(30)
    with pytest.raises(WorkerError, match="no attribute 'nonsense'"):
        group.submit("nonsense", [(), None])[0].result(30)
    with pytest.raises(WorkerError, match="is not a command"):
        group.submit("__init__", [(), None])[0].result(30)
    assert cluster.failure is None
    assert results(group.submit("add", [(1, 1), (2, 2)])) == [2, 4]


def test_arguments_that_cannot_be_sent_leave_the_numbers_of_commands_whole(groups):
    with pytest.raises(TypeError):
        groups[0].submit("add", [(1, 1), (socket.socket, (n for n in ()))])
    assert results(groups[0].submit("add", [None, (2, 2)])) == [4]


def test_environment_of_workers(groups):
    replies = groups[0].submit("environment", [("TOY_GREETING",), ("JAX_PLATFORMS",)])
    assert results(replies) == ["hello", "cpu"]
    flags = results(groups[0].submit("environment", [("XLA_FLAGS",)] * 2))[0].split()
    assert flags.count("--xla_force_host_platform_device_count=2") == 1
    assert "--xla_backend_optimization_level=0" in flags  # the driver's own


def test_signs_of_life_while_a_command_runs(groups):
    import ray

    worker = groups[0].workers[0]
    reply = groups[0].submit("sleep", [(1.5,), None])[0]
    until = time.monotonic() + 20
    while time.monotonic() < until:
        beat = ray.get(worker.actor.heartbeat.remote(), timeout=10)
        if beat.state.program == 2:
            break
    assert not reply.done()
    assert (beat.state.instruction, beat.state.micro_batch) == (7, 1)
    assert beat.standstill.command == "sleep"
    assert not beat.standstill.is_step
    assert beat.rss_bytes > 10_000_000
    reply.result(30)


def test_running_groups_are_used_again(cluster, groups):
    again = cluster.groups(MESHES[::-1])
    assert again == groups[::-1]
    assert [group.mesh for group in again] == [0, 1]


@pytest.mark.parametrize("devices", [(), (0, 0), (7, 8), (-1,), (0, 4, 1)])
def test_devices_that_form_no_mesh(cluster, devices):
    with pytest.raises(ClusterError, match="needs distinct numbers below 8"):
        cluster.groups([devices])


def test_other_versions_are_refused_before_any_work(cluster, monkeypatch):
    here = starting.versions_here()
    monkeypatch.setattr(starting, "versions_here", lambda: replace(here, jaxlib="0.0.1"))
    with pytest.raises(ClusterError, match=r"jaxlib differ: 0\.0\.1 on the driver, \d+.* on .*"):
        cluster.groups([(3,)])
    assert cluster.failure is None


def test_resources_of_a_cluster_are_its_own(cluster):
    with pytest.raises(ClusterError, match="others use these resources"):
        RayCluster(None, 1, NUM_CPUS, start_limit_s=1, executor=TOY)


def test_close_leaves_nothing(toy_cluster):
    import ray

    made = toy_cluster(2, 1)
    group = made.groups([(0, 1)])[0]
    assert results(group.submit("sum_over_mesh", [(), ()])) == [1.0, 1.0]
    sleeping = group.submit("sleep", [(60,), (60,)])
    pids = [worker.hello.pid for worker in group.workers]
    ports = set().union(*(own_ports(pid) for pid in pids))
    folders = {worker.place.folder for worker in group.workers}
    actors = [worker.actor.heartbeat for worker in group.workers]
    actors += [node.agent.alive for node in made._session.nodes]
    assert ports and all(os.path.isdir(folder) for folder in folders)

    made.close()

    assert not any(is_running(pid) for pid in pids)
    assert not any(os.path.exists(folder) for folder in folders)
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    for method in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(method.remote(), timeout=10)
    table = ray.util.placement_group_table(made._session.placement_group)
    assert table["state"] == "REMOVED"
    for reply in sleeping:
        with pytest.raises(ClusterError, match="closed before"):
            reply.result(5)
    made.close()
    with pytest.raises(ClusterError, match="was closed"):
        made.check()
    with pytest.raises(WorkerError, match="was closed"):
        group.submit("add", [(1, 1), (1, 1)])


@pytest.mark.slow
def test_groups_may_share_virtual_devices(toy_cluster):
    made = toy_cluster(1, 4)
    whole, half = made.groups([(0, 1, 2, 3), (1, 2)])
    assert results(whole.submit("sum_over_mesh", [()])) == [6.0]
    assert results(half.submit("sum_over_mesh", [()])) == [3.0]
    made.close_group(whole)
    assert not is_running(whole.workers[0].hello.pid)
    assert results(half.submit("sum_over_mesh", [()])) == [3.0]
    assert made.failure is None
    assert made.groups([(0, 1, 2, 3)])[0] is not whole


@pytest.mark.slow
def test_an_executor_that_cannot_be_made(toy_cluster):
    made = toy_cluster(1, 1, executor="tests.ray.toy_executor:Missing")
    with pytest.raises(ClusterError, match="has no attribute 'Missing'"):
        made.groups([(0,)])


class TakenPort:
    """The agent of a node, but the first port that it gives out is one that is taken."""

    def __init__(self, agent, port):
        self.free_port = self
        self._agent = agent
        self._port = port
        self.num_given = 0

    def remote(self):
        import ray

        self.num_given += 1
        return ray.put(self._port) if self.num_given == 1 else self._agent.free_port.remote()

    def __getattr__(self, name):
        return getattr(self._agent, name)


@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile(toy_cluster):
    made = toy_cluster(2, 1)
    session = made._session
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        agent = TakenPort(session.nodes[0].agent, taken.getsockname()[1])
        node = replace(session.nodes[0], agent=agent)
        session.hosts = tuple(replace(host, node=node) for host in session.hosts)
        group = made.groups([(0, 1)])[0]
    assert agent.num_given == 2
    assert results(group.submit("sum_over_mesh", [(), ()])) == [1.0, 1.0]


@pytest.mark.slow
def test_folders_of_killed_drivers_are_removed(toy_cluster):
    folder = "/tmp/autopar-00000000-0"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/owner", "w") as file:
        file.write("999999999 1")
    toy_cluster(1, 1)
    assert not os.path.exists(folder)
