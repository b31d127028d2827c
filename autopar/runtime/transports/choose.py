"""The choice of a transport: from platform and hosts to a name, and to a worker's end of it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Literal, get_args

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.transports.base import Transport

TransportName = Literal["nccl", "cuda_ipc", "jax_transfer"]
NAMES: tuple[TransportName, ...] = get_args(TransportName)
VARIABLE = "AUTOPAR_TRANSPORT"


def available_transports(platform: str) -> tuple[str, ...]:
    """The transports that this process could use."""
    from autopar.runtime.transports.cuda import import_cupy, import_nccl

    available = ["jax_transfer"]
    if platform == "gpu":
        for name, needs in (("cuda_ipc", lambda: import_cupy("cuda_ipc")), ("nccl", import_nccl)):
            try:
                needs()
            except ClusterError:
                continue
            available.append(name)
    return tuple(available)


def choose(platform: str, available: Collection[str]) -> str:
    """The transport for tiles between meshes; the variable AUTOPAR_TRANSPORT overrides it.

    platform:  of the devices, "cpu" or "gpu".
    available: the transports that every worker could use (`available_transports`).
    """
    asked = os.environ.get(VARIABLE, "")
    if asked:
        _check(asked, f"the variable {VARIABLE}")
        return asked
    return "nccl" if platform == "gpu" and "nccl" in available else "jax_transfer"


def make_transport(name: str, place: WorkerPlace) -> Transport:
    """A worker's end of a transport. Imports CuPy or JAX's transfer server only when needed."""
    _check(name, "name")
    if name == "jax_transfer":
        from autopar.runtime.transports.jax_transfer import JaxTransfer

        return JaxTransfer(place)
    if place.platform != "gpu":
        raise ClusterError(
            f"the transport {name!r} is for GPUs; worker {place.worker} on {place.node} has "
            f"{place.platform} devices. Unset {VARIABLE}, or set it to jax_transfer."
        )
    if name == "nccl":
        from autopar.runtime.transports.nccl import Nccl

        return Nccl(place)
    from autopar.runtime.transports.cuda_ipc import CudaIpc

    return CudaIpc(place)


def _check(name: str, what: str) -> None:
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise ArgumentError(f"{what} is {name!r}: unknown transport; choose from {known}.")
