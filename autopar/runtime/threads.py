"""Programs on virtual CPU devices, which share one pool of threads.

Two programs in flight on the same devices can each hold threads that the other's collectives wait
for, and XLA then aborts the process. So a program starts only when its arguments are ready and the
last program on each of its devices is done. Programs on other devices may run meanwhile. On
accelerators, and on a single device, nothing waits.

On a mesh of several processes, each process waits for its own devices only. All run the same
programs in the same order, so every process reaches whatever another one waits for. Collectives
between processes block the threads they run on, and XLA has no more than a thread per device for
certain. So while one runs, nothing that another process needs may wait for a thread of this one:
tiles that leave are cut before the next program starts (`must_leave_first`), and the transfer
server sends them, and receives others, by threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

Results = TypeVar("Results", bound=Sequence[jax.Array])

# device -> the smallest result of the last program on it, which is ready when the program is done.
_latest: dict[Any, jax.Array] = {}
# device -> what other processes get, which is ready before the next program starts.
_leaving: dict[Any, list[jax.Array]] = {}


def must_run_alone(mesh: Mesh) -> bool:
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def run_alone(
    program: Callable[..., Results], arguments: Sequence[Any], devices: Sequence[Any]
) -> Results:
    """Run a program when nothing else is running on its devices."""
    before = {id(result): result for result in map(_latest.get, devices)}
    for result in before.values():
        if result is not None and not result.is_deleted():
            result.block_until_ready()
    leaving = [array for device in devices for array in _leaving.pop(device, ())]
    jax.block_until_ready([array for array in leaving if not array.is_deleted()])
    jax.block_until_ready(arguments)
    results = program(*arguments)
    if results:
        smallest = min(results, key=lambda one: one.size)
        for device in devices:
            _latest[device] = smallest
    return results


def must_leave_first(arrays: Sequence[jax.Array], devices: Sequence[Any]) -> None:
    """The next program that runs alone on these devices starts when the arrays are ready."""
    _leaving.setdefault(devices[0], []).extend(arrays)
