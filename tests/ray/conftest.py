"""What tests on real Ray clusters share: a local Ray per module, clusters of toy executors, and a
look at what is left behind."""

import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from autopar.runtime.ray.cluster import RayCluster

NUM_CPUS = 16  # as Ray counts them, so that clusters of several tests have room beside each other
START_TRIES = 3
TOY = "tests.ray.toy_executor:ToyExecutor"


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray on this machine alone, for the tests of one module."""
    import ray

    for tries_left in reversed(range(START_TRIES)):
        try:
            _start_ray()
            break
        except Exception:  # on a busy machine Ray's own processes may start too late
            ray.shutdown()
            if not tries_left:
                raise
    yield
    ray.shutdown()


def _start_ray() -> None:
    import ray

    with warnings.catch_warnings():  # about Ray's own future
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )


@pytest.fixture
def toy_cluster(local_ray: None) -> Iterator[Callable[..., RayCluster]]:
    """Makes clusters whose workers are toys, and closes them."""
    made = []

    def make(num_hosts: int, devices_per_host: int, **options: object) -> RayCluster:
        options = {"executor": TOY, "start_limit_s": 60, **options}
        made.append(RayCluster(None, num_hosts, devices_per_host, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def is_running(pid: int) -> bool:
    """Whether a process is there and not just waiting for its parent to notice its end."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def own_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on, without those it was given by its parent (Ray)."""
    with open(f"/proc/{pid}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    return _listening_ports(pid) - _listening_ports(parent)


def _listening_ports(pid: int) -> set[int]:
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
