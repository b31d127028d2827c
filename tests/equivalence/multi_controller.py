"""What each process of the multi-controller tests runs: scenario after scenario, whose outcomes it
writes down as JSON.

    python multi_controller.py PROCESS NUM_PROCESSES PORT FILE SCENARIO …
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import ShardingOptions, ShardParallel
from autopar.ir.identity import plan_digest
from autopar.runtime.local import LocalExecutable
from examples.models import build

NUM_STEPS = 3
SPLIT = ShardingOptions(allow_replicated_parameters=False)


def mlp_step(state, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return ((hidden @ params["b"] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def slower_step(state, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return ((hidden @ params["b"] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), loss


def relu_step(state, batch):
    def loss_of(params):
        hidden = jax.nn.relu(batch["x"] @ params["a"])
        return ((hidden @ params["b"] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def renamed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Under the same name, so that only what it computes tells it apart."""
    fn.__name__ = "mlp_step"
    return fn


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mlp_state() -> dict[str, np.ndarray]:
    return {"a": normal(0, 8, 16), "b": normal(1, 16, 4)}


def mlp_batch(number: int = 0, rows: int = 16) -> dict[str, np.ndarray]:
    return {"x": normal(10 + number, rows, 8), "y": normal(50 + number, rows, 4)}


def trained(step: Any, state: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def outcome(step: Any, losses: list[float], wanted: Callable[[], list[float]]) -> dict[str, Any]:
    plan = step.last_planned.plan
    return {
        "losses": losses,
        "wanted": wanted() if jax.process_index() == 0 else None,
        "plan": hashlib.sha256(plan.to_json().encode()).hexdigest(),
        "hosts": [plan.cluster.num_hosts, plan.cluster.devices_per_host],
        "mesh": plan.mesh_shape,
        "method": plan.method,
    }


# -- steps that are as on one device


def by_default() -> Any:
    """State and batches as NumPy arrays; the default method; a batch of other shapes in between."""
    batches = [mlp_batch(0), mlp_batch(1), mlp_batch(2, rows=8), mlp_batch(3)]
    step = autopar.parallelize(mlp_step)
    losses = trained(step, mlp_state(), batches)
    return outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))


def with_micro_batches() -> Any:
    batches = [mlp_batch(n) for n in range(NUM_STEPS)]
    step = autopar.parallelize(mlp_step, method=ShardParallel(num_micro_batches=2))
    losses = trained(step, jax.device_put(mlp_state(), jax.local_devices()[1]), batches)
    return outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))


def with_split_weights() -> Any:
    batches = [mlp_batch(n) for n in range(NUM_STEPS)]
    step = autopar.parallelize(mlp_step, method=ShardParallel(options=SPLIT))
    losses = trained(step, mlp_state(), batches)
    return outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))


def with_data_loader() -> Any:
    batches = [mlp_batch(n) for n in range(6)]
    step = autopar.parallelize(mlp_step, method=autopar.DataParallel())
    placed = []

    def noted(source: Any) -> Any:
        for batch in source:
            if isinstance(batch["x"], jax.Array):
                own = [shard.data.shape[0] for shard in batch["x"].addressable_shards]
                placed.append([sum(own), batch["x"].is_fully_addressable])
            yield batch

    with autopar.data_loader(batches, step, prefetch=1) as loader:
        losses = trained(step, mlp_state(), noted(loader))
    found = outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))
    return {**found, "placed": placed}


def with_own_rows() -> Any:
    """Every process reads its own rows only, and joins them to global arrays."""
    batches = [mlp_batch(n) for n in range(NUM_STEPS)]
    step = autopar.parallelize(mlp_step, method=autopar.DataParallel())
    step.plan(mlp_state(), batches[0])
    specs = step.last_planned.plan.input_specs[1]
    mesh = jax.make_mesh((jax.device_count(),), step.last_planned.plan.axis_names)

    def joined(batch: Any) -> Any:
        rows = len(batch["x"]) // jax.process_count()
        own = slice(rows * jax.process_index(), rows * (jax.process_index() + 1))
        return {
            name: jax.make_array_from_process_local_data(
                jax.NamedSharding(mesh, specs[name]), value[own]
            )
            for name, value in batch.items()
        }

    losses = trained(step, mlp_state(), map(joined, batches))
    return outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))


