"""One of several processes that save a checkpoint together: ADDRESS COUNT PROCESS DIRECTORY
URL."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import _jax
from autopar.errors import CheckpointError
from autopar.runtime.checkpoints.objects import ObjectPath, UnreachableStoreError, object_path
from autopar.training.restore import restore_step
from tests.unit.runtime.checkpoints.mortal import mortal


def main(address: str, count: int, process: int, directory: Path, url: str) -> None:
    jax.distributed.initialize(address, count, process)
    devices = np.array(jax.devices()).reshape(count, -1)
    mesh = Mesh(devices, ("hosts", "devices"))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)

    def placed(spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    state = {
        "split": placed(P("hosts", "devices")),
        "turned": placed(P("devices", "hosts")),
        "whole": placed(P()),
        "local": jnp.asarray(values),  # a copy in every process
        "numpy": values,
        "number": 3,
    }
    path = autopar.save_checkpoint(directory, state, 1)
    assert isinstance(path, Path) and (path / "manifest.json").is_file()
    save = autopar.save_checkpoint(directory, state, 2, keep=1, asynchronous=True)
    assert isinstance(save, autopar.CheckpointSave)
    state["split"] = jax.jit(lambda x: x + 1)(state["split"])  # meanwhile, together
    save.wait(timeout_s=60)
    assert autopar.checkpoint_steps(directory) == [2]
    assert messages_of(0) == [False, False] and messages_of(1) == [True, True]

    target = {**state, "split": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other(mesh))}
    back = autopar.restore_checkpoint(directory, target)
    assert back["split"].sharding == other(mesh) and back["number"] == 3
    for name in ("split", "turned", "whole", "local", "numpy"):
        shards = getattr(back[name], "addressable_shards", None)
        for shard in shards or ():
            np.testing.assert_array_equal(shard.data, values[shard.index])
    nested = autopar.restore_checkpoint(directory)
    np.testing.assert_array_equal(nested["turned"], values)

    # One that fails, fails for all, whichever it is.
    for failing in range(count):
        left = 50 if process == failing else float("inf")
        with mortal(left, "full"):
            try:
                autopar.save_checkpoint(directory, state, 10 + failing)
            except CheckpointError as error:
                assert "No space left" in str(error), error
                assert "process 0: process" not in str(error), error
                assert process == failing or f"process {failing}: " in str(error), error
            else:
                raise AssertionError("saved on a full disk")
        assert autopar.checkpoint_steps(directory) == [2]
    try:
        autopar.save_checkpoint(directory, state, 2)
    except CheckpointError as error:
        assert "is there already" in str(error)
    check_store(url, state, process)
    check_step(directory.with_name("of_a_step"))
    jax.distributed.shutdown()
    print("done")


def check_store(url: str, state: dict[str, Any], process: int) -> None:
    """All processes write one checkpoint to an object store. If one of them cannot reach it, none
    takes a checkpoint for damaged."""
    for step in (1, 2):
        path = autopar.save_checkpoint(url, state, step, overwrite=True)
        assert path == f"{url}/step_{step:08d}"
    assert autopar.checkpoint_steps(url) == [1, 2]
    place = object_path("check", url)
    for want, got in zip(
        jax.tree.leaves(state), jax.tree.leaves(restore_step(place, state, 2)), strict=True
    ):
        for one, other in zip(shards_of(want), shards_of(got), strict=True):
            np.testing.assert_array_equal(one, other)

    def fail(self: ObjectPath, offset: int, num_bytes: int) -> bytes:
        raise UnreachableStoreError(f"{self}: is out of reach")

    read = ObjectPath.read
    if process == 1:
        ObjectPath.read = fail
    try:
        autopar.restore_checkpoint(url, state)
    except UnreachableStoreError as error:
        assert process == 0 or "out of reach" in str(error.__cause__ or error), error
    else:
        raise AssertionError("restored without the store")
    finally:
        ObjectPath.read = read
    assert autopar.checkpoint_steps(url) == [1, 2]


def shards_of(leaf: Any) -> list[Any]:
    return [shard.data for shard in getattr(leaf, "addressable_shards", ())] or [leaf]


def check_step(directory: Path) -> None:
    """A step that all processes run together, its state saved in both formats."""

    def train(state, batch):
        loss, grad = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss

    step = autopar.parallelize(train, method=autopar.Zero3Parallel())
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    state, _ = step({"w": np.eye(8, dtype=np.float32), "count": 0}, batch)
    autopar.save_checkpoint(directory / "own", state, 1)
    formats = ["own"]
    if importlib.util.find_spec("orbax") is not None:
        autopar.save_checkpoint(directory / "orbax", state, 1, format="orbax")
        formats.append("orbax")
    _, loss = step(state, batch)
    for name in formats:
        back = autopar.restore_checkpoint(directory / name, step)
        _, again = step(back, batch)
        assert float(again) == float(loss), (name, again, loss)
    assert sum(len(plans) for plans in step._plans.values()) == 1


def messages_of(save: int) -> list[bool]:
    """Whether the messages of a save are still there: the first's, and the last's."""
    keys = ("done/0", f"written/{jax.process_count() - 1}")
    return [_jax.store_get(f"autopar/checkpoint/{save}/{key}", 0.5) is not None for key in keys]


def other(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(None, ("devices", "hosts")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
