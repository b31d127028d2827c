"""From Ray's nodes to hosts: which nodes are used, with how many devices.

A *node* is a machine as Ray knows it; a *host* is `devices_per_host` devices of one node. If any
node has GPUs, hosts consist of GPUs, and nodes without GPUs are not used. If workers share GPUs
(`ranks_per_gpu` > 1), a device is a share of a GPU, and each host has one. Without GPUs, devices
are virtual CPU devices: a node can have any number, and hosts may share a node.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ranks.shared_gpu import SHARE_VARIABLE

CONNECT_LIMIT_S = 10.0


@dataclass(frozen=True)
class RayNode:
    """id:   Ray's.
    kind: accelerator types, as Ray names them; empty if it knows none.
    """

    id: str
    address: str
    cpus: int
    gpus: int
    kind: str = ""

    def described(self) -> str:
        gpus = f", {self.gpus} GPUs" + (f" ({self.kind})" if self.kind else "") if self.gpus else ""
        return f"{self.address}: {self.cpus} CPUs{gpus}"


@dataclass(frozen=True)
class Layout:
    """hosts_per_node: for the used nodes, in the order of their addresses.
    cpus_per_node:  CPUs to reserve on each, besides its devices.
    ranks_per_gpu:  how many devices a GPU counts as; each is the GPU of one process.
    """

    platform: str
    devices_per_host: int
    hosts_per_node: tuple[int, ...]
    cpus_per_node: tuple[int, ...]
    ranks_per_gpu: int = 1

    def gpus_per_node(self) -> tuple[int, ...]:
        """Whole GPUs to reserve on each node."""
        if self.platform != "gpu":
            return (0,) * len(self.hosts_per_node)
        return tuple(
            -(-hosts * self.devices_per_host // self.ranks_per_gpu) for hosts in self.hosts_per_node
        )

    @property
    def num_devices(self) -> int:
        return sum(self.hosts_per_node) * self.devices_per_host

    def devices_of(self, gpu_ids: Sequence[str], host: int) -> tuple[str, ...]:
        """The GPUs of the devices of a node's host, by the ids of the GPUs reserved there."""
        devices = [gpu for gpu in gpu_ids for _ in range(self.ranks_per_gpu)]
        first = host * self.devices_per_host
        return tuple(devices[first : first + self.devices_per_host])

    def bundles(self) -> list[dict[str, float]]:
        """What to reserve on each node, as bundles of a Ray placement group."""
        bundles = []
        for gpus, cpus in zip(self.gpus_per_node(), self.cpus_per_node, strict=True):
            bundle: dict[str, float] = {"CPU": cpus} if cpus else {}
            if gpus:
                bundle["GPU"] = gpus
            bundles.append(bundle)
        return bundles


def import_ray() -> Any:
    """Import Ray, an optional dependency."""
    try:
        import ray
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "ray"
        state = "not installed" if is_missing else f"installed, but cannot be imported ({error})"
        raise ClusterError(
            f"init(cluster='ray') needs Ray, which is {state}. Install it with "
            "pip install 'autopar[ray]', on every node, or use init(cluster='local')."
        ) from error
    return ray


