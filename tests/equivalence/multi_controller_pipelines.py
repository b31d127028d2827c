"""What each process of the tests of pipelines in processes of your own runs: scenario after
scenario, whose outcomes it writes down as JSON.

    python multi_controller_pipelines.py PROCESS NUM_PROCESSES PORT FILE SCENARIO …
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.runtime.remote.executor import Executor
from examples.models import build
from tests.equivalence import multi_controller
from tests.equivalence.multi_controller import NUM_STEPS, normal, trained

WIDTH, ROWS = 16, 16


def deep_step(state, batch):
    def loss_of(params):
        x = batch["x"]
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return ((x - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def create_deep(key):
    keys = jax.random.split(key, 4)
    return {f"w{i}": jax.random.normal(keys[i], (WIDTH, WIDTH)) for i in range(4)}


def deep_state() -> dict[str, np.ndarray]:
    return {f"w{i}": normal(i, WIDTH, WIDTH) for i in range(4)}


def deep_batch(number: int = 0) -> dict[str, np.ndarray]:
    return {"x": normal(10 + number, ROWS, WIDTH), "y": normal(50 + number, ROWS, WIDTH)}


def pipeline(num_stages: int, num_micro_batches: int = 4) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(
        num_micro_batches,
        layers=autopar.AutoLayers(4),
        stages=autopar.UniformStages(num_stages),
    )


def compared(step_fn: Any, method: Any, state: Any, batches: Any) -> dict[str, Any]:
    """Losses and the trained state beside those of `jax.jit`; and what this process holds."""
    step = autopar.parallelize(step_fn, method=method)
    held, losses = state, []
    for batch in batches:
        held, loss = step(held, batch)
        losses.append(loss)
    losses = [float(loss) for loss in losses]
    reference, wanted = state, []
    jitted = jax.jit(step_fn)
    for batch in batches:
        reference, loss = jitted(reference, batch)
        wanted.append(float(loss))
    found = jax.tree.map(np.asarray, held)
    worst = max(
        float(np.max(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True)
    )
    plan = step.last_planned.plan
    return {
        "losses": losses,
        "wanted": wanted,
        "worst": worst,
        "num_stages": plan.num_stages,
        "shown": repr(jax.tree.leaves(held)[0]),
        "replanned": plan.memory_found.replanned if plan.memory_found else [],
    }


def two_stages() -> Any:
    return compared(deep_step, pipeline(2), deep_state(), [deep_batch(n) for n in range(NUM_STEPS)])


def four_stages() -> Any:
    return compared(deep_step, pipeline(4), deep_state(), [deep_batch(n) for n in range(NUM_STEPS)])


def many_steps() -> Any:
    """Two hundred steps, most of which begin before the one before has ended, on two stages, and
    fifty on four. With four devices, stages have collectives between processes or in one."""
    found = {}
    for num_stages, num_steps in ((2, 200), (4, 50)):
        batches = [deep_batch(n % 5) for n in range(num_steps)]
        found[num_stages] = compared(deep_step, pipeline(num_stages), deep_state(), batches)
    return found


def gpt(name: str = "gpt-tiny") -> Any:
    example = build(name)
    batch = jax.tree.map(np.asarray, example.make_batch(8))
    state = jax.tree.map(np.asarray, example.create_state())
    return compared(example.train_step, pipeline(2), state, [batch] * NUM_STEPS)


def scanned_gpt() -> Any:
    return gpt("gpt-tiny-scan")


def scanned_step(state, batch):
    """Scans over layers, as many inside one another as the weights say."""

    def run(x, w):
        return (
            jnp.tanh(x @ w)
            if w.ndim == 2
            else jax.lax.scan(lambda x, w: (run(x, w), None), x, w)[0]
        )

    def loss_of(weights):
        return ((run(batch["x"], weights) - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * grads}, loss


def scanned() -> Any:
    """Each process holds the rows of its stage, two of three or one; all read the whole stack, and
    another plan takes it over, as it is or from a checkpoint."""
    return _scanned("scanned", normal(0, 3, WIDTH, WIDTH), [[0, 1], [2]], [[0], [1, 2]])


def scans_of_scans() -> Any:
    """The same, where a stage has layers of two outer trips."""
    layers = [[0, 1, 2], [3]], [[0], [1, 2, 3]]
    return _scanned("scans_of_scans", normal(0, 2, 2, WIDTH, WIDTH), *layers)


def _scanned(name: str, weights: Any, *stages: list[list[int]]) -> Any:
    state = {"w": weights}
    batches = [deep_batch(n) for n in range(NUM_STEPS)]
    folder = Path(os.environ["CHECKPOINTS"]) / name
    step, other = (
        autopar.parallelize(
            scanned_step,
            method=autopar.PipeshardParallel(
                4, stages=autopar.ManualStages(layers, [(1, 2), (1, 2)])
            ),
        )
        for layers in stages
    )
    held, losses = state, []
    for batch in batches:
        held, loss = step(held, batch)
        losses.append(float(loss))
    reference, wanted = state, []
    for batch in batches:
        reference, loss = jax.jit(scanned_step)(reference, batch)
        wanted.append(float(loss))
    autopar.save_checkpoint(folder, held, 1)
    restored = autopar.restore_checkpoint(folder, step)
    rows = [copy.rows for copy in restored["w"].copies]
    after = float(jax.jit(scanned_step)(reference, batches[0])[1])
    moved = [float(other(held, batches[0])[1]), float(step(restored, batches[0])[1])]
    return {
        "losses": losses,
        "wanted": wanted,
        "moved": moved,
        "after": after,
        "rows": rows,
    }


def with_loader_and_created_state() -> Any:
    batches = [deep_batch(n) for n in range(NUM_STEPS)]
    step = autopar.parallelize(deep_step, method=pipeline(2))
    create = autopar.parallelize(create_deep, method=autopar.CreateStateParallel(step, batches[0]))
    state = create(jax.random.key(0))
    evaluate_fn = lambda state, batch: deep_step(state, batch)[1]  # noqa: E731
    evaluate = autopar.parallelize(evaluate_fn, method=autopar.FollowParallel(step))
    losses = [float(evaluate(state, batches[0]))]
    with autopar.data_loader(batches, step, prefetch=1) as loader:
        losses += trained(step, state, loader)
    reference = jax.jit(create_deep)(jax.random.key(0))
    wanted = [float(jax.jit(evaluate_fn)(reference, batches[0]))]
    wanted += trained(jax.jit(deep_step), reference, batches)
    return {"losses": losses, "wanted": wanted}


def checkpoint() -> Any:
    """Saved by two stages, restored by the same plan, by four stages, and by one mesh."""
    folder = Path(os.environ["CHECKPOINTS"])
    batches = [deep_batch(n) for n in range(NUM_STEPS)]
    step = autopar.parallelize(deep_step, method=pipeline(2))
    state, _ = step(deep_state(), batches[0])
    autopar.save_checkpoint(folder, state, 1)
    autopar.save_checkpoint(folder, state, 2, asynchronous=True).wait(60)
    losses = {"went on": trained(step, state, batches[1:])}
    methods = {"same": pipeline(2), "four": pipeline(4), "one mesh": autopar.ShardParallel()}
    for number, (name, method) in enumerate(methods.items()):
        other = autopar.parallelize(deep_step, method=method)
        other.plan(deep_state(), batches[0])
        restored = autopar.restore_checkpoint(folder, other, step=1 + number % 2)
        losses[name] = trained(other, restored, batches[1:])
    return {"losses_by_plan": losses}


def momentum_step(state, batch):
    """Neither its 37 features nor its 25 rows can be split over two, three or four devices."""

    def loss_of(params):
        x = batch["x"]
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return (x**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    first = jax.tree.map(lambda m, g: 0.9 * m + g, state["first"], grads)
    second = jax.tree.map(lambda v, g: 0.9 * v + g * g, state["second"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - 0.1 * m / jnp.sqrt(v + 1), state["params"], first, second
    )
    return {"params": params, "first": first, "second": second}, loss


def by_default() -> Any:
    """On one mesh, every device would hold all of the state, for which there is no room."""
    params = {f"w{i}": normal(i, 37, 37) / 3 for i in range(4)}
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"params": params, "first": zeros, "second": zeros}
    batches = [{"x": normal(10 + n, 25, 37)} for n in range(NUM_STEPS)]
    room = 5 * sum(p.nbytes for p in params.values()) // 2
    method = autopar.AutoParallel(options=autopar.ShardingOptions(memory_budget_bytes=room))
    return compared(momentum_step, method, state, batches)


def out_of_memory_at_first() -> Any:
    """The worker of the last process alone has no room for the first run; no worker begins it, and
    all processes plan again."""
    params = {f"w{i}": normal(i, 128, 128) / 8 for i in range(4)}
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"params": params, "first": zeros, "second": zeros}
    batches = [{"x": normal(10 + n, 256, 128)} for n in range(NUM_STEPS)]
    free = autopar.parallelize(momentum_step, method=pipeline(2))
    free(state, batches[0])
    peak = max(free.last_planned.plan.estimated_peak_bytes, free.last_executable.memory_bytes())
    options = autopar.ShardingOptions(memory_budget_bytes=1.1 * peak)
    has_room, asked, begun = Executor.has_room, [], []
    run = Executor.step

    def too_little_at_first(executor: Executor, num_bytes: int) -> bool:
        asked.append(num_bytes)
        return has_room(executor, num_bytes) and (len(asked) > 1 or not multi_controller.is_last())

    def noted(executor: Executor, call: Any) -> Any:
        begun.append(len(asked))
        return run(executor, call)

    Executor.has_room, Executor.step = too_little_at_first, noted
    try:
        method = dataclasses.replace(pipeline(2), options=options)
        found = compared(momentum_step, method, state, batches)
    finally:
        Executor.has_room, Executor.step = has_room, run
    return {**found, "asked": asked, "begun": begun}


def across_processes() -> Any:
    """Arrays that span processes stay where they are: on one mesh."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    batch = {
        name: jax.make_array_from_callback(value.shape, rows, value.__getitem__)
        for name, value in deep_batch().items()
    }
    step = autopar.parallelize(deep_step)
    _, loss = step(deep_state(), batch)
    return {"num_stages": step.last_executable.plan.num_stages, "loss": float(loss)}


