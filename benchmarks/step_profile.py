"""One step under JAX's profiler: from a function that runs it to the seconds of its kernels.

`profile_of` returns the profile's bytes, which are parsed later and elsewhere by `kernels_of`: some
versions of the parser abort the process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

Kernels = dict[str, tuple[int, float]]  # HLO instruction, or the kernel's name → runs, seconds


def profile_of(run: Callable[[], Any]) -> bytes:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False  # the program is there already
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return path.read_bytes()


def kernels_of(data: Any) -> Kernels:
    """The kernels on a GPU's streams, of `jax.profiler.ProfileData`: by HLO instruction where the
    profiler knows it, else by the kernel's own name. In command buffers that is the instruction's,
    with underscores for dots."""
    found: dict[str, list[float]] = {}
    for plane in data.planes:
        lines = plane.lines if plane.name.startswith("/device:GPU") else ()
        for line in lines:
            for event in line.events if line.name.startswith("Stream") else ():
                name = str(dict(event.stats).get("hlo_op") or event.name)
                name = event.name if name.startswith("command_buffer") else name
                sums = found.setdefault(name, [0, 0.0])
                sums[0] += 1
                sums[1] += 1e-9 * event.duration_ns
    return {name: (int(runs), seconds) for name, (runs, seconds) in found.items()}
