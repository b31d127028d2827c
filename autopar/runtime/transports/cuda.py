"""What the CUDA transports share: CuPy, and memory of JAX arrays that CUDA calls read and write.

JAX orders its own work by events that others cannot see; DLPack connects the two. Exporting an
array for a stream (`Lent`) makes the stream wait until the array is ready, and keeps its memory
alive. An array to receive into (`Landing`) is first made by JAX, so that JAX owns its memory, then
written on a stream, and imported again as an array that is ready when the stream is. The host
never waits, and nothing is copied. Streams and events are CuPy's.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from autopar.errors import ClusterError
from autopar.runtime.transports.base import InTile


def import_cupy(transport: str) -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ClusterError(
            f"the transport {transport!r} needs CuPy, which cannot be imported ({error}). Install "
            "autopar[cuda12] or autopar[cuda13] on every host, matching JAX's CUDA there; or set "
            "AUTOPAR_TRANSPORT=jax_transfer, which needs no CuPy and is slower."
        ) from error


def import_nccl() -> Any:
    """CuPy's NCCL, with JAX's copy of the library if JAX was installed with one. A library in
    LD_PRELOAD comes first: processes that share a GPU need a newer one (`shared_gpu`)."""
    import_cupy("nccl")
    if "libnccl" in os.environ.get("LD_PRELOAD", ""):
        return _cupy_nccl()
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            break
    return _cupy_nccl()


def _cupy_nccl() -> Any:
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        available = getattr(nccl, "available", True)
        reason = "it was built without NCCL"
    except ImportError as error:
        available, nccl, reason = False, None, str(error)
    if not available:
        raise ClusterError(
            f"the transport 'nccl' needs CuPy with NCCL, which cannot be used ({reason}). Install "
            "autopar[cuda12] or autopar[cuda13] on every host, matching JAX's CUDA there; or set "
            "AUTOPAR_TRANSPORT=jax_transfer, which needs neither and is slower."
        )
    return nccl


def ordinal(device: Any) -> int:
    """CUDA's number of a JAX device in this process."""
    return int(device.local_hardware_id)


def new_stream(cupy: Any, device: Any) -> Any:
    with cupy.cuda.Device(ordinal(device)):
        return cupy.cuda.Stream(non_blocking=True)


def record(cupy: Any, device: Any, stream: Any, *, block: bool = False) -> Any:
    """An event after all current work of the stream. With `block`, waiting for it sleeps."""
    with cupy.cuda.Device(ordinal(device)):
        event = cupy.cuda.Event(block=block, disable_timing=True)
        event.record(stream)
        return event


class Lent:
    """An array's memory, for a stream to read; it lives as long as this object."""

    def __init__(self, array: Any, stream: Any) -> None:
        self._capsule = array.__dlpack__(stream=stream.ptr)
        self.pointer = array.unsafe_buffer_pointer()
        self.num_bytes = array.nbytes


class Landing:
    """Memory that a stream writes and that then becomes an array. Keep this object until the stream
    has written it, even if the array is dropped."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: Any, stream: Any) -> None:
        self._array = _room(tuple(shape), jnp.dtype(dtype), device)()
        self._lent = Lent(self._array, stream)
        self.pointer, self.num_bytes = self._lent.pointer, self._lent.num_bytes

    def array(self, cupy: Any, written: Any) -> jax.Array:
        """The array, which is ready when the event `written` is."""
        return jax.dlpack.from_dlpack(_Written(self._array, cupy.cuda.runtime, written))


class _Written:
    """An array whose memory was written after JAX made it, as a DLPack producer."""

    def __init__(self, array: Any, runtime: Any, written: Any) -> None:
        self._array = array
        self._runtime = runtime
        self._written = written

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        # The oldest version of DLPack that JAX accepts: later ones would mark the memory as
        # read-only, and it could not be donated.
        if stream is None:
            self._written.synchronize()
        else:
            self._runtime.streamWaitEvent(stream, self._written.ptr)
        return self._array.__dlpack__(stream=stream)


def expect_landings(tiles: Sequence[InTile], devices: Sequence[Any]) -> None:
    """Load the programs that make room for such tiles. CUDA may wait for the device to be idle when
    a program runs for the first time: if a receive waits there for another worker, and that one for
    this worker, for ever."""
    for shape, dtype, device in {(t.shape, str(t.dtype), t.target.device) for t in tiles}:
        _room(shape, jnp.dtype(dtype), devices[device])().block_until_ready()


@lru_cache(maxsize=4096)
def _room(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    # JAX hands memory out before earlier programs on the device are done with it. An array that a
    # program makes is ready only after them.
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))


def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
    """A tile without elements, which needs no transport."""
    return _room(tuple(shape), jnp.dtype(dtype), device)()
