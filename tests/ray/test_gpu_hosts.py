"""Hosts of GPUs as Ray counts them, on a machine that need not have any: workers are told to use
the CPU, and everything else is as on GPUs."""

import warnings

import pytest

from autopar.errors import ClusterError
from autopar.runtime.ray.cluster import RayCluster
from tests.ray.conftest import TOY, is_running

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster():
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    with RayCluster(
        None, 2, 2, env={"JAX_PLATFORMS": "cpu"}, start_limit_s=60, executor=TOY
    ) as made:
        yield made
    ray.shutdown()


def visible(group):
    names = [("CUDA_VISIBLE_DEVICES",)] * len(group.workers)
    return [reply.result(30) for reply in group.submit("environment", names)]


def test_every_worker_has_its_own_gpus_and_meshes_share_none(cluster):
    import ray

    assert cluster.platform == "gpu"
    assert ray.available_resources().get("GPU", 0) == 0
    one, other = cluster.groups([(0,), (3,)])
    assert visible(one) == ["0"]
    assert visible(other) == ["3"]

    with pytest.raises(ClusterError, match="share GPUs"):
        cluster.groups([(0,), (0, 2)])

    other.num_arrays = 2
    with pytest.raises(ClusterError, match="2 arrays are on"):
        cluster.groups([(1, 3)])
    other.num_arrays = 0
    spread = cluster.groups([(1, 3)])[0]
    assert visible(spread) == ["1", "3"]
    assert other.closed
    assert not is_running(other.workers[0].hello.pid)
    assert not one.closed
    assert [reply.result(30) for reply in spread.submit("sum_over_mesh", [(), ()])] == [4.0, 4.0]


def test_devices_that_jax_does_not_have(cluster):
    with pytest.raises(ClusterError, match="JAX has 1 devices"):
        cluster.groups([(0, 1)])