def another_plan() -> Any:
    """The last process brings a plan of its own."""
    stages = 4 if multi_controller.is_last() else 2
    plan = autopar.plan(
        deep_step,
        deep_state(),
        deep_batch(),
        cluster=autopar.ClusterSpec(1, jax.device_count(), "cpu"),
        method=pipeline(stages),
    )
    autopar.parallelize(deep_step, method=plan)(deep_state(), deep_batch())


def placed_arrays() -> Any:
    """What a process placed alone, others cannot read."""
    step = autopar.parallelize(deep_step, method=pipeline(2))
    step.plan(deep_state(), deep_batch())
    state = deep_state()
    with autopar.data_loader([deep_batch()] * 4, step, prefetch=1) as loader:
        for batch in loader:
            state, loss = step(state, batch)
        float(loss)
        np.asarray(batch["x"])


def traced() -> Any:
    """Twice: each process gets the marks of all, and the step runs on afterwards."""
    step = autopar.parallelize(deep_step, method=pipeline(4))
    state, _ = step(deep_state(), deep_batch())
    found = []
    folder = Path(os.environ["CHECKPOINTS"])
    for number in range(2):
        with autopar.trace(folder / f"trace_{jax.process_index()}_{number}.json") as trace:
            for n in range(2):
                state, loss = step(state, deep_batch(n))
        runs = [[e for e in line.events if e.kind == "run"] for line in trace.timelines]
        found.append(
            {
                "num_runs": [len(events) for events in runs],
                "stages": [sorted({event.stage for event in events}) for events in runs],
                "spans_s": [line.step_s for line in trace.timelines],
                "notes": trace.notes,
            }
        )
    _, loss = step(state, deep_batch(1))
    return {"traces": found, "loss": float(loss)}


def the_first_is_killed() -> Any:
    """Process 0, which runs JAX's coordination service: JAX ends the others, too."""
    return _killed(jax.process_index() == 0)


def a_killed_process() -> Any:
    """The last one is killed after its first step; the others learn which."""
    return _killed(multi_controller.is_last())


def _killed(is_me: bool) -> Any:
    step = autopar.parallelize(deep_step, method=pipeline(2))
    step.plan(deep_state(), deep_batch())
    state, began_s = deep_state(), time.monotonic()
    try:
        while True:
            state, loss = step(state, deep_batch())
            float(loss)
            if is_me:
                os.kill(os.getpid(), signal.SIGKILL)
    except autopar.WorkerError as error:
        return {"killed": str(error), "after_s": time.monotonic() - began_s}


if __name__ == "__main__":
    multi_controller.main(globals())