def with_keys_and_numbers() -> Any:
    """Dropout by a key, a learning rate as a Python number, and arrays of half the precision."""

    def step_fn(state, batch, key, rate):
        def loss_of(params):
            hidden = jnp.tanh(batch["x"].astype(jnp.float32) @ params["a"])
            hidden *= jax.random.bernoulli(key, 0.5, hidden.shape)
            return ((hidden @ params["b"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda p, g: p - rate * g, state, grads), loss

    def run(step: Any) -> list[float]:
        state, losses = mlp_state(), []
        for number in range(NUM_STEPS):
            batch = mlp_batch(number)
            batch["x"] = batch["x"].astype(jnp.bfloat16)
            state, loss = step(state, batch, jax.random.key(number), 0.1)
            losses.append(float(loss))
        return losses

    step = autopar.parallelize(step_fn)
    return outcome(step, run(step), lambda: run(jax.jit(step_fn)))


def beside_training(step_fn: Any, create_fn: Any, batch: Any) -> Any:
    """State made in its shards, evaluated as training has it, and trained."""
    step = autopar.parallelize(step_fn, method=ShardParallel(options=SPLIT))
    create = autopar.parallelize(create_fn, method=autopar.CreateStateParallel(step, batch))
    evaluate_fn = lambda state, batch: step_fn(state, batch)[1]  # noqa: E731
    state = create(jax.random.key(0))
    is_whole = all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))
    evaluate = autopar.parallelize(evaluate_fn, method=autopar.FollowParallel(step))
    losses = [float(evaluate(state, batch)), *trained(step, state, [batch] * NUM_STEPS)]

    def wanted() -> list[float]:
        state = jax.jit(create_fn)(jax.random.key(0))
        first = float(jax.jit(evaluate_fn)(state, batch))
        return [first, *trained(jax.jit(step_fn), state, [batch] * NUM_STEPS)]

    return {**outcome(step, losses, wanted), "is_whole": is_whole}


def with_created_state() -> Any:
    def create(key):
        first, second = jax.random.split(key)
        return {"a": jax.random.normal(first, (8, 16)), "b": jax.random.normal(second, (16, 4))}

    return beside_training(mlp_step, create, mlp_batch())


def gpt() -> Any:
    example = build("gpt-tiny", num_layers=1)

    def create(key):
        return example.family.create_state(example.config, key)

    batch = jax.tree.map(np.asarray, example.make_batch(8))
    return beside_training(example.train_step, create, batch)


def on_fewer_devices() -> Any:
    first = [d for d in jax.devices() if d == jax.local_devices(process_index=d.process_index)[0]]
    autopar.init(devices=first)
    try:
        batches = [mlp_batch(n) for n in range(NUM_STEPS)]
        step = autopar.parallelize(mlp_step)
        losses = trained(step, mlp_state(), batches)
        return outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))
    finally:
        autopar.shutdown()


def with_own_plans() -> Any:
    """Every process plans by itself, and takes its own time for it."""
    time.sleep(0.2 * jax.process_index())
    batches = [mlp_batch(n) for n in range(NUM_STEPS)]
    cluster = autopar.ClusterSpec(1, jax.device_count(), "cpu")
    args = (mlp_step, mlp_state(), batches[0])
    plan = autopar.plan(*args, cluster=cluster, method=ShardParallel(options=SPLIT))
    step = autopar.parallelize(mlp_step, method=plan)
    losses = trained(step, mlp_state(), batches)
    found = outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))
    own = hashlib.sha256(plan.to_json().encode()).hexdigest()
    return {**found, "own_file": own, "own_plan": plan_digest(plan)}


