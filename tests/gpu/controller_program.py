"""What each rank of `test_multi_controller_gpu.py` and `test_controller_pipelines_gpu.py` runs:
checks, whose outcomes it writes as lines of JSON.

    python controller_program.py FOLDER CHECK …

Every rank runs all checks in the same order. A line of FOLDER/rank_N.jsonl is {"check": …, …}; an
error is an outcome too. Rank 0 adds what `jax.jit` makes of the same on its own device.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar import ShardingOptions, ShardParallel
from autopar.ir.identity import plan_digest
from examples.models import Example, Family, build
from tests.unit.runtime.checkpoints.mortal import mortal

NUM_STEPS = 3
SPLIT = ShardingOptions(allow_replicated_parameters=False)
# A tiny eps would make full steps of gradients that are zero but for rounding.
TX = optax.adam(1e-2, eps=1e-3)
METHODS: dict[str, Any] = {
    "default": None,
    "data": autopar.DataParallel(),
    "zero2": autopar.Zero2Parallel(),
    "zero3": autopar.Zero3Parallel(),
    "split": ShardParallel(options=SPLIT),
    "micro": ShardParallel(num_micro_batches=2, options=SPLIT),
}

Outcome = dict[str, Any]
FOLDER = Path(sys.argv[1])


def method_of(name: str) -> Any:
    """A name of METHODS, or the shape of a mesh, such as 2x4."""
    if name in METHODS:
        return METHODS[name]
    return ShardParallel(tuple(map(int, name.split("x"))), options=SPLIT)


def is_first() -> bool:
    return jax.process_index() == 0


def is_last() -> bool:
    return jax.process_index() == jax.process_count() - 1


# -- models


class MLPState(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: Any


def create_mlp(size: int, key: jax.Array) -> MLPState:
    first, second = jax.random.split(key)
    params = {
        "a": jax.random.normal(first, (size, 2 * size)) / size**0.5,
        "bias": jnp.zeros(2 * size),
        "b": jax.random.normal(second, (2 * size, size)) / size**0.5,
    }
    return MLPState(params, TX.init(params))


def make_mlp_step(size: int) -> Any:
    def mlp_step(state: MLPState, batch: Any) -> tuple[MLPState, jax.Array]:
        def loss_of(params: Any) -> Any:
            hidden = jnp.tanh(batch["x"] @ params["a"] + params["bias"])
            return jnp.mean((hidden @ params["b"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return MLPState(optax.apply_updates(state.params, updates), opt_state), loss

    return mlp_step


def make_mlp_batch(size: int, rows: int, key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {
        "x": jax.random.normal(first, (rows, size)),
        "y": jax.random.normal(second, (rows, size)),
    }


MLP = Example("mlp", 32, 16, Family(create_mlp, make_mlp_step, make_mlp_batch, lambda *_: 0))


@cache
def model(name: str) -> Example:
    if name == "mlp":
        return MLP
    is_deep = name in ("gpt-tiny", "llama-tiny")
    return build(name, batch_size=16, **({"num_layers": 1} if is_deep else {}))


def create_state(example: Example, key: jax.Array) -> Any:
    state = example.family.create_state(example.config, key)
    return state if example is MLP else state.replace(tx=TX, opt_state=TX.init(state.params))


def batches_of(example: Example, count: int) -> list[Any]:
    keys = [jax.random.key(100 + number) for number in range(count)]
    return [jax.tree.map(np.asarray, example.make_batch(key=key)) for key in keys]


def trained(step: Any, state: Any, batches: Iterable[Any]) -> tuple[Any, list[float]]:
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


@cache
def initial_state(example: Example) -> Any:
    """As NumPy arrays."""
    return jax.tree.map(np.asarray, jax.jit(partial(create_state, example))(jax.random.key(0)))


@cache
def losses_by_jit(example: Example, count: int) -> list[float] | None:
    """What the first `count` batches give on one device; in rank 0 only."""
    if not is_first():
        return None
    return trained(jitted(example), initial_state(example), batches_of(example, count))[1]


@cache
def jitted(example: Example) -> Any:
    return jax.jit(example.train_step)


def created(example: Example, step: Any, batch: Any) -> Any:
    """The state, made in its shards."""
    create = autopar.parallelize(
        partial(create_state, example), method=autopar.CreateStateParallel(step, batch)
    )
    return create(jax.random.key(0))


def plan_of(step: Any) -> Outcome:
    plan = step.last_planned.plan
    return {
        "plan": hashlib.sha256(plan.to_json().encode()).hexdigest(),
        "mesh": plan.mesh_shape,
        "cluster": [plan.cluster.num_hosts, plan.cluster.devices_per_host],
        "memory_bytes": plan.cluster.spec.memory_bytes,
        "collectives": sorted({c.kind for c in step.last_executable.collectives()}),
    }


def held_share(tree: Any) -> float:
    """The part of all elements of a pytree that this process holds."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    held = [shard.data.size for leaf in leaves for shard in leaf.addressable_shards]
    return sum(held) / sum(prod(leaf.shape) for leaf in leaves)


