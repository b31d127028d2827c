"""Where a worker process stands in the cluster, and what its commands may answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerPlace:
    """worker:        number in the session; never used again.
    rank:          the process's number in its mesh group, of `num_processes`.
    host:          number of the host in the cluster; `node` is its name or address for messages.
    devices:       the cluster's numbers of this process's devices, as `jax.local_devices()` has
                   them.
    mesh_devices:  those of the whole mesh, as `jax.devices()` has them.
    platform:      "cpu" or "gpu".
    address:       this host's address, for servers that other workers and the driver connect to.
    token:         the session's secret, which every connection must begin with.
    folder:        the session's folder on this host; removed at shutdown.
    """

    worker: int
    rank: int
    num_processes: int
    host: int
    node: str
    devices: tuple[int, ...]
    mesh_devices: tuple[int, ...]
    platform: str
    address: str
    token: str
    folder: str


@dataclass(frozen=True)
class Later:
    """A command's answer that is not there yet: `wait` is called on another thread, and the command
    counts as carried out."""

    wait: Callable[[], Any]
