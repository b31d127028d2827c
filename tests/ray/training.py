"""A model, and what users do with it on a cluster beside calling a step: they make the state there,
evaluate, hand state from one plan to another, load data, save and restore, and train through losses
of workers. Run on CPU workers by `test_training_on_ray.py` and `test_run_training.py`, and on GPUs,
or shares of one, by `tests/gpu/test_ray_gpu.py`.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar import DistributedArray, session
from autopar.runtime.checkpoints.find import latest_step
from tests.equivalence.pipelines import assert_equal

WIDTH, ROWS, LAYERS = 8, 16, 4
NUM_WANTED = 6
REPLY_LIMIT_S = 30

optimizer = optax.adam(1e-2)


def make_state(seed: Any) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5} for k in keys]
    return {
        "params": params,
        "opt": optimizer.init(params),
        "key": jax.random.key(seed),
        "step": jnp.zeros((), jnp.int32),
    }


def forward(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
    return x


def train(state: Any, batch: Any) -> tuple[Any, Any]:
    key, dropout = jax.random.split(state["key"])

    def loss_of(params: Any) -> jax.Array:
        x = batch["x"] * jax.random.bernoulli(dropout, 0.9, batch["x"].shape)
        return jnp.mean((forward(params, x) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    new = {"params": params, "opt": opt, "key": key, "step": state["step"] + 1}
    return new, {"loss": loss, "norm": optax.tree.norm(grads)}


def evaluate(state: Any, batch: Any) -> jax.Array:
    return jnp.mean((forward(state["params"], batch["x"]) - batch["y"]) ** 2)


def batch_of(index: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(index)
    return {name: rng.normal(size=(rows, WIDTH)).astype(np.float32) for name in ("x", "y")}


def pipeline(num_stages: int, **options: Any) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(4, stages=autopar.UniformStages(num_stages), **options)


PIPELINE = pipeline(2)


@dataclass(frozen=True)
class Steps:
    """The train step as two plans on all devices: two meshes of half of them, and one of all."""

    num_devices: int
    pipelined: Any
    on_one_mesh: Any

    @staticmethod
    def on(num_devices: int) -> Steps:
        return Steps(
            num_devices,
            autopar.parallelize(train, method=PIPELINE),
            autopar.parallelize(train, method=autopar.ShardParallel((2, num_devices // 2))),
        )


@dataclass(frozen=True)
class Near:
    """How much results may differ from those of one device."""

    rtol: float = 1e-4
    atol: float = 1e-5

    def check(self, got: Any, want: Any, where: str = "") -> None:
        assert_equal(fetched(got), want, where, rtol=self.rtol, atol=self.atol)


@contextmanager
def precise() -> Iterator[None]:
    """On GPUs too, products of float32 are computed as on CPUs. Steps are traced in this process,
    by any thread of it."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


@cache
def wanted() -> list[tuple[Any, Any]]:
    """(state, results) after each of some steps on one device."""
    serial, state, found = jax.jit(train), make_state(0), []
    for index in range(NUM_WANTED):
        state, results = serial(state, batch_of(index))
        found.append((state, results))
    return found


def fetched(tree: Any) -> Any:
    """The same tree with arrays of this process."""

    def here(x: Any) -> Any:
        if not isinstance(x, autopar.DistributedArray):
            return x
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x.fetch() if is_key else jax.numpy.asarray(x.fetch())

    return jax.tree.map(here, tree)


def state_is_made_on_the_cluster_and_evaluated_there(steps: Steps, near: Near) -> None:
    pipelined, half = steps.pipelined, steps.num_devices // 2
    method = autopar.CreateStateParallel(pipelined, batch_of(0))
    state = autopar.parallelize(make_state, method=method)(0)
    leaves = jax.tree.leaves(state)
    assert all(isinstance(x, DistributedArray) for x in leaves)
    halves = {tuple(range(half)), tuple(range(half, 2 * half))}
    assert {x.mesh.devices for x in leaves} == halves
    near.check(state, make_state(0))
    test = autopar.parallelize(evaluate, method=autopar.FollowParallel(pipelined))
    loss = test(state, batch_of(9))
    near.check(loss, evaluate(make_state(0), batch_of(9)))
    for index in range(2):
        state, results = pipelined(state, batch_of(index))
    near.check(results, wanted()[1][1])
    near.check(state, wanted()[1][0])