def a_pipeline() -> Any:
    """One of the two stages in each process. `test_multi_controller_pipelines.py` has more."""
    method = autopar.PipeshardParallel(
        2,
        layers=autopar.AutoLayers(2),
        stages=autopar.UniformStages(2),
        options=ShardingOptions(memory_budget_bytes=1e9),
    )
    batches = [mlp_batch(n) for n in range(NUM_STEPS)]
    step = autopar.parallelize(mlp_step, method=method)
    losses = trained(step, mlp_state(), batches)
    found = outcome(step, losses, lambda: trained(jax.jit(mlp_step), mlp_state(), batches))
    return {**found, "limit": step.last_planned.plan.memory_found.limit_bytes}


def within_a_budget() -> Any:
    """The last process alone counts more of the first plan than there is; all give it up."""
    state = {"a": 0.1 * normal(0, 8, 1024), "b": 0.1 * normal(1, 1024, 4)}
    batches = [mlp_batch(n, rows=1024) for n in range(NUM_STEPS)]
    free = autopar.parallelize(mlp_step)
    free(state, batches[0])
    predicted = free.last_planned.plan.estimated_peak_bytes
    budget = 1.2 * max(predicted, free.last_executable.memory_bytes())
    count, counted = LocalExecutable.mesh_memory_bytes, list[float]()

    def more_at_first(executable: LocalExecutable) -> tuple[float]:
        (found,) = count(executable)
        counted.append(found if counted or not is_last() else 2.0 * budget)
        return (counted[0] if len(counted) < 3 else counted[-1],)  # twice for each plan

    options = ShardingOptions(memory_budget_bytes=budget)
    step = autopar.parallelize(mlp_step, method=autopar.AutoParallel(options=options))
    LocalExecutable.mesh_memory_bytes = more_at_first
    try:
        losses = trained(step, state, batches)
    finally:
        LocalExecutable.mesh_memory_bytes = count
    found = step.last_planned.plan.memory_found
    return {
        **outcome(step, losses, lambda: trained(jax.jit(mlp_step), state, batches)),
        "limit": found.limit_bytes / budget,
        "share": found.peak_bytes / budget,
        "own_shares": [one / budget for one in counted],
        "replanned": found.replanned,
        "corrected": step.last_planned.plan.correction is not None,
    }


def out_of_memory_at_first() -> Any:
    """The last process alone has no room for the first run; none begins it, and all plan again.
    State is where the plan wants it, and donated by the step that runs."""
    state = {"a": 0.1 * normal(0, 8, 1024), "b": 0.1 * normal(1, 1024, 4)}
    batches = [mlp_batch(n, rows=1024) for n in range(NUM_STEPS)]
    free = autopar.parallelize(mlp_step)
    free(state, batches[0])
    predicted = free.last_planned.plan.estimated_peak_bytes
    budget = 1.2 * max(predicted, free.last_executable.memory_bytes())
    place, run, tries, begun = LocalExecutable.place_with_room, LocalExecutable._run, [], []

    def too_little_at_first(executable: LocalExecutable, leaves: Any) -> Any:
        tries.append(executable)
        placed = place(executable, leaves)
        if len(tries) == 1 and is_last():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return placed

    def noted(executable: LocalExecutable, leaves: Any, recorder: Any) -> Any:
        begun.append(executable)
        return run(executable, leaves, recorder)

    options = ShardingOptions(memory_budget_bytes=budget)
    step = autopar.parallelize(mlp_step, method=autopar.AutoParallel(options=options))
    LocalExecutable.place_with_room, LocalExecutable._run = too_little_at_first, noted
    try:
        losses = trained(step, state, batches)
    finally:
        LocalExecutable.place_with_room, LocalExecutable._run = place, run
    return {
        **outcome(step, losses, lambda: trained(jax.jit(mlp_step), state, batches)),
        "tries": len(tries),
        "first_ran": tries[0] in begun,
        "replanned": step.last_planned.plan.memory_found.replanned,
    }


def gpt_plans() -> Any:
    """Plans of a larger step, with seconds of the solver's in them."""
    example = build("gpt-tiny")
    cluster = autopar.ClusterSpec(2, 4, "h100-sxm")
    args = (example.train_step, example.abstract_state(), example.abstract_batch())
    plan = autopar.plan(*args, cluster=cluster)
    return {"own_plan": plan_digest(plan), "seconds_spent": plan.solver.seconds}


