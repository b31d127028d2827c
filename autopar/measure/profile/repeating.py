"""Repeated work on all devices at once: from a `Workload` and devices to a `Timing` of one step.

Every device runs the same loop on arrays of its own, as the devices of a mesh do with their parts
of a step: on virtual CPU devices, which share their cores, a product takes longer than alone. The
loop makes a program long enough that starting it does not count; its carry goes into the next call,
so calls wait for each other and memory is that of one. Short work on GPUs has `SHORT_STEPS` steps
per trip, which XLA starts as one CUDA graph, as it does with a real step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.devices import device_spec, preset_of
from autopar.ir.profile import Timing
from autopar.measure.profile.rank_group import RankGroup
from autopar.measure.profile.works import Arrays, Operand, Workload, first_of, np_dtype, tie
from autopar.runtime.timing import time_calls

MOST_TRIPS = 4000
SHORT_BYTES, SHORT_STEPS = 64e6, 8


@dataclass(frozen=True)
class Pace:
    """The durations of a measurement: seconds per program, per sample of several calls, and the
    limit of all samples of one workload, beyond the first few."""

    program_s: float
    sample_s: float
    limit_s: float
    num_samples: int = 5


# GPUs under load clock lower, as in training, so samples are long there.
PACES = {
    ("gpu", False): Pace(0.02, 0.06, 0.5),
    ("gpu", True): Pace(0.01, 0.03, 0.2),
    ("cpu", False): Pace(0.02, 0.02, 0.3),
    ("cpu", True): Pace(0.01, 0.01, 0.1, 3),
}


@dataclass
class Bench:
    """The devices, and what was learned of them.

    loop_s, tied_loop_s: loop overhead per trip of one step, without and with a tie.
    together_s:          loop overhead per trip of several steps, which are launched together.
    slowness:            measured over estimated seconds, by kind of workload.
    group:               the processes of the devices, if there are several. They run the same
                         programs, so whatever decides about programs and calls is agreed.
    share:               of the preset's device that one of the devices is.
    """

    devices: tuple[Any, ...]
    pace: Pace
    loop_s: float = 0.0
    tied_loop_s: float = 0.0
    together_s: float = 0.0
    slowness: dict[str, float] = field(default_factory=dict)
    group: RankGroup | None = None
    share: float = 1.0
    _spec: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = self.devices[0]
        self._spec = device_spec(preset_of(first.platform, first.device_kind))

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    def slowest(self, seconds: float) -> float:
        """The time of the slowest process."""
        return seconds if self.group is None else self.group.slowest(seconds)

    def meet(self) -> None:
        """Wait for the other processes: they start together, and none starts if one failed."""
        if self.group is not None:
            self.group.gather(None)

    def time_work(self, work: Workload, num_samples: int | None = None) -> Timing:
        """The time of one step, without the loop's overhead; at least half of the measurement,
        since much shorter steps cannot be resolved."""
        guess_s, steps = self._guess_s(work), self.steps_per_trip(work)
        trips = min(MOST_TRIPS, max(1, round(self.pace.program_s / guess_s / steps)))
        trip = self.time_loop(work, trips, num_samples)
        each_s = trip.seconds / steps
        self.slowness[work.kind] = self._slowness(work) * each_s / guess_s
        others_s = self.tied_loop_s if work.is_tied else self.loop_s
        if steps > 1:
            others_s = self.together_s / steps + (self.tied_loop_s if work.is_tied else 0.0)
        return replace(trip, seconds=max(each_s - others_s, 0.5 * each_s))

    def steps_per_trip(self, work: Workload) -> int:
        """Several for short work on GPUs, so that XLA launches its kernels together, as in a whole
        step."""
        is_short = 0 < work.num_bytes < SHORT_BYTES and not work.is_fusible
        return SHORT_STEPS if is_short and self.platform != "cpu" else 1

    def time_loop(self, work: Workload, trips: int, num_samples: int | None = None) -> Timing:
        """Seconds per trip, including overheads."""
        program = self.program(work, trips)
        carry = tuple(map(self.on_all, self.carry_of(work)))
        constants = tuple(map(self.on_all, work.constants))
        self.meet()  # XLA lets processes tune kernels together, too
        compiled = program.lower(carry, constants).compile()
        self.meet()
        state = [jax.block_until_ready(compiled(carry, constants))]
        del carry
        started = time.perf_counter()
        state[0] = jax.block_until_ready(compiled(state[0], constants))
        once_s = self.slowest(time.perf_counter() - started)
        num_calls = max(1, round(self.pace.sample_s / max(once_s, 1e-6)))

        def call() -> Any:
            for _ in range(num_calls):
                state[0] = compiled(state[0], constants)
            return state[0]

        timing = time_calls(
            call,
            limit_s=self.pace.limit_s,
            min_samples=num_samples or (self.pace.num_samples if once_s < 0.5 else 3),
            max_samples=20,
            warm_up=1 if once_s < 0.5 else 0,
            slowest=self.slowest,
        )
        return replace(timing, seconds=timing.seconds / num_calls / trips)

    def program(self, work: Workload, trips: int) -> Any:
        """The jitted loop, on global arrays with a leading dimension of devices."""

        def loop(carry: Arrays, constants: Arrays) -> Arrays:
            return lax.fori_loop(0, trips, lambda _, x: self._trip(work, x, constants), carry)

        if len(self.devices) == 1:
            return jax.jit(loop, donate_argnums=0)
        return jax.jit(
            jax.shard_map(
                _per_device(loop),
                mesh=self.mesh(),
                in_specs=PartitionSpec("d"),
                out_specs=PartitionSpec("d"),
                check_vma=False,
            ),
            donate_argnums=0,
        )

    def carry_of(self, work: Workload) -> tuple[Operand, ...]:
        """The carry with the results of all steps of a trip, so that XLA drops none, and the ties
        between steps."""
        steps = self.steps_per_trip(work)
        if steps == 1 or not work.is_tied:
            return work.carry
        marks = (Operand((), work.carry[1].dtype, zeros=True),) * steps
        return (work.carry[0], *(work.carry[1:] * steps), *marks)

    def _trip(self, work: Workload, carry: Arrays, constants: Arrays) -> Arrays:
        steps = self.steps_per_trip(work)
        if not work.is_tied:
            for _ in range(steps):
                carry = work.step(carry, constants)
                if steps > 1:  # or XLA would fuse them
                    carry = tuple(lax.optimization_barrier(carry))
            return carry
        if steps == 1:
            return work.step((tie(carry[0], carry[1], self.platform), *carry[1:]), constants)
        state = carry[: len(work.carry)]
        results, marks = [], []
        for _ in range(steps):
            first, mark = lax.optimization_barrier((state[0], first_of(state[1])))
            state = work.step((first, *state[1:]), constants)
            results += state[1:]
            marks.append(mark)  # or XLA would drop the dependence
        return (state[0], *results, *marks)

    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), ("d",))

    def on_all(self, operand: Operand) -> jax.Array:
        first, *others = self.devices
        if others:
            return placed(operand, NamedSharding(self.mesh(), PartitionSpec("d")))
        if operand.zeros:
            return jnp.zeros(operand.shape, np_dtype(operand.dtype), device=first)
        return jax.device_put(operand.values(), first)

    def _guess_s(self, work: Workload) -> float:
        flops_s = work.flops / self._spec.flops_16bit
        bytes_s = work.num_bytes / self._spec.memory_bandwidth
        return max(flops_s, bytes_s, 2e-6) * self._slowness(work)

    def guess_link_s(self, kind: str, num_bytes: float) -> float:
        spec = self._spec
        guess_s = spec.intra_host_alpha_s + 2 * num_bytes / spec.intra_host_bandwidth
        return guess_s * self.slowness.get(kind, 10.0)

    def learn_link(self, kind: str, factor: float) -> None:
        self.slowness[kind] = self.slowness.get(kind, 10.0) * factor

    def _slowness(self, work: Workload) -> float:
        start = 1.0 if self.platform == "gpu" else 10.0
        return self.slowness.get(work.kind, start / self.share)


def placed(operand: Operand, sharding: NamedSharding) -> jax.Array:
    """An array with a leading dimension of devices, each with these values."""
    here = jax.process_index()
    devices = sharding.mesh.devices
    assert devices is not None
    local_devices = [device for device in devices.flat if device.process_index == here]
    if operand.zeros:
        dtype = np_dtype(operand.dtype)
        parts = [jnp.zeros((1, *operand.shape), dtype, device=one) for one in local_devices]
    else:
        values = operand.values()[None]
        parts = [jax.device_put(values, device) for device in local_devices]
    shape = (sharding.num_devices, *operand.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _per_device(loop: Callable[[Arrays, Arrays], Arrays]) -> Callable[[Arrays, Arrays], Arrays]:
    """The loop on arrays with a leading dimension of one."""

    def per_device(carry: Arrays, constants: Arrays) -> Arrays:
        result = loop(_without_first(carry), _without_first(constants))
        return tuple(x[None] for x in result)

    return per_device


def _without_first(arrays: Sequence[jax.Array]) -> Arrays:
    return tuple(x.reshape(x.shape[1:]) for x in arrays)
