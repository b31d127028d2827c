"""Where the processes of a group are: from `jax.distributed` to a `ProcessPlace` for each.

JAX knows processes, not machines. With a process per GPU, several of them are on one machine, and
links between their GPUs are links inside a host. So each process tells the others, once, the name
of its machine with its boot identifier; process 0 collects them and publishes the list. Messages go
through the store of JAX's coordination service, as in `consensus`. A process that asks alone, while
the others do something else, gets no answer within `WAIT_S`, and a warning.
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import jax

from autopar import _jax
from autopar.errors import ArgumentError
from autopar.runtime.ranks.consensus import processes_text
from autopar.runtime.ranks.shared_gpu import SHARE_VARIABLE

WAIT_S = 30.0  # for the processes that have not said yet where they are

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEY = "autopar/machines"


@dataclass(frozen=True)
class ProcessPlace:
    """machine:      equal for processes of one machine (or of one container).
    memory_bytes: what JAX may allocate on each device of the process; None if it does not say.
    """

    machine: str
    memory_bytes: float | None = None


_told = False  # whether the others can read the place of this process
_places: tuple[ProcessPlace, ...] | None = None  # of all processes, once known


def own_place() -> ProcessPlace:
    """Where this process is."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        boot = ""
    limits = [limit for device in jax.local_devices() if (limit := memory_limit(device))]
    return ProcessPlace(f"{socket.gethostname()} {boot}".strip(), min(limits, default=None))


def memory_limit(device: Any) -> float | None:
    """The bytes that JAX's allocator may take of a device of this process; None if it has no
    limit, as on CPUs."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    limit = (stats or {}).get("bytes_limit", 0)
    return float(limit) if limit > 0 else None


def ranks_per_gpu() -> int:
    """How many processes share the GPU of this one; `autopar launch` says so to its ranks."""
    given = os.environ.get(SHARE_VARIABLE, "")
    count = int(given) if given.isdecimal() else 1 if not given else 0
    if count < 1:
        raise ArgumentError(f"{SHARE_VARIABLE}={given!r}: needs a whole number ≥ 1.")
    return count


def places_of_processes() -> tuple[ProcessPlace, ...] | None:
    """The places of all processes, by their index; None, with a warning, if not all of them say
    where they are in time."""
    global _places
    if _places is not None and len(_places) == jax.process_count():
        return _places
    deadline = time.monotonic() + WAIT_S
    silent = _collect(deadline) if jax.process_index() == 0 else _receive(deadline)
    if silent:
        warnings.warn(
            f"No message within {WAIT_S:g} s from {processes_text(silent)} about its machine. So "
            "each process counts as a host, and links between processes of one machine are priced "
            "as a network. Plan in every process at the same time, or give cluster=….",
            stacklevel=4,
        )
        return None
    return _places


def _collect(deadline: float) -> Sequence[int]:
    """In process 0: read what the others tell, and publish the list. Returns those that are
    silent."""
    global _places
    places, silent = [own_place()], []
    for process in range(1, jax.process_count()):
        message = _jax.store_get(f"{_KEY}/{process}", deadline - time.monotonic())
        if message is None:
            silent.append(process)
        else:
            places.append(ProcessPlace(*json.loads(message)))
    if not silent:
        _jax.store_set(f"{_KEY}/all", json.dumps([astuple(place) for place in places]).encode())
        _places = tuple(places)
    return silent


def _receive(deadline: float) -> Sequence[int]:
    """In the other processes: tell once, and read the list. Returns [0] if there is none yet."""
    global _places, _told
    if not _told:
        own = json.dumps(astuple(own_place())).encode()
        _jax.store_set(f"{_KEY}/{jax.process_index()}", own)
        _told = True
    message = _jax.store_get(f"{_KEY}/all", deadline - time.monotonic())
    if message is None:
        return [0]
    _places = tuple(ProcessPlace(*place) for place in json.loads(message))
    return []
