"""`autopar demo`: an unmodified train step on one device and on all, compared step by step.

It says what is compared, trains twice, shows the plan in ten lines, and ends with a verdict and
the next command. Compiling and planning are timed apart from the steps.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from textwrap import fill
from typing import Any, TextIO

from autopar.cli.demo_models import Batch, DemoModel, make_model

TOLERANCE = 2e-3
VIRTUAL_DEVICES = 8
NEXT = """\
next: see it for your own model. Write a function that returns (train_step, (state, batch)), then
  autopar plan my_train.py:make_step --cluster 1x8:h100-sxm --report plan.html
plans it for eight H100s that you need not have, and plan.html shows the plan (docs/start.md)."""


@dataclass(frozen=True)
class DemoRun:
    """`first_s`: of the first step, with planning and compiling; `step_s`: of one of the others."""

    losses: list[float]
    first_s: float
    step_s: float


def run_demo(
    steps: int,
    batch_size: int,
    platform: str,
    cluster: str = "local",
    model: str = "gpt",
    out: TextIO = sys.stdout,
) -> bool:
    """Train, print, compare; True if the losses agree."""
    import jax

    if cluster == "ray":
        return _on_ray(steps, batch_size, model, out)
    if platform != "gpu":
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    import autopar

    demo = make_model(model)
    devices = jax.devices()
    is_virtual = devices[0].platform == "cpu"
    kind = "virtual CPU devices" if is_virtual else devices[0].device_kind
    print(_introduction(demo, batch_size, f"{len(devices)} {kind}", is_virtual), file=out)
    step = autopar.parallelize(demo.train_step, method=_method(model, len(devices)))
    return _compare(demo, list(demo.batches(steps, batch_size)), step, is_virtual, out)


def _method(model: str, num_devices: int) -> Any:
    import autopar

    if model != "pipeline":
        return None
    return autopar.PipeshardParallel(4, stages=autopar.UniformStages(min(2, num_devices)))


def _introduction(demo: DemoModel, batch_size: int, devices: str, is_virtual: bool) -> str:
    text = (
        f"Training {demo.what}, {batch_size} {demo.unit} per step. The same unmodified step runs "
        f"twice: by jax.jit on one device, and by autopar on {devices}."
    )
    if is_virtual:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        text += (
            f" Virtual devices share this machine's {cores} cores, so they cannot be faster than "
            "one device: this shows that the results agree, not a speed-up."
        )
    return fill(text, 96) + "\n"


def _on_ray(steps: int, batch_size: int, model: str, out: TextIO) -> bool:
    """Train on a Ray cluster that is started here: two stages on two hosts of two devices, virtual
    ones without GPUs, or all GPUs of this host."""
    import autopar

    method = None
    try:
        autopar.init(cluster="ray", num_hosts=2, devices_per_host=2)
        method = autopar.PipeshardParallel(4, stages=autopar.UniformStages(2))
        where = "a Ray cluster of two hosts with two virtual devices, as two stages"
    except autopar.ClusterError:
        autopar.init(cluster="ray")
        where = "the GPUs of this host, with Ray"
    try:
        demo = make_model(model)
        print(_introduction(demo, batch_size, where, method is not None), file=out)
        step = autopar.parallelize(demo.train_step, method=method)
        batches = list(demo.batches(steps, batch_size))
        return _compare(demo, batches, step, method is not None, out)
    finally:
        autopar.shutdown()


def _compare(
    demo: DemoModel, batches: list[Batch], parallel_step: Any, is_virtual: bool, out: TextIO
) -> bool:
    import jax

    alone = _train(jax.jit(demo.train_step), demo.state, batches, "one device", out)
    sharded = _train(parallel_step, demo.state, batches, "all devices", out)
    executable = parallel_step.last_executable
    assert executable is not None
    own = ", whose step is predicted for devices with cores of their own" if is_virtual else ""
    print(f"\nThe plan{own}:\n{executable.plan}\n", file=out)
    worst = max(abs(a - b) for a, b in zip(alone.losses, sharded.losses, strict=True))
    agrees = worst <= TOLERANCE
    print(
        f"losses {'agree' if agrees else 'DIFFER'}: the largest difference of {len(batches)} steps "
        f"is {worst:.1e} (tolerance {TOLERANCE:.0e})",
        file=out,
    )
    print(_verdict(agrees, alone, sharded, executable.plan.num_devices, is_virtual), file=out)
    print(NEXT, file=out)
    return agrees


def _verdict(
    agrees: bool, alone: DemoRun, sharded: DemoRun, num_devices: int, is_virtual: bool
) -> str:
    if not agrees:
        return "verdict: the results differ, which is a bug of autopar. Please report this output."
    text = f"verdict: autopar ran the step on {num_devices} devices with the results of one"
    if is_virtual or not sharded.step_s:
        return f"{text}."
    return (
        f"{text}, {alone.step_s / sharded.step_s:.2f} times as fast (a step of this size gains "
        "little; larger models gain more)."
    )


def _train(step: Any, state: Any, batches: list[Batch], label: str, out: TextIO) -> DemoRun:
    import jax
    import jax.numpy as jnp

    state = jax.tree.map(jnp.copy, state)  # the sharded step donates its state
    losses: list[float] = []
    started = first = time.perf_counter()
    for index, batch in enumerate(batches):
        state, loss = step(state, batch)
        losses.append(float(loss))
        if index == 0:
            first = time.perf_counter()
        _progress(label, index + 1, len(batches), out)
    ended = time.perf_counter()
    run = DemoRun(losses, first - started, (ended - first) / max(1, len(batches) - 1))
    start = "\r" if out.isatty() else ""
    what = "compiling" if label == "one device" else "planning and compiling"
    print(
        f"{start}{label:11}  {what} {run.first_s:.1f} s, then {len(batches) - 1} steps of "
        f"{1e3 * run.step_s:.0f} ms; loss {losses[0]:.4f} → {losses[-1]:.4f}",
        file=out,
    )
    return run


def _progress(label: str, done: int, total: int, out: TextIO) -> None:
    if not out.isatty():
        return
    filled = round(24 * done / total)
    bar = "█" * filled + "░" * (24 - filled)
    print(f"\r{label:11} {bar} {done}/{total}", end="", file=out, flush=True)