def connect(address: str | None) -> bool:
    """Connect this process to a Ray cluster as a driver. True if it was not connected before; then
    `ray.shutdown()` leaves the cluster, and stops it if it was started here.

    An existing connection is used as it is. Without an address, the one in RAY_ADDRESS is used, or
    else a cluster is started on this machine alone.
    """
    ray = import_ray()
    if address is not None and not (isinstance(address, str) and address):
        raise ArgumentError(
            f"init(address={address!r}): needs the address of a Ray cluster, 'host:port' or "
            "'auto', or None to start one on this machine."
        )
    if ray.is_initialized():
        known = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", known):
            raise ClusterError(
                f"init(address={address!r}): this process is connected to the Ray cluster at "
                f"{known} already. Call ray.shutdown() first, or leave the address out."
            )
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise ClusterError(
            f"init(address={address!r}): Ray's client protocol is not supported, since the driver "
            "exchanges arrays with the workers directly. Run the program on a machine of the "
            "cluster, with its address 'host:port' or 'auto'."
        )
    if address not in ("auto", "local"):
        _check_listening(address)
    options: dict[str, Any] = {"address": address, "logging_level": "WARNING"}
    if address == "local":
        options["include_dashboard"] = False
        # Ray would give workers a lower priority than everything else, such as data loading.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        with warnings.catch_warnings():  # about Ray's own future
            warnings.simplefilter("ignore")
            ray.init(**options)
    except Exception as error:
        otherwise = "or leave the address out to start one on this machine."
        if address == "local":  # Ray waits 30 s for its own processes
            otherwise = "or try again: on a busy machine Ray's own processes may start too late."
        raise ClusterError(
            f"init(address={address!r}): Ray says: {error}\nStart a cluster with 'ray start "
            f"--head' and give its address, {otherwise}"
        ) from error
    return True


