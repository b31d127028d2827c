"""Collectives and transfers between devices: from a sample to a timed sample.

A collective runs in groups of `ranks` devices, `stride` apart, all groups at once, as along one
axis of a mesh; a loop inside one program repeats it. A crossing moves an array from one half of the
devices to the other, shard by shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import _jax
from autopar.ir.profile import CollectiveTime, CrossingSample, Timing
from autopar.measure.profile.repeating import Bench, placed
from autopar.measure.profile.works import Arrays, Operand, tie
from autopar.runtime.timing import time_calls

_NUMBER = 4  # bytes of a float32
# Repeated on its own result. With a tie XLA would copy: GPUs reduce in place, and CPUs compute the
# slices of an all-to-all together with a tie.
_CHAINED = {(False, "all-reduce"), (True, "all-to-all")}  # (on CPUs, kind)


def placements(num_devices: int, ranks_per_host: int) -> Iterator[tuple[int, int, int]]:
    """(ranks, stride, ranks per host) of the groups along the axes of all meshes of the devices;
    hosts have equal blocks of devices."""
    for ranks in range(2, num_devices + 1):
        for stride in range(1, num_devices // ranks + 1):
            if num_devices % (ranks * stride) == 0:
                yield ranks, stride, max(1, min(ranks, ranks_per_host // stride))


def collective(
    sample: CollectiveTime, platform: str
) -> tuple[tuple[Operand, ...], Callable[[Arrays], Arrays]]:
    """(arrays of every device, one collective over the axis "g" of the mesh)."""
    ranks = sample.ranks
    whole = max(1, round(sample.num_bytes / _NUMBER / ranks**2)) * ranks**2
    full, part = Operand((whole,), zeros=True), Operand((whole // ranks,), zeros=True)

    def permute(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "g", [(i, (i + 1) % ranks) for i in range(ranks)])

    operand, result, run = {
        "all-reduce": (full, full, lambda x: lax.psum(x, "g")),
        "all-gather": (part, full, lambda x: lax.all_gather(x, "g", tiled=True)),
        "reduce-scatter": (full, part, lambda x: lax.psum_scatter(x, "g", tiled=True)),
        "all-to-all": (part, part, lambda x: lax.all_to_all(x, "g", 0, 0, tiled=True)),
        "collective-permute": (part, part, permute),
    }[sample.kind]

    def step(carry: Arrays) -> Arrays:
        x = tie(carry[0], carry[1], platform)
        return x, run(x)

    if (platform == "cpu", sample.kind) in _CHAINED:
        return (operand,), lambda carry: (run(carry[0]),)
    return (operand, result), step


def collective_program(
    sample: CollectiveTime, devices: tuple[Any, ...], trips: int
) -> tuple[Any, tuple[jax.Array, ...]]:
    """The jitted loop and its first carry."""
    shape = (len(devices) // (sample.ranks * sample.stride), sample.ranks, sample.stride)
    mesh = Mesh(np.array(devices).reshape(shape), ("o", "g", "i"))
    spec = PartitionSpec(("o", "g", "i"))
    operands, step = collective(sample, devices[0].platform)

    def loop(*carry: jax.Array) -> Arrays:
        local = tuple(x.reshape(x.shape[1:]) for x in carry)
        local = lax.fori_loop(0, trips, lambda _, x: step(x), local)
        return tuple(x[None] for x in local)

    mapped = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped, donate_argnums=tuple(range(len(operands))))
    return program, tuple(placed(o, NamedSharding(mesh, spec)) for o in operands)


def whole_bytes(sample: CollectiveTime, carry: Arrays, num_devices: int) -> float:
    """Bytes of the tensor if the group did not split it."""
    of_operand = carry[0].nbytes / num_devices
    is_whole = sample.kind in ("all-reduce", "reduce-scatter")
    return float(of_operand if is_whole else of_operand * sample.ranks)


def time_collective(
    bench: Bench, sample: CollectiveTime, num_samples: int | None = None
) -> CollectiveTime:
    """The sample with its time and actual bytes."""
    guess_s = bench.guess_link_s(sample.kind, sample.num_bytes)
    trips = max(1, min(500, round(bench.pace.program_s / guess_s)))
    program, carry = collective_program(sample, bench.devices, trips)
    num_bytes = whole_bytes(sample, carry, len(bench.devices))
    bench.meet()
    compiled = program.lower(*carry).compile()
    bench.meet()
    state = [jax.block_until_ready(compiled(*carry))]
    del carry
    started = time.perf_counter()
    state[0] = jax.block_until_ready(compiled(*state[0]))
    once_s = bench.slowest(time.perf_counter() - started)

    def call() -> Any:
        state[0] = compiled(*state[0])
        return state[0]

    timing = time_calls(
        call,
        limit_s=bench.pace.limit_s,
        min_samples=num_samples or bench.pace.num_samples if once_s < 0.5 else 3,
        max_samples=20,
        warm_up=0,
        slowest=bench.slowest,
    )
    bench.learn_link(sample.kind, timing.seconds / trips / guess_s)
    others_s = bench.tied_loop_s if len(state[0]) > 1 else bench.loop_s
    each_s = timing.seconds / trips
    timing = replace(timing, seconds=max(each_s - others_s, 0.1 * each_s))
    return replace(sample, num_bytes=num_bytes, time=timing)


def time_crossing(
    bench: Bench, sample: CrossingSample, num_samples: int | None = None
) -> CrossingSample:
    """From the first devices to the following ones, one to one. Each crossing is awaited before the
    next starts, so this is the latency of one."""
    operand = Operand((max(1, round(sample.num_bytes / _NUMBER)),), zeros=True)
    send = (_copy if bench.group is None else _permutation)(bench, sample.num_pairs, operand)
    bench.meet()
    timing: Timing = time_calls(
        lambda: jax.block_until_ready(send()),
        limit_s=bench.pace.limit_s,
        min_samples=num_samples or bench.pace.num_samples,
        max_samples=20,
        slowest=bench.slowest,
    )
    return replace(sample, num_bytes=float(operand.num_bytes), time=timing)


def _copy(bench: Bench, pairs: int, operand: Operand) -> Callable[[], Any]:
    """A copy of every shard, as the runtime makes it between devices of one process."""
    sides = [
        NamedSharding(Mesh(np.array(side), ("d",)), PartitionSpec("d"))
        for side in (bench.devices[:pairs], bench.devices[pairs : 2 * pairs])
    ]
    array = placed(operand, sides[0])
    copy = _jax.shard_copier([sides[1]])
    return lambda: copy([array])


def _permutation(bench: Bench, pairs: int, operand: Operand) -> Callable[[], Any]:
    """The same between devices of several processes, which must all take part."""
    spec = PartitionSpec("d")
    there = [(sender, sender + pairs) for sender in range(pairs)]
    program = jax.jit(
        jax.shard_map(
            lambda x: lax.ppermute(x, "d", there),
            mesh=bench.mesh(),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    array = placed(operand, NamedSharding(bench.mesh(), spec))
    bench.meet()
    compiled = program.lower(array).compile()
    return lambda: compiled(array)
