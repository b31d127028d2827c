"""A training that tests end by signals: `python stopped_training.py FOLDER LOSSES NUM_STEPS
[PROCESS COUNT PORT]`.

Appends "step loss" to LOSSES for every step, in one process or in several of `jax.distributed`,
each with two CPU devices; only the first one writes losses.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np

import autopar


def train_step(state, batch):
    loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.5 * grad, "count": state["count"] + 1}, loss


def batch_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(8, 8)).astype(np.float32)


class Shuffled:
    """Batches in an order that only its state knows, which belongs to one process."""

    def __init__(self, num_steps: int) -> None:
        self.left, self.rng = num_steps, np.random.default_rng(1)

    def __iter__(self) -> Shuffled:
        return self

    def __next__(self) -> np.ndarray:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return batch_of(int(self.rng.integers(1000)))

    def get_state(self) -> dict:
        state = self.rng.bit_generator.state
        return {"rng": state, "left": self.left, "process": jax.process_index()}

    def set_state(self, state: dict) -> None:
        assert state["process"] == jax.process_index()
        drawn = MANY - state["left"]
        self.rng.bit_generator.state, self.left = state["rng"], self.left - drawn


MANY = 10**9


def main() -> None:
    folder, losses_path, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    is_first = True
    if len(sys.argv) > 4:
        process, count, port = map(int, sys.argv[4:7])
        limit_s = int(os.environ.get("AUTOPAR_TEST_HEARTBEAT_S", "100"))
        jax.distributed.initialize(
            f"127.0.0.1:{port}", count, process, heartbeat_timeout_seconds=limit_s
        )
        is_first = process == 0

    def on_step(number: int, loss) -> None:
        value = np.asarray(loss.addressable_data(0))
        if is_first:
            with open(losses_path, "a") as file:
                file.write(f"{number} {float(value).hex()}\n")
        time.sleep(0.02)

    def from_number(start: int):
        return (batch_of(number) for number in range(start, num_steps))

    batches = Shuffled(MANY) if os.environ.get("STATEFUL") else from_number
    weights = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) / 3
    state, _ = autopar.run_training(
        autopar.parallelize(train_step, method=autopar.DataParallel()),
        {"w": weights, "count": 0},
        batches,
        num_steps=num_steps,
        checkpoint_dir=folder,
        checkpoint_every=int(os.environ.get("AUTOPAR_TEST_CHECKPOINT_EVERY", "1000")),
        on_step=on_step,
        grace_s=20,
    )
    count = np.asarray(state["count"].addressable_data(0))
    print(f"count {int(count)}")


if __name__ == "__main__":
    main()
