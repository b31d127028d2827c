"""Several Ray nodes on this machine: hosts on all of them, and one that is lost."""

import os
import warnings

import pytest

from autopar.errors import ClusterError, WorkerError
from autopar.ir.mesh import ClusterSpec
from autopar.runtime.ray.cluster import RayCluster
from tests.ray.conftest import TOY, is_running
from tests.ray.faults import working

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes():
    """A Ray cluster of a head without CPUs and three nodes with two each."""
    import ray
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        added = [cluster.add_node(num_cpus=2) for _ in range(3)]
        cluster.wait_for_nodes()
        yield cluster, added
        ray.shutdown()
        cluster.shutdown()


def test_hosts_lie_on_nodes_and_a_lost_node_is_named(nodes):
    ray_cluster, added = nodes
    options = {"executor": TOY, "start_limit_s": 90}
    first = RayCluster(ray_cluster.address, **options)
    assert first.spec == ClusterSpec(3, 2, "cpu")
    groups = first.groups([(0, 2), (5,)])
    hosts = [worker.node.node_id for group in groups for worker in group.workers]
    assert len(set(hosts)) == 3
    order = [host.node.node_id for host in first._session.hosts]
    assert hosts == order
    folders = [worker.place.folder for group in groups for worker in group.workers]
    assert len(set(folders)) == 3

    replies = [reply for group in groups for reply in working(group)]
    lost = next(node for node in added if node.node_id == order[1])
    ray_cluster.remove_node(lost, allow_graceful=False)
    with pytest.raises(WorkerError, match="was lost with its node") as caught:
        replies[0].result(90)
    assert str(caught.value).startswith(f"Worker {groups[0].workers[1].place.worker} ")
    assert caught.value.mesh == 0
    first.close()
    assert not any(is_running(w.hello.pid) for group in groups for w in group.workers)
    survivors = [f for f, node in zip(folders, hosts, strict=True) if node != order[1]]
    assert not any(os.path.exists(folder) for folder in survivors)

    again = RayCluster(ray_cluster.address, **options)
    assert again.spec == ClusterSpec(2, 2, "cpu")
    group = again.groups([(0, 1, 2, 3)])[0]
    assert group.submit("sum_over_mesh", [(), ()])[0].result(30) == 6.0
    again.close()


def test_addresses_of_ray_clusters(nodes):
    import ray

    ray_cluster, _ = nodes
    with RayCluster(ray_cluster.address, num_hosts=1, executor=TOY) as cluster:
        assert cluster.spec.num_hosts == 1
        with pytest.raises(ClusterError, match="connected to the Ray cluster at"):
            RayCluster("127.0.0.1:1")
        assert ray.is_initialized()
    assert not ray.is_initialized()  # who was not connected before is not connected afterwards
