"""The place of a worker process in its cluster, and answers that come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkerPlace:
    """worker:        number in the session, never reused.
    rank:          the process's number in its mesh, of `num_processes`.
    host:          number of the host in the cluster; `node` is its name or address, for messages.
    devices:       the cluster's numbers of this process's devices, in the order of
                   `jax.local_devices()`.
    mesh_devices:  those of the whole mesh, in the order of `jax.devices()`.
    platform:      "cpu" or "gpu".
    address:       this host's address, for servers that other workers and the driver connect to.
    token:         the session's secret, which every connection must prove first.
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
    token: str = field(repr=False)
    folder: str


@dataclass(frozen=True)
class Later:
    """An answer that is not known yet: `wait` is called on another thread, and the next command may
    run meanwhile."""

    wait: Callable[[], Any]