def _check_listening(address: str) -> None:
    """Check the address first: Ray itself waits long for a cluster that does not exist."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"init(address={address!r}): no Ray cluster there ({error}). Give the 'host:port' that "
            "'ray start --head' prints, and make sure that it is reachable from here."
        ) from error


def draining_nodes() -> dict[str, float]:
    """Ids of the nodes that are about to be taken away, as Ray's autoscaler or `ray drain-node`
    has announced, each with the time (of `time.time`) when it goes; 0 if that is not known."""
    import_ray()
    from ray._private.state import state  # Ray has no public name for it

    draining = getattr(state, "get_draining_nodes", dict)  # old releases of Ray lack it
    return {node_id: ms / 1000 for node_id, ms in draining().items()}


def read_nodes() -> list[RayNode]:
    """The live nodes, in the order of their addresses, but for those about to be taken away."""
    nodes = []
    draining = draining_nodes()
    for entry in import_ray().nodes():
        if entry["Alive"] and entry["NodeID"] not in draining:
            resources = entry["Resources"]
            kinds = sorted(
                name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")
            )
            nodes.append(
                RayNode(
                    entry["NodeID"],
                    entry["NodeManagerAddress"],
                    int(resources.get("CPU", 0)),
                    int(resources.get("GPU", 0)),
                    "+".join(kinds),
                )
            )
    return sorted(nodes, key=lambda node: (_by_number(node.address), node.id))


def lay_out(
    nodes: Sequence[RayNode],
    num_hosts: int | None,
    devices_per_host: int | None,
    ranks_per_gpu: int = 1,
) -> Layout:
    """Lay out hosts on these nodes; None stands for all that the nodes have. A GPU counts as
    `ranks_per_gpu` devices."""
    check_counts(num_hosts, devices_per_host)
    with_gpus = [node for node in nodes if node.gpus]
    if with_gpus:
        if ranks_per_gpu > 1:
            _check_shares(num_hosts, devices_per_host, ranks_per_gpu)
            devices_per_host = 1
        return _of_gpus(with_gpus, nodes, num_hosts, devices_per_host, ranks_per_gpu)
    return _of_cpus(nodes, num_hosts, devices_per_host)


def lay_out_at_least(
    nodes: Sequence[RayNode],
    num_hosts: int | None,
    devices_per_host: int | None,
    ranks_per_gpu: int,
    min_devices: int | None,
) -> Layout:
    """As many of `num_hosts` as the nodes have room for. `ClusterError` if that is less than
    `min_devices`; None asks for all of `num_hosts`."""
    try:
        layout = lay_out(nodes, num_hosts, devices_per_host, ranks_per_gpu)
    except ClusterError:
        if min_devices is None:
            raise
        layout = lay_out(nodes, None, devices_per_host, ranks_per_gpu)
    if min_devices is not None and layout.num_devices < min_devices:
        raise ClusterError(
            f"The Ray cluster has room for {layout.num_devices} devices, and at least "
            f"{min_devices} are needed.\n{_listed(nodes)}\nAdd nodes, or let training go on with "
            "fewer: RestartPolicy(min_devices=…)."
        )
    return layout


def check_counts(num_hosts: int | None, devices_per_host: int | None) -> None:
    for name, given in (("num_hosts", num_hosts), ("devices_per_host", devices_per_host)):
        whole = isinstance(given, int) and not isinstance(given, bool)
        if given is not None and not (whole and given >= 1):
            raise ArgumentError(
                f"init({name}={given!r}): needs a whole number ≥ 1, or None for all."
            )


def _check_shares(num_hosts: int | None, devices_per_host: int | None, ranks_per_gpu: int) -> None:
    """A process sees a GPU once, however many share it."""
    if devices_per_host in (None, 1):
        return
    hosts = "num_hosts" if num_hosts is None else f"num_hosts={num_hosts * devices_per_host}"
    raise ClusterError(
        f"init(devices_per_host={devices_per_host}) with {SHARE_VARIABLE}={ranks_per_gpu}: a "
        "worker is one process, which sees a shared GPU as one device. Use devices_per_host=1 and "
        f"{hosts}: a host for each share."
    )


def _of_gpus(
    nodes: Sequence[RayNode],
    all_nodes: Sequence[RayNode],
    num_hosts: int | None,
    devices_per_host: int | None,
    ranks_per_gpu: int,
) -> Layout:
    per_host = devices_per_host or min(node.gpus for node in nodes)
    room = [node.gpus * ranks_per_gpu // per_host for node in nodes]
    wanted = num_hosts or max(1, sum(room))
    if wanted > sum(room):
        shares = f", {ranks_per_gpu} per GPU ({SHARE_VARIABLE})" if ranks_per_gpu > 1 else ""
        more = "raise that variable, or add nodes" if ranks_per_gpu > 1 else "or add nodes"
        raise ClusterError(
            f"init(num_hosts={num_hosts}, devices_per_host={devices_per_host}): needs {wanted} × "
            f"{per_host} GPUs, each host on one node; the Ray cluster has room for {sum(room)} "
            f"such hosts{shares}.\n{_listed(all_nodes)}\nUse fewer, {more}."
        )
    used = []
    for node, hosts in zip(nodes, room, strict=True):
        taken = min(hosts, wanted - sum(count for _, count in used))
        if taken:
            used.append((node, taken))
    kinds = {node.kind for node, _ in used}
    if len(kinds) > 1:
        raise ClusterError(
            f"The devices of a cluster must be of one kind, but the nodes have {sorted(kinds)}.\n"
            f"{_listed([node for node, _ in used])}\nUse nodes of one kind: fewer hosts, or "
            "another Ray cluster."
        )
    return Layout(
        "gpu",
        per_host,
        tuple(hosts for _, hosts in used),
        tuple(min(hosts, node.cpus) for node, hosts in used),
        ranks_per_gpu,
    )


def _of_cpus(
    nodes: Sequence[RayNode], num_hosts: int | None, devices_per_host: int | None
) -> Layout:
    nodes = [node for node in nodes if node.cpus] or list(nodes)
    if not nodes:
        raise ClusterError("The Ray cluster has no live node. Add nodes, then try again.")
    wanted = num_hosts or len(nodes)
    nodes = nodes[:wanted]
    share, rest = divmod(wanted, len(nodes))
    hosts = tuple(share + (i < rest) for i in range(len(nodes)))
    fewest = min(node.cpus // count for node, count in zip(nodes, hosts, strict=True))
    per_host = devices_per_host or max(1, fewest)
    cpus = tuple(min(node.cpus, count * per_host) for node, count in zip(nodes, hosts, strict=True))
    return Layout("cpu", per_host, hosts, cpus)


def _listed(nodes: Sequence[RayNode]) -> str:
    return "\n".join(f"  node {node.described()}" for node in nodes)


def _by_number(address: str) -> tuple[Any, ...]:
    """10.0.0.9 before 10.0.0.10."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in address.split("."))