# -- processes that do not do the same


def is_last() -> bool:
    return jax.process_index() == jax.process_count() - 1


def another_shape() -> Any:
    step = autopar.parallelize(mlp_step)
    step(mlp_state(), mlp_batch(rows=8 if is_last() else 16))


def another_program() -> Any:
    step = autopar.parallelize(renamed(relu_step) if is_last() else mlp_step)
    step(mlp_state(), mlp_batch())


def another_constant() -> Any:
    step = autopar.parallelize(renamed(slower_step) if is_last() else mlp_step)
    step(mlp_state(), mlp_batch())


def another_method() -> Any:
    method = autopar.DataParallel() if is_last() else ShardParallel()
    autopar.parallelize(mlp_step, method=method)(mlp_state(), mlp_batch())


def another_plan() -> Any:
    shape = (2, jax.device_count() // 2) if is_last() else (jax.device_count(),)
    plan = autopar.plan(
        mlp_step,
        mlp_state(),
        mlp_batch(),
        cluster=autopar.ClusterSpec(1, jax.device_count(), "cpu"),
        method=ShardParallel(shape),
    )
    autopar.parallelize(mlp_step, method=plan)(mlp_state(), mlp_batch())


def a_plan_and_none() -> Any:
    if not is_last():
        return autopar.parallelize(mlp_step)(mlp_state(), mlp_batch())
    another_plan()


def another_donation() -> Any:
    donated = () if is_last() else "auto"
    autopar.parallelize(mlp_step, donate_argnums=donated)(mlp_state(), mlp_batch())


def first_cannot_plan() -> Any:
    def step_fn(state, batch):
        if jax.process_index() == 0:
            raise OSError("no such tokenizer")
        return mlp_step(state, batch)

    autopar.parallelize(step_fn)(mlp_state(), mlp_batch())


def last_cannot_trace() -> Any:
    def step_fn(state, batch):
        if is_last():
            raise OSError("no such tokenizer")
        return mlp_step(state, batch)

    autopar.parallelize(step_fn)(mlp_state(), mlp_batch())


def too_small_a_mesh() -> Any:
    autopar.parallelize(mlp_step, method=ShardParallel((2,)))(mlp_state(), mlp_batch())


def too_small_a_budget() -> Any:
    options = ShardingOptions(memory_budget_bytes=1000)
    autopar.parallelize(mlp_step, method=ShardParallel(options=options))(mlp_state(), mlp_batch())


def chosen(devices: Any) -> Any:
    autopar.init(devices=devices)
    try:
        autopar.parallelize(mlp_step)(mlp_state(), mlp_batch())
    finally:
        autopar.shutdown()


def unequal_shares() -> Any:
    chosen(jax.devices()[:-1])


def nobodys_devices() -> Any:
    chosen(jax.local_devices(process_index=0))


def mixed_devices() -> Any:
    chosen(jax.devices()[::2] + jax.devices()[1::2])


def other_devices() -> Any:
    """As many of each, but not the same in every process."""
    count = 1 if is_last() else 2
    groups = [jax.local_devices(process_index=p)[:count] for p in range(jax.process_count())]
    chosen([device for group in groups for device in group])


def after_errors() -> Any:
    """Steps still work, and no message is left behind for ever."""
    from autopar.runtime.ranks import consensus

    found = by_default()
    return {**found, "messages": len(consensus._written)}


def one_does_not_come() -> Any:
    """The last one: afterwards the processes' talks have different numbers."""
    os.environ["AUTOPAR_ARRIVAL_LIMIT_S"] = "1"
    if not is_last():
        autopar.parallelize(mlp_step)(mlp_state(), mlp_batch())


def main(scenarios: dict[str, Any]) -> None:
    process, count, port = map(int, sys.argv[1:4])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    outcomes = {}
    for name in sys.argv[5:]:
        start = time.monotonic()
        try:
            found = scenarios[name]()
        except Exception as error:
            found = {"error": type(error).__name__, "message": str(error)}
        outcomes[name] = {**(found or {}), "seconds": time.monotonic() - start}
        Path(sys.argv[4]).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(globals())
