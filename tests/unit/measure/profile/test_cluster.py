"""A Ray cluster is measured: the step whose crossings are timed, and the driver's side with workers
that are stand-ins."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import ProfileError
from autopar.ir.profile import CollectiveTime, ProductTime, Timing
from autopar.measure.profile.cluster import RayMachine, crossing_step
from autopar.measure.profile.hardware import Hardware
from autopar.measure.profile.samples import UNTIMED, PlannedSample

HERE = Hardware("cpu", "cpu", 2, 4, {"jax": "0.10.2"})


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (1, 4)])
def test_every_device_sends_so_many_bytes_to_one_of_the_other_mesh(hosts, per_host):
    hardware = Hardware("cpu", "cpu", hosts, per_host, {})
    step, method, batch = crossing_step(hardware, 4096.0, 4)
    cluster = autopar.ClusterSpec(hosts, per_host, "cpu")
    plan = autopar.plan(step, batch, method=method, cluster=cluster, batch_argnums=(0,))
    pairs = hosts * per_host // 2
    (named,) = plan.named
    assert named.shape == (pairs, 1024) and plan.spec_of(named) == PartitionSpec("x")
    assert [stage.mesh_shape for stage in plan.stages] == [(pairs,), (pairs,)]
    assert plan.num_micro_batches == 4 and batch.shape == (4 * pairs, 1)


class Group:
    """Two workers; the second is slower."""

    workers = (None, None)

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def submit(self, command, args_per_worker):
        self.asked.append((command, args_per_worker[0]))
        return [Reply(self.answer(rank, command, *args_per_worker[rank])) for rank in (0, 1)]


class Reply:
    def __init__(self, value):
        self.value = value

    def result(self, limit_s):
        return self.value


def machine_with(answer) -> tuple[RayMachine, Group]:
    machine = RayMachine(None, 2, 4, quick=True)
    machine._cluster = object()
    machine._group = group = Group(answer)
    machine._hardware = HERE
    return machine, group


def test_the_slowest_worker_counts():
    def answer(rank, command, planned, num_samples):
        return replace(planned.sample, time=Timing(1.0 + rank, 0.0, 5))

    machine, _ = machine_with(answer)
    planned = PlannedSample(0, "products", ProductTime("float32", 1, 8, 8, 8, UNTIMED))
    assert machine.take(planned).time.seconds == 2.0


def test_collectives_run_as_often_on_all_workers():
    """A trip takes 1 ms on the first worker and 2 ms on the second, and a call 5 ms beside."""

    def answer(rank, command, sample, trips, num_calls):
        return 4096.0, [1e-3 * (1 + rank) * trips] * num_calls

    machine, group = machine_with(answer)
    sample = CollectiveTime("all-reduce", 8, 1, 4, 4000.0, UNTIMED)
    taken = machine.take(PlannedSample(0, "collectives", sample))
    assert taken.time.seconds == pytest.approx(2e-3) and taken.num_bytes == 4096.0
    assert [trips for _, (_, trips, _) in group.asked] == [2, 5]
    assert machine.take(PlannedSample(0, "collectives", sample), 11).time.num_samples == 11


def test_devices_of_several_kinds_are_refused():
    kinds = ("NVIDIA H200", "NVIDIA H100")
    machine, _ = machine_with(lambda rank, command: replace(HERE, device_kind=kinds[rank]))
    with pytest.raises(ProfileError, match="NVIDIA H100, NVIDIA H200"):
        machine.look()
