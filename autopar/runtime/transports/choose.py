"""Which transport a pair of meshes uses, and how a worker gets one by name."""

from __future__ import annotations

from autopar.errors import ClusterError
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.transports.base import Transport
from autopar.runtime.transports.jax_transfer import JaxTransfer

NAMES = ("nccl", "cuda_ipc", "jax_transfer")


def make_transport(name: str, place: WorkerPlace) -> Transport:
    """A worker's end of a transport; it must have seen its devices."""
    if name == "jax_transfer":
        return JaxTransfer(place)
    raise ClusterError(f"there is no transport {name!r}; there are {', '.join(NAMES)}")