def state_goes_from_plan_to_plan(steps: Steps, near: Near) -> None:
    """From two meshes to one of all devices, and back; nothing stays where it was."""
    pipelined, on_one_mesh = steps.pipelined, steps.on_one_mesh
    state: Any = make_state(0)
    for index, step in enumerate([pipelined, on_one_mesh, on_one_mesh, pipelined]):
        state, results = step(state, batch_of(index))
        near.check(results, wanted()[index][1], f"step {index}")
    near.check(state, wanted()[3][0])
    held = jax.tree.leaves((state, results))
    for executable in (pipelined.last_executable, on_one_mesh.last_executable):
        for mesh in executable.meshes:
            own = sum(leaf.copies[0].mesh is mesh for leaf in held)
            for reply in mesh.submit("free", mesh.take_released()):
                reply.result(REPLY_LIMIT_S)
            counts = [reply.result(REPLY_LIMIT_S)["num_arrays"] for reply in mesh.submit("stats")]
            assert counts == [own] * len(mesh.places)
            assert mesh.group.num_arrays == own


def state_takes_another_layout_on_the_same_mesh(near: Near) -> None:
    """The old layout's buffers do not stay behind."""
    steps = [
        autopar.parallelize(train, method=method)
        for method in (autopar.DataParallel(), autopar.Zero3Parallel())
    ]
    state: Any = make_state(0)
    for index, step in enumerate([steps[0], steps[1], steps[0]]):
        state, results = step(state, batch_of(index))
        near.check(results, wanted()[index][1], f"step {index}")
    (mesh,) = steps[0].last_executable.meshes
    assert mesh is steps[1].last_executable.meshes[0]
    own = len(jax.tree.leaves((state, results)))
    for reply in mesh.submit("free", mesh.take_released()):
        reply.result(REPLY_LIMIT_S)
    assert {r.result(REPLY_LIMIT_S)["num_arrays"] for r in mesh.submit("stats")} == {own}


def held_arrays(executable: Any) -> list[int]:
    return [
        reply.result(REPLY_LIMIT_S)["num_arrays"]
        for mesh in executable.meshes
        for reply in mesh.submit("stats")
    ]


def nothing_is_left_behind(pipelined: Any, num_steps: int) -> None:
    state, results = pipelined(make_state(0), batch_of(0))
    executable = pipelined.last_executable
    losses = []

    def counts() -> list[int]:
        gc.collect()
        for mesh in executable.meshes:
            for reply in mesh.submit("free", mesh.take_released()):
                reply.result(REPLY_LIMIT_S)
        return held_arrays(executable)

    del results
    before = counts()
    live = [mesh.group.num_arrays for mesh in executable.meshes]
    for index in range(num_steps):
        state, results = pipelined(state, batch_of(index % 5))
        if index % 10 == 0:
            losses.append(results["loss"])
    values = [float(loss) for loss in losses]
    assert np.isfinite(values).all()
    del results, losses
    after = counts()
    assert after == before
    assert [mesh.group.num_arrays for mesh in executable.meshes] == live


def data_loader_places_batches_ahead(pipelined: Any, near: Near) -> None:
    state: Any = make_state(0)
    index = -1
    with autopar.data_loader((batch_of(i) for i in range(NUM_WANTED)), pipelined) as batches:
        for index, batch in enumerate(batches):
            state, results = pipelined(state, batch)
            near.check(results, wanted()[index][1], f"step {index}")
    assert index == NUM_WANTED - 1
    assert pipelined.last_executable.last_call.uploaded_bytes == 0


