"""The place of a worker process in its cluster, and answers that come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class WorkerPlace:
    """worker:        number in the session, never reused.
    rank:          the process's number in its mesh, of `num_processes`.
    host:          number of the host in the cluster; `node` is its name or address, for messages.
    devices:       the cluster's numbers of this worker's devices, in the order of
                   `local_devices()`.
    mesh_devices:  those of the whole mesh, in the order of `all_devices()`.
    platform:      "cpu" or "gpu".
    address:       this host's address, for servers that other workers and the driver connect to.
    token:         the session's secret, which every connection must prove first.
    folder:        the session's folder on this host; removed at shutdown.
    device_ids:    JAX's numbers of the mesh's devices, where JAX knows others besides; None: the
                   mesh has all devices that JAX knows.
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
    device_ids: tuple[int, ...] | None = None

    def all_devices(self) -> list[Any]:
        """The mesh's devices, including those of other processes."""
        if self.device_ids is None:
            return list(jax.devices())
        by_id = {device.id: device for device in jax.devices()}
        return [by_id[number] for number in self.device_ids]

    def local_devices(self) -> list[Any]:
        """The mesh's devices in this process."""
        if self.device_ids is None:
            return list(jax.local_devices())
        return [d for d in self.all_devices() if d.process_index == jax.process_index()]


@dataclass(frozen=True)
class Later:
    """An answer that is not known yet: `wait` is called on another thread, and the next command may
    run meanwhile."""

    wait: Callable[[], Any]
