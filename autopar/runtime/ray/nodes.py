"""Ray's nodes → which of them are hosts, of how many devices.

A *node* is a machine as Ray knows it; a *host* is `devices_per_host` devices of one node. If any
node has GPUs, hosts are made of GPUs, and nodes without are left alone. Otherwise devices are
virtual CPU devices, of which a node can have any number, and hosts may share a node.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import ArgumentError, ClusterError

CONNECT_LIMIT_S = 10.0


@dataclass(frozen=True)
class RayNode:
    """id:      Ray's.
    kind:    accelerator types, as Ray names them; empty if it knows none.
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
    """hosts_per_node: of the nodes that are used, in the order of their addresses.
    cpus_per_node:  what is reserved of each besides its devices.
    """

    platform: str
    devices_per_host: int
    hosts_per_node: tuple[int, ...]
    cpus_per_node: tuple[int, ...]

    def bundles(self) -> list[dict[str, float]]:
        """What to reserve of each node, as Ray's placement groups want it."""
        bundles = []
        for hosts, cpus in zip(self.hosts_per_node, self.cpus_per_node, strict=True):
            bundle: dict[str, float] = {"CPU": cpus} if cpus else {}
            if self.platform == "gpu":
                bundle["GPU"] = hosts * self.devices_per_host
            bundles.append(bundle)
        return bundles


def import_ray() -> Any:
    """Ray, which is an optional dependency."""
    try:
        import ray
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "ray"
        state = "not installed" if is_missing else f"installed, but cannot be imported ({error})"
        raise ClusterError(
            f"A Ray cluster was asked for, and Ray is {state}. Install it with "
            "pip install 'autopar[ray]', on every node, or use init(cluster='local')."
        ) from error
    return ray


def connect(address: str | None) -> bool:
    """Make this process a driver of a Ray cluster; True if it was not one before. Then
    `ray.shutdown()` leaves the cluster, and stops it if it was started here.

    A Ray that this process is connected to already is used as it is. Without an address, that in
    RAY_ADDRESS is used, and a cluster of this machine alone is started if there is none.
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
        # Ray would run workers behind everything else, the user's data loading among it.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        with warnings.catch_warnings():  # about Ray's own future
            warnings.simplefilter("ignore")
            ray.init(**options)
    except Exception as error:
        otherwise = "or leave the address out to start one on this machine."
        if address == "local":  # Ray gives its own processes 30 s
            otherwise = "or try again: on a busy machine Ray's own processes may start too late."
        raise ClusterError(
            f"init(address={address!r}): Ray says: {error}\nStart a cluster with 'ray start "
            f"--head' and give its address, {otherwise}"
        ) from error
    return True


def _check_listening(address: str) -> None:
    """Ray itself waits long for a cluster that is not there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"init(address={address!r}): no Ray cluster there ({error}). Needed is the 'host:port' "
            "that 'ray start --head' prints, reachable from here."
        ) from error


def read_nodes() -> list[RayNode]:
    """The nodes that are alive, in the order of their addresses."""
    nodes = []
    for entry in import_ray().nodes():
        if entry["Alive"]:
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
    nodes: Sequence[RayNode], num_hosts: int | None, devices_per_host: int | None
) -> Layout:
    """Hosts on these nodes; what is None is what the nodes have."""
    check_counts(num_hosts, devices_per_host)
    with_gpus = [node for node in nodes if node.gpus]
    if with_gpus:
        return _of_gpus(with_gpus, nodes, num_hosts, devices_per_host)
    return _of_cpus(nodes, num_hosts, devices_per_host)


def check_counts(num_hosts: int | None, devices_per_host: int | None) -> None:
    for name, given in (("num_hosts", num_hosts), ("devices_per_host", devices_per_host)):
        whole = isinstance(given, int) and not isinstance(given, bool)
        if given is not None and not (whole and given >= 1):
            raise ArgumentError(
                f"init({name}={given!r}): needs a whole number ≥ 1, or None for what there is."
            )


def _of_gpus(
    nodes: Sequence[RayNode],
    all_nodes: Sequence[RayNode],
    num_hosts: int | None,
    devices_per_host: int | None,
) -> Layout:
    per_host = devices_per_host or min(node.gpus for node in nodes)
    room = [node.gpus // per_host for node in nodes]
    wanted = num_hosts or max(1, sum(room))
    if wanted > sum(room):
        raise ClusterError(
            f"init(num_hosts={num_hosts}, devices_per_host={devices_per_host}): needs {wanted} × "
            f"{per_host} GPUs, a host's all on one node; the Ray cluster has room for {sum(room)} "
            f"such hosts.\n{_listed(all_nodes)}\nAsk for less, or add nodes."
        )
    used = []
    for node, hosts in zip(nodes, room, strict=True):
        taken = min(hosts, wanted - sum(count for _, count in used))
        if taken:
            used.append((node, taken))
    kinds = {node.kind for node, _ in used}
    if len(kinds) > 1:
        raise ClusterError(
            f"The devices of a cluster must be of one kind; the nodes have {sorted(kinds)}.\n"
            f"{_listed([node for node, _ in used])}\nUse nodes of one kind: fewer hosts, or "
            "another Ray cluster."
        )
    return Layout(
        "gpu",
        per_host,
        tuple(hosts for _, hosts in used),
        tuple(min(hosts, node.cpus) for node, hosts in used),
    )


def _of_cpus(
    nodes: Sequence[RayNode], num_hosts: int | None, devices_per_host: int | None
) -> Layout:
    nodes = [node for node in nodes if node.cpus] or list(nodes)
    if not nodes:
        raise ClusterError("The Ray cluster has no node that is alive. Add nodes, then try again.")
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
