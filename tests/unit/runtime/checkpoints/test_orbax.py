"""Checkpoints from orbax and for it."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import AutoLayers, PipeshardParallel, UniformStages, Zero3Parallel
from autopar.errors import ArgumentError, CheckpointError
from autopar.runtime.checkpoints.backends import _registered, register_backend
from tests.unit.runtime.checkpoints.test_plans import (
    BATCH,
    assert_equal,
    fresh_state,
    train_step,
    trained,
)

ocp = pytest.importorskip("orbax.checkpoint")

PIPELINE = PipeshardParallel(4, stages=UniformStages(2), layers=AutoLayers(4))


@pytest.fixture(autouse=True)
def all_devices() -> Iterator[None]:
    logging.getLogger("absl").setLevel(logging.ERROR)
    yield
    autopar.shutdown()


def test_orbax_reads_what_autopar_wrote(tmp_path: Path):
    _, state = trained(4, Zero3Parallel())
    path = autopar.save_checkpoint(tmp_path, state, 7, format="orbax")
    assert path == tmp_path / "7"
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        target = jax.eval_shape(fresh_state)
        back = manager.restore(7, args=ocp.args.StandardRestore(target))
    assert_equal(back, state)


def test_autopar_reads_what_orbax_wrote(tmp_path: Path):
    state = fresh_state()
    state, _ = jax.jit(train_step)(state, BATCH)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", state)
    with ocp.CheckpointManager(tmp_path / "many") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.save(12, args=ocp.args.StandardSave(state))
    assert autopar.checkpoint_steps(tmp_path / "many") == [3, 12]

    autopar.init(devices=jax.devices()[:8])
    step = autopar.parallelize(train_step, method=PIPELINE)
    step.plan(jax.eval_shape(fresh_state), BATCH)
    for folder in ("one", "many"):
        back = autopar.restore_checkpoint(tmp_path / folder, step)
        assert_equal(back, state)
        step(back, BATCH)
        assert sum(len(plans) for plans in step._plans.values()) == 1
    plain = autopar.restore_checkpoint(tmp_path / "many", step=3)
    np.testing.assert_array_equal(plain["params"]["w1"], state.params["w1"])


def test_kinds_of_leaves(tmp_path: Path):
    state = {
        "key": jax.random.key(3),
        "int": 5,
        "float": 0.5,
        "weak": jnp.asarray(2.0),
        "numpy": np.arange(3),
        "activation": jnp.tanh,
    }
    save = autopar.save_checkpoint(tmp_path, state, 1, format="orbax", asynchronous=True)
    assert isinstance(save, autopar.CheckpointSave)
    save.wait()
    back = autopar.restore_checkpoint(tmp_path, state)
    assert jax.random.key_data(back["key"]).tolist() == [0, 3] and back["weak"].weak_type
    assert back["int"] == 5 and back["float"] == 0.5 and back["activation"] is jnp.tanh
    assert isinstance(back["numpy"], np.ndarray) and back["numpy"].tolist() == [0, 1, 2]
    assert float(back["weak"]) == 2.0
    with pytest.raises(CheckpointError) as caught:
        autopar.restore_checkpoint(tmp_path, {**state, "numpy": np.ones(4), "more": 1})
    assert "numpy: wanted float64[4], the checkpoint has int64[3]" in str(caught.value)
    assert "more: wanted a Python int, not in the checkpoint" in str(caught.value)


def test_keep_and_overwrite(tmp_path: Path):
    def save(step: int, **options: Any) -> None:
        autopar.save_checkpoint(
            tmp_path, {"x": jnp.ones(3) * step}, step, format="orbax", **options
        )

    save(1)
    save(2)
    save(3, keep=2)
    assert autopar.checkpoint_steps(tmp_path) == [2, 3]
    with pytest.raises(CheckpointError, match="is there already"):
        save(3)
    autopar.save_checkpoint(tmp_path, {"x": jnp.zeros(3)}, 3, format="orbax", overwrite=True)
    assert autopar.restore_checkpoint(tmp_path)["x"].tolist() == [0, 0, 0]


def test_a_replacement_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import orbax.checkpoint as ocp

    def save(value: float, **options: Any) -> None:
        autopar.save_checkpoint(tmp_path, {"x": jnp.full(3, value)}, 1, format="orbax", **options)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "wait_until_finished", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            save(2.0, overwrite=True)
    assert autopar.checkpoint_steps(tmp_path) == [1]
    assert autopar.restore_checkpoint(tmp_path)["x"].tolist() == [1, 1, 1]
    save(3.0, overwrite=True)
    assert autopar.restore_checkpoint(tmp_path)["x"].tolist() == [3, 3, 3]
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_without_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    autopar.save_checkpoint(tmp_path, {"x": jnp.ones(3)}, 1, format="orbax")
    real = builtins.__import__

    def no_orbax(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("orbax"):
            raise ModuleNotFoundError("No module named 'orbax'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_orbax)
    with pytest.raises(CheckpointError, match=r"need orbax.*pip install 'autopar\[checkpoint\]'"):
        autopar.save_checkpoint(tmp_path, {"x": jnp.ones(3)}, 2, format="orbax")
    with pytest.raises(CheckpointError, match=r"need orbax.*pip install 'autopar\[checkpoint\]'"):
        autopar.restore_checkpoint(tmp_path)


def test_arrays_of_a_cluster_are_not_for_orbax(tmp_path: Path):
    class Elsewhere:
        shape, dtype = (3,), np.dtype(np.float32)

    register_backend(Elsewhere, object())  # type: ignore[arg-type]
    try:
        with pytest.raises(ArgumentError, match=r"\['x'\] is on the meshes of a cluster"):
            autopar.save_checkpoint(tmp_path, {"x": Elsewhere()}, 1, format="orbax")
    finally:
        del _registered[Elsewhere]


def test_a_damaged_folder(tmp_path: Path):
    path = autopar.save_checkpoint(tmp_path, {"x": jnp.ones(300)}, 1, format="orbax")
    assert isinstance(path, Path)
    for data in [f for f in path.rglob("d/*") if f.is_file()]:
        data.write_bytes(data.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"orbax (says|can read)"):
        autopar.restore_checkpoint(tmp_path)
