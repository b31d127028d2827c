"""Work repeated on all devices at once: from `Work` and devices to a `Timing` of one step.

Every device runs the same loop on arrays of its own, as the devices of a mesh do with their parts
of a step: on virtual CPU devices, which share their cores, a product takes longer than alone. The
loop makes a program long enough that starting it does not count; its carry goes into the next call,
so calls wait for each other and memory is that of one.
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

from autopar.ir.mesh import device_spec, preset_of
from autopar.ir.profile import Timing
from autopar.profiling.works import Arrays, Operand, Work, np_dtype
from autopar.runtime.timing import time_calls

MOST_TRIPS = 4000


@dataclass(frozen=True)
class Pace:
    """How long is measured: seconds that a program should take, that a sample of several calls
    should, and the most that all samples of one work may, beyond the first few."""

    program_s: float
    sample_s: float
    limit_s: float
    num_samples: int = 5


# GPUs that are busy for long clock lower, as in training: samples are long there.
PACES = {
    ("gpu", False): Pace(0.02, 0.06, 0.5),
    ("gpu", True): Pace(0.01, 0.03, 0.2),
    ("cpu", False): Pace(0.02, 0.02, 0.3),
    ("cpu", True): Pace(0.01, 0.01, 0.1, 3),
}


@dataclass
class Bench:
    """The devices, and what is known of them so far.

    loop_s, tied_loop_s: what the loop around a step adds to its time, without and with a tie.
    slowness:            measured over guessed seconds, by the kind of the work.
    """

    devices: tuple[Any, ...]
    pace: Pace
    loop_s: float = 0.0
    tied_loop_s: float = 0.0
    slowness: dict[str, float] = field(default_factory=dict)
    _spec: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = self.devices[0]
        self._spec = device_spec(preset_of(first.platform, first.device_kind))

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    def time_work(self, work: Work, num_samples: int | None = None) -> Timing:
        """Of one step alone: tie and loop are taken off. It is never less than a tenth of what was
        measured: what is much smaller than its tie cannot be seen."""
        guess_s = self._guess_s(work)
        trips = min(MOST_TRIPS, max(1, round(self.pace.program_s / guess_s)))
        with_ties = self.time_loop(work, trips, num_samples)
        self.slowness[work.kind] = self._slowness(work) * with_ties.seconds / guess_s
        others_s = self.tied_loop_s if work.is_tied else self.loop_s
        return replace(
            with_ties, seconds=max(with_ties.seconds - others_s, 0.1 * with_ties.seconds)
        )

    def time_loop(self, work: Work, trips: int, num_samples: int | None = None) -> Timing:
        """Seconds per trip, everything counted."""
        program = self.program(work, trips)
        carry = tuple(map(self.on_all, work.carry))
        constants = tuple(map(self.on_all, work.constants))
        compiled = program.lower(carry, constants).compile()
        state = [jax.block_until_ready(compiled(carry, constants))]
        del carry
        started = time.perf_counter()
        state[0] = jax.block_until_ready(compiled(state[0], constants))
        once_s = time.perf_counter() - started
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
        )
        return replace(timing, seconds=timing.seconds / num_calls / trips)

    def program(self, work: Work, trips: int) -> Any:
        """The jitted loop, on global arrays whose first dimension is the devices'."""

        def loop(carry: Arrays, constants: Arrays) -> Arrays:
            return lax.fori_loop(0, trips, lambda _, own: work.step(own, constants), carry)

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

    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), ("d",))

    def on_all(self, operand: Operand) -> jax.Array:
        if len(self.devices) == 1 and operand.zeros:
            return jnp.zeros(operand.shape, np_dtype(operand.dtype), device=self.devices[0])
        values = operand.values()
        if len(self.devices) == 1:
            return jax.device_put(values, self.devices[0])
        return placed(values, NamedSharding(self.mesh(), PartitionSpec("d")))

    def _guess_s(self, work: Work) -> float:
        flops_s = work.flops / self._spec.flops_16bit
        bytes_s = work.num_bytes / self._spec.memory_bandwidth
        return max(flops_s, bytes_s, 2e-6) * self._slowness(work)

    def guess_link_s(self, kind: str, num_bytes: float) -> float:
        spec = self._spec
        guess_s = spec.intra_host_alpha_s + 2 * num_bytes / spec.intra_host_bandwidth
        return guess_s * self.slowness.get(kind, 10.0)

    def learn_link(self, kind: str, factor: float) -> None:
        self.slowness[kind] = self.slowness.get(kind, 10.0) * factor

    def _slowness(self, work: Work) -> float:
        start = 1.0 if self.platform == "gpu" else 10.0
        return self.slowness.get(work.kind, start)


def placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array whose first dimension is of devices, each of which has these values."""
    here = jax.process_index()
    devices = sharding.mesh.devices
    assert devices is not None
    own = [device for device in devices.flat if device.process_index == here]
    parts = [jax.device_put(values[None], device) for device in own]
    shape = (sharding.num_devices, *values.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _per_device(loop: Callable[[Arrays, Arrays], Arrays]) -> Callable[[Arrays, Arrays], Arrays]:
    """The loop on arrays with a first dimension of one."""

    def own(carry: Arrays, constants: Arrays) -> Arrays:
        result = loop(_without_first(carry), _without_first(constants))
        return tuple(x[None] for x in result)

    return own


def _without_first(arrays: Sequence[jax.Array]) -> Arrays:
    return tuple(x.reshape(x.shape[1:]) for x in arrays)