# -- steps


def train(name: str) -> Outcome:
    """Losses of some steps: `MODEL METHOD`. State and batches come as NumPy arrays."""
    example, method = model(name.split()[0]), method_of(name.split()[1])
    batches = batches_of(example, NUM_STEPS)
    step = autopar.parallelize(example.train_step, method=method)
    state, losses = trained(step, initial_state(example), batches)
    found = {"losses": losses, "wanted": losses_by_jit(example, len(batches)), **plan_of(step)}
    return {**found, "held_share": held_share(state)}


def beside_training(name: str) -> Outcome:
    """State made in its shards, evaluated as training has it, and trained: `MODEL METHOD`."""
    example, method = model(name.split()[0]), method_of(name.split()[1])
    batches = batches_of(example, NUM_STEPS)
    step = autopar.parallelize(example.train_step, method=method)
    state = created(example, step, batches[0])
    evaluate = autopar.parallelize(
        lambda state, batch: example.train_step(state, batch)[1],
        method=autopar.FollowParallel(step),
    )
    share, first = held_share(state), float(evaluate(state, batches[0]))
    losses = trained(step, state, batches)[1]
    found = {"losses": [first, *losses], "held_share": share, **plan_of(step)}
    wanted = losses_by_jit(example, len(batches))
    return {**found, "wanted": wanted and [wanted[0], *wanted]}


def data_loader(name: str) -> Outcome:
    """Batches placed in the background, each rank's own rows only."""
    example = model(name)
    batches = batches_of(example, 2 * NUM_STEPS)
    step = autopar.parallelize(example.train_step, method=autopar.DataParallel())
    state = created(example, step, batches[0])
    rows: list[list[int]] = []

    def noted(source: Any) -> Any:
        for batch in source:
            if isinstance(first := jax.tree.leaves(batch)[0], jax.Array):
                own = [shard.data.shape[0] for shard in first.addressable_shards]
                rows.append([sum(own), first.shape[0]])
            yield batch

    with autopar.data_loader(batches, step, prefetch=1) as loader:
        losses = trained(step, state, noted(loader))[1]
    found = {"losses": losses, "wanted": losses_by_jit(example, len(batches)), "rows": rows}
    return {**found, **plan_of(step)}


def own_plans(name: str) -> Outcome:
    """Every rank plans by itself, in its own time, and passes its plan: `MODEL METHOD`."""
    time.sleep(0.05 * jax.process_index())
    example, method = model(name.split()[0]), method_of(name.split()[1])
    batches = batches_of(example, NUM_STEPS)
    cluster = autopar.ClusterSpec(1, jax.device_count(), "h200-sxm")
    shapes = jax.eval_shape(partial(create_state, example), jax.random.key(0)), batches[0]
    plan = autopar.plan(example.train_step, *shapes, cluster=cluster, method=method)
    step = autopar.parallelize(example.train_step, method=plan)
    losses = trained(step, initial_state(example), batches)[1]
    found = {"losses": losses, "wanted": losses_by_jit(example, len(batches)), **plan_of(step)}
    own_file = hashlib.sha256(plan.to_json().encode()).hexdigest()
    return {**found, "own_plan": plan_digest(plan), "own_file": own_file}


# -- pipelines


def pipeline(name: str) -> Outcome:
    """Three steps of a pipeline, a checkpoint, and three more from what was read of it: `MODEL
    STAGES SCHEDULE`."""
    title, num_stages, schedule = name.split()
    example, folder = model(title), FOLDER / f"pipeline {name}"
    stages = autopar.UniformStages(int(num_stages))
    method = autopar.PipeshardParallel(4, stages=stages, schedule=schedule)
    batches = batches_of(example, 2 * NUM_STEPS)
    step = autopar.parallelize(example.train_step, method=method)
    state, losses = trained(step, initial_state(example), batches[:NUM_STEPS])
    autopar.save_checkpoint(folder, state, NUM_STEPS)
    restored = autopar.restore_checkpoint(folder, step)
    again = trained(step, restored, batches[NUM_STEPS:])[1]
    after = trained(step, state, batches[NUM_STEPS:])[1]
    plan = step.last_planned.plan
    return {
        "losses": [*losses, *after],
        "restored": again,
        "wanted": losses_by_jit(example, len(batches)),
        "plan": hashlib.sha256(plan.to_json().encode()).hexdigest(),
        "stage_devices": [stage.devices for stage in plan.stages],
        "splits": {t.path: t.split for t in plan.inputs if t.split is not None},
    }