def checkpoint_goes_from_one_plan_to_another(steps: Steps, near: Near, folder: Path) -> None:
    pipelined, state = steps.pipelined, make_state(0)
    for index in range(2):
        state, _ = pipelined(state, batch_of(index))
    saving = autopar.save_checkpoint(folder, state, 2, asynchronous=True)
    state, _ = pipelined(state, batch_of(2))  # uses up what is being saved
    saving.wait()
    plain = autopar.restore_checkpoint(folder, jax.eval_shape(lambda: make_state(0)))
    near.check(plain, wanted()[1][0])
    for step in (steps.on_one_mesh, pipelined):
        step.plan(jax.eval_shape(lambda: make_state(0)), batch_of(0))
        restored = autopar.restore_checkpoint(folder, step)
        assert all(isinstance(x, DistributedArray) for x in jax.tree.leaves(restored))
        restored, results = step(restored, batch_of(2))
        near.check(results, wanted()[2][1])
        near.check(restored, wanted()[2][0])
    assert pipelined.last_executable.last_call.uploaded_bytes == 2 * ROWS * WIDTH * 4


# -- the training loop


def worker_pids() -> list[int]:
    remote: Any = session.current().remote
    return [worker.hello.pid for group in remote.cluster._groups for worker in group.workers]


def killed_workers_change_no_loss(
    step: Any, folder: Path, num_steps: int, num_kills: int, *, with_loader: bool
) -> None:
    """Training with checkpoints while workers are killed at random moments: every loss is that of a
    run without kills, bit for bit. `with_loader`: a data loader places the batches."""
    batches = [batch_of(index) for index in range(num_steps)]
    want: dict[int, float] = {}

    def note(number: int, results: Any) -> None:
        want[number] = float(results["loss"])

    autopar.run_training(
        step, make_state(0), batches, checkpoint_dir=folder / "whole", on_step=note
    )

    rng = random.Random(0)
    moments = sorted(rng.sample(range(2, num_steps - 2), num_kills))
    got: dict[int, float] = {}
    killed: list[int] = []

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    def note_and_kill(number: int, results: Any) -> None:
        if moments and number >= moments[0]:
            moments.pop(0)
            pid = rng.choice(worker_pids())
            threading.Timer(rng.uniform(0, 0.1), kill, [pid]).start()
        loss = float(results["loss"])
        assert got.setdefault(number, loss) == loss, "a step that is done again"

    autopar.run_training(
        step,
        make_state(0),
        autopar.data_loader(iter(batches), step) if with_loader else iter(batches),
        checkpoint_dir=folder / "killed",
        checkpoint_every=4,
        on_step=note_and_kill,
    )
    assert len(killed) == num_kills and not moments
    assert got == want


def training_continues_on_fewer_workers(
    init: Callable[[int], None], num_workers: int, near: Near, folder: Path
) -> None:
    """Training ends after a checkpoint. A new session with half of the workers, and so another
    plan, continues from there. `init`: starts a session with this many workers."""
    losses: dict[int, float] = {}
    num_devices: dict[int, int] = {}

    def note(number: int, results: Any) -> None:
        losses[number] = float(results["loss"])
        num_devices[number] = session.current().cluster().num_devices

    for workers, num_steps in ((num_workers, NUM_WANTED // 2), (num_workers // 2, NUM_WANTED)):
        init(workers)
        step = autopar.parallelize(train, method=autopar.DataParallel())

        def batches(first: int, num_steps: int = num_steps, step: Any = step) -> Any:
            return autopar.data_loader([batch_of(i) for i in range(first, num_steps)], step)

        state, results = autopar.run_training(
            step,
            make_state(0),
            batches,
            checkpoint_dir=folder,
            checkpoint_every=NUM_WANTED // 2,
            on_step=note,
        )
        assert latest_step(folder) == num_steps
        near.check(results, wanted()[num_steps - 1][1])
        near.check(state, wanted()[num_steps - 1][0])
    assert list(losses) == list(range(1, NUM_WANTED + 1))
    assert num_devices[1] == 2 * num_devices[NUM_WANTED]
    want = [float(results["loss"]) for _, results in wanted()]
    np.testing.assert_allclose(list(losses.values()), want, rtol=near.rtol)
