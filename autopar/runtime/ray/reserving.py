"""Reserves and releases a session's nodes: a placement group, an agent per node, its hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from autopar.errors import ClusterError
from autopar.runtime.ray import agent as agent_module
from autopar.runtime.ray.nodes import Layout, lay_out_at_least, read_nodes
from autopar.runtime.ray.session import Host, NodeHandle, RaySession, remote_class


def reserve(
    session: RaySession,
    num_hosts: int | None,
    devices_per_host: int | None,
    min_devices: int | None = None,
) -> None:
    """Reserve the resources; leaves out nodes that vanish meanwhile. `min_devices`: how few will
    do; None for all that is asked for."""
    until_s = time.monotonic() + session.limits.start_s
    layout = _place(session, num_hosts, devices_per_host, min_devices, until_s)
    session.platform = layout.platform
    session.devices_per_host = layout.devices_per_host
    session.ranks_per_gpu = layout.ranks_per_gpu
    session.nodes = _start_agents(session, layout, until_s)
    session.hosts = tuple(_hosts(session.nodes, layout))
    names = {name for node in session.nodes for name in node.gpu_names}
    if len(names) > 1 and session.platform == "gpu":
        raise ClusterError(
            f"The devices of a cluster must be of one kind, but the nodes have {sorted(names)}. "
            "Use nodes of one kind."
        )


def release(session: RaySession, limit_s: float) -> None:
    """Release folders, agents and the placement group."""
    with contextlib.suppress(Exception):
        calls = [node.agent.remove_folder.remote() for node in session.nodes]
        session.ray.wait(calls, num_returns=len(calls), timeout=limit_s)
    for node in session.nodes:
        with contextlib.suppress(Exception):
            session.ray.kill(node.agent)
    if session.placement_group is None:
        return
    with contextlib.suppress(Exception):
        session.ray.util.remove_placement_group(session.placement_group)
        until_s = time.monotonic() + limit_s
        table = session.ray.util.placement_group_table
        while table(session.placement_group).get("state") not in ("REMOVED", None):
            if time.monotonic() > until_s:
                break
            time.sleep(0.05)


def _place(
    session: RaySession,
    num_hosts: int | None,
    devices_per_host: int | None,
    min_devices: int | None,
    until_s: float,
) -> Layout:
    """Reserve the current nodes; repeated until Ray has reserved all of them."""
    while True:
        nodes = read_nodes()
        layout = lay_out_at_least(
            nodes, num_hosts, devices_per_host, session.ranks_per_gpu, min_devices
        )
        strategy = "STRICT_SPREAD" if len(layout.hosts_per_node) > 1 else "STRICT_PACK"
        session.placement_group = session.ray.util.placement_group(
            layout.bundles(), strategy=strategy
        )
        while {n.id for n in read_nodes()} == {n.id for n in nodes}:
            if session.placement_group.wait(1.0):
                return layout
            if time.monotonic() > until_s:
                listed = "\n".join(f"  node {node.described()}" for node in nodes)
                raise ClusterError(
                    f"Ray could not reserve {layout.bundles()} within "
                    f"{session.limits.start_s:.0f} s: others use these resources, or nodes are "
                    f"not ready. Use fewer, or free some. The nodes have in total:\n{listed}"
                )
        session.ray.util.remove_placement_group(session.placement_group)


def _start_agents(session: RaySession, layout: Layout, until_s: float) -> tuple[NodeHandle, ...]:
    from ray import cloudpickle
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    agents = []
    cloudpickle.register_pickle_by_value(agent_module)
    try:
        actor = remote_class(session.ray, agent_module.NodeAgent)
        for bundle, gpus in enumerate(layout.gpus_per_node()):
            strategy = PlacementGroupSchedulingStrategy(
                session.placement_group, placement_group_bundle_index=bundle
            )
            options = actor.options(
                num_cpus=0, num_gpus=gpus, max_concurrency=8, scheduling_strategy=strategy
            )
            agents.append(options.remote(session.id, bundle))
    finally:
        cloudpickle.unregister_pickle_by_value(agent_module)
    calls = [agent.hello.remote() for agent in agents]
    try:
        hellos = session.ray.get(calls, timeout=max(1.0, until_s - time.monotonic()))
    except Exception as error:
        raise ClusterError(
            f"The agents of the nodes did not start: {error}. See Ray's logs on the nodes."
        ) from error
    handles = [
        NodeHandle(
            agent,
            bundle,
            hello["node_id"],
            hello["address"],
            hello["name"],
            hello["folder"],
            tuple(hello["gpu_ids"]),
            tuple(hello["gpu_names"]),
        )
        for bundle, (agent, hello) in enumerate(zip(agents, hellos, strict=True))
    ]
    order = {node.id: number for number, node in enumerate(read_nodes())}
    return tuple(sorted(handles, key=lambda handle: order.get(handle.node_id, len(order))))


def _hosts(nodes: Sequence[NodeHandle], layout: Layout) -> list[Host]:
    """Hosts in the order of nodes. Ray chooses the node of each bundle, so each node has the hosts
    of its own bundle."""
    hosts = []
    for node in nodes:
        for i in range(layout.hosts_per_node[node.bundle]):
            hosts.append(Host(len(hosts), node, layout.devices_of(node.gpu_ids, i)))
    return hosts