# -- ranks that do not do the same


def step_fn(state: Any, batch: Any) -> Any:
    def loss_of(w: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ w) - 1) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state)
    return state - 0.1 * grad, loss


def call(fn: Any = step_fn, method: Any = None, rows: int = 16) -> Outcome:
    step = autopar.parallelize(fn, method=method)
    _, loss = step(np.eye(8, dtype=np.float32), np.ones((rows, 8), np.float32))
    return {"loss": float(loss)}


def another_shape(_: str) -> Outcome:
    return call(rows=8 if is_last() else 16)


def another_plan(_: str) -> Outcome:
    method = ShardParallel((2, jax.device_count() // 2) if is_last() else (jax.device_count(),))
    cluster = autopar.ClusterSpec(1, jax.device_count(), "h200-sxm")
    shapes = jnp.eye(8), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    return call(method=autopar.plan(step_fn, *shapes, cluster=cluster, method=method))


def cannot_trace(_: str) -> Outcome:
    def step(state: Any, batch: Any) -> Any:
        if is_last():
            raise OSError("no such tokenizer")
        return step_fn(state, batch)

    return call(step)


def too_small_a_mesh(_: str) -> Outcome:
    return call(method=ShardParallel((2,)))


def after_errors(_: str) -> Outcome:
    return call()


# -- checkpoints


def checkpoints(name: str) -> Outcome:
    """`METHOD FROM TO [ASYNC]`: goes on from the checkpoint of step FROM, or begins; trains up to
    step TO, and saves there, and in the background after step ASYNC. A batch belongs to a step."""
    method, begin, end, *background = name.split()
    first, last = int(begin), int(end)
    example, folder = model("mlp"), FOLDER / "checkpoints"
    batches = batches_of(example, last)
    step = autopar.parallelize(example.train_step, method=method_of(method))
    if first == 0:
        state = created(example, step, batches[0])
    else:
        shapes = jax.eval_shape(partial(create_state, example), jax.random.key(0))
        step.plan(shapes, batches[0])
        state = autopar.restore_checkpoint(folder, step, step=first)
    share, losses, save = held_share(state), [], None
    for number in range(first, last):
        if background and number == int(background[0]):
            save = autopar.save_checkpoint(folder, state, number, asynchronous=True)
        state, loss = step(state, batches[number])  # donates what is being saved
        losses.append(float(loss))
    if save is not None:
        assert isinstance(save, autopar.CheckpointSave)
        save.wait(timeout_s=60)
    if last not in autopar.checkpoint_steps(folder):
        autopar.save_checkpoint(folder, state, last)
    found = {"losses": losses, "held_share": share, "steps": autopar.checkpoint_steps(folder)}
    return {**found, "wanted": losses_by_jit(example, len(batches)), **plan_of(step)}


def full_disk(_: str) -> Outcome:
    """The disk of one rank is full: no rank has saved."""
    folder = FOLDER / "full"
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    array = jax.make_array_from_callback((64, 64), sharding, lambda at: np.ones((64, 64))[at])
    with mortal(50 if is_last() else inf, "full"):
        try:
            autopar.save_checkpoint(folder, {"x": array}, 1)
        except autopar.CheckpointError as error:
            return {"raised": str(error), "steps": autopar.checkpoint_steps(folder)}
    return {"raised": ""}


CHECKS: dict[str, Callable[[str], Outcome]] = {
    check.__name__: check
    for check in (
        *(train, beside_training, data_loader, own_plans, pipeline, checkpoints, full_disk),
        *(another_shape, another_plan, cannot_trace, too_small_a_mesh, after_errors),
    )
}


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize()
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    with (FOLDER / f"rank_{jax.process_index()}.jsonl").open("w") as file:
        for name in sys.argv[2:]:
            check, _, argument = name.partition(" ")
            start_s = time.monotonic()
            try:
                found = CHECKS[check](argument)
            except Exception as error:
                found = {"error": type(error).__name__, "message": str(error)}
            found |= {"seconds": time.monotonic() - start_s, "limit": limit}
            file.write(json.dumps({"check": name, **found}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
