"""Overheads of a machine: from a `Bench` to kernel launch, program dispatch and usable memory.

A chain of 4 × 4 products is one kernel per product on every platform, however XLA fuses: the slope
of its time over its length is the cost of a kernel, the intercept that of the loop. Both lengths
are long enough for XLA to launch a trip's kernels together, where it does. On CPUs, a loop with
only a tie is the overhead of samples.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.profile import Timing
from autopar.measure.profile.repeating import Bench, placed
from autopar.measure.profile.works import Arrays, Operand, Workload, tie
from autopar.runtime.timing import time_calls

LENGTHS = (16, 80)
_TRIPS = 200


def chain(length: int) -> Workload:
    x = Operand((4, 4))

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        (value,) = carry
        for _ in range(length):
            value = value @ constants[0]
        return (value,)

    return Workload("chain", step, (x,), (x,))


def tie_alone() -> Workload:
    def step(carry: Arrays, _: Arrays) -> Arrays:
        return (tie(carry[0], carry[0], "cpu"),)

    return Workload("tie", step, (Operand((64, 1024)),))


def measure_launch(bench: Bench) -> Timing:
    """Seconds per kernel; also sets the bench's loop overheads."""
    short, long = (bench.time_loop(chain(length), _TRIPS) for length in LENGTHS)
    slope_s = (long.seconds - short.seconds) / (LENGTHS[1] - LENGTHS[0])
    launch_s = max(slope_s, 0.01 * long.seconds / LENGTHS[1])
    if bench.platform == "cpu":
        bench.tied_loop_s = bench.time_loop(tie_alone(), _TRIPS).seconds
        bench.loop_s = max(0.0, bench.tied_loop_s - launch_s)
    else:
        bench.loop_s = bench.tied_loop_s = launch_s  # the kernel that counts trips
        bench.together_s = max(0.0, short.seconds - LENGTHS[0] * launch_s)
    spread = max(short.spread, long.spread)
    return Timing(launch_s, spread, min(short.num_samples, long.num_samples))


def measure_dispatch(bench: Bench) -> Timing:
    """Seconds per program, for trivial programs in sequence on all devices."""
    sharding = NamedSharding(bench.mesh(), PartitionSpec("d"))
    state = [placed(Operand((8,), zeros=True), sharding)]
    program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(state[0]).compile()

    def call() -> Any:
        for _ in range(100):
            state[0] = program(state[0])
        return state[0]

    bench.meet()
    timing = time_calls(call, limit_s=bench.pace.limit_s, max_samples=20, slowest=bench.slowest)
    return Timing(timing.seconds / 100, timing.spread, timing.num_samples)


SHARES = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5)


def measure_memory(bench: Bench, num_on_host: int | None = None) -> float | None:
    """Bytes per device for programs: the largest allocation that succeeds, of what JAX may use; for
    CPU devices, an equal share of the free system memory. `num_on_host`: devices that share it, if
    not all of the bench."""
    here = jax.process_index()
    device = next(device for device in bench.devices if device.process_index == here)
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        free = system_memory_bytes()
        return None if free is None else free / (num_on_host or len(bench.devices))
    bench.meet()
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    for share in SHARES:
        wanted = int(share * free) // 2**20 * 2**20
        try:
            held = jnp.zeros((wanted // 2**20, 2**20), jnp.uint8, device=device)
            jax.block_until_ready(held).delete()
            return float(wanted)
        except jax.errors.JaxRuntimeError:
            continue
    return None


def system_memory_bytes() -> float | None:
    """The available memory of the system, or of its control group if that is less."""
    available_bytes = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available_bytes.append(float(line.split()[1]) * 1024)
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            available_bytes.append(float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit != "max":
            available_bytes.append(float(limit) - float(used))
    except (OSError, ValueError):
        pass
    return min(available_bytes) if available_bytes and min(available_bytes) > 0 else None
