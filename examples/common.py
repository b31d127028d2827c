"""Shared by the examples: their options, the devices they run on, and what they print.

Without GPUs they run on eight virtual CPU devices, so you can try sharding on a laptop. On a
host with GPUs they use them, and with `--cluster ray` they run on a Ray cluster (docs/ray.md).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

import autopar

NUM_VIRTUAL = 8


def arguments(
    description: str | None, *, steps: int, batch: int, sizes: Iterable[str] = (), size: str = ""
) -> argparse.ArgumentParser:
    """A parser with the options of all examples; `sizes` are the choices of `--size`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if sizes:
        parser.add_argument("--size", choices=list(sizes), default=size)
    parser.add_argument("--steps", type=whole_number, default=steps, help=f"default: {steps}")
    parser.add_argument(
        "--batch", type=whole_number, default=batch, help=f"rows of a batch; default: {batch}"
    )
    parser.add_argument("--devices", type=whole_number, help="total number; default: all")
    parser.add_argument("--cluster", choices=["local", "ray"], default="local")
    parser.add_argument("--hosts", type=whole_number, help="of a Ray cluster; default: all")
    parser.add_argument("--address", help="of a Ray cluster; default: starts one here")
    return parser


def sized(sizes: Mapping[str, Any], size: str, **changes: int | None) -> Any:
    """The config of that size, with the given changes."""
    if size not in sizes:
        raise autopar.ArgumentError(f"unknown size {size!r}; choose from {', '.join(sizes)}.")
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(sizes[size], **given)


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needs a whole number ≥ 1")
    return int(text)


@contextlib.contextmanager
def devices(given: argparse.Namespace) -> Iterator[None]:
    """Functions parallelized inside the block run where the options say."""
    if given.cluster == "ray":
        if (given.devices or 1) % (given.hosts or 1):
            raise SystemExit(f"--devices {given.devices}: --hosts {given.hosts} must divide it")
        autopar.init(
            cluster="ray",
            address=given.address,
            num_hosts=given.hosts,
            devices_per_host=given.devices and given.devices // (given.hosts or 1),
        )
    else:
        jax.config.update("jax_num_cpu_devices", given.devices or NUM_VIRTUAL)
        found = jax.devices()
        if len(found) < (given.devices or 0):
            raise SystemExit(f"requested {given.devices} devices, found {len(found)}")
        autopar.init(devices=found[: given.devices])
    try:
        yield
    finally:
        autopar.shutdown()


def show(plan: autopar.ParallelPlan) -> None:
    """Prints the first part of `plan.explain()`: the plan, its step time and what limits it."""
    print("\n\n".join(plan.explain().split("\n\n")[:3]), end="\n\n", flush=True)


class Progress:
    """Prints losses and speed while a loop runs.

    unit, per_step: what a step processes, such as 4,096 "tokens". The first step, which plans
                    and compiles, is not counted.
    """

    def __init__(self, num_steps: int, unit: str, per_step: int) -> None:
        self._num_steps, self._unit, self._per_step = num_steps, unit, per_step
        self._every = max(1, num_steps // 6)
        self._done = 0
        self._first = self._last = self._started_s = 0.0

    def __call__(self, loss: Any) -> None:
        """Call this after each step. It reads the loss, which waits for the step, now and then."""
        self._done += 1
        if self._done == 1:
            self._first = self._last = float(loss)
            self._started_s = time.perf_counter()
            print(f"step 1  loss {self._first:.4f}", flush=True)
        if self._done > 1 and (self._done == self._num_steps or self._done % self._every == 0):
            self._last = float(loss)
            rate = (self._done - 1) * self._per_step / (time.perf_counter() - self._started_s)
            print(
                f"step {self._done}  loss {self._last:.4f}  {rate:,.0f} {self._unit}/s", flush=True
            )
        if self._done == self._num_steps:
            print(f"loss {self._first:.4f} → {self._last:.4f} in {self._done} steps", flush=True)
