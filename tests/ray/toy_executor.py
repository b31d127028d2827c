"""An executor with a few commands, for tests of clusters: what a worker does with its devices."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import DataError
from autopar.runtime.remote.place import Later, WorkerPlace
from autopar.runtime.remote.progress import WorkerProgress


class ToyExecutor:
    def __init__(self, place: WorkerPlace, progress: WorkerProgress) -> None:
        self.place = place
        self.progress = progress
        self.done: list[int] = []

    def add(self, a, b):
        return a + b

    def length(self, data):
        return len(data)

    def where(self):
        return self.place, os.getpid(), jax.process_count(), len(jax.local_devices())

    def note(self, number):
        self.done.append(number)
        return list(self.done)

    def later(self, value, seconds):
        def wait():
            time.sleep(seconds)
            return value

        return Later(wait)

    def sleep(self, seconds):
        print(f"worker {self.place.worker} sleeps", flush=True)
        self.progress.at(2, 7, 1)
        time.sleep(seconds)

    def sum_over_mesh(self):
        """Σ of the devices' numbers: every process gives those of its own devices."""
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
        numbers = np.array(self.place.mesh_devices, dtype=np.float32)
        array = jax.make_array_from_callback(numbers.shape, sharding, lambda i: numbers[i])
        total = jax.jit(jnp.sum, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(array)
        return float(total.addressable_data(0))

    def sums_for_ever(self):
        """Collectives until somebody ends this process."""
        step = 0
        while True:
            self.progress.at(0, step, step % 4)
            self.sum_over_mesh()
            step += 1

    def environment(self, name):
        return os.environ.get(name)

    def mapped_files(self):
        """The files that are mapped into this process, libraries among them."""
        with open("/proc/self/maps") as file:
            return sorted({line.split()[-1] for line in file if "/" in line})

    def fail(self):
        raise ValueError("a value that is wrong")

    def refuse(self):
        raise DataError("a batch that cannot be taken")

    def stop_iterating(self):
        raise StopIteration

    def hoard(self, num_bytes):
        """Take memory of the host, and keep it."""
        self.hoarded = np.ones(num_bytes, np.uint8)
        time.sleep(60)

    def exhaust(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.")
