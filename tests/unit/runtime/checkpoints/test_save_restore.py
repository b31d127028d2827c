"""Pytrees that are saved and restored in one process, without plans."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError, CheckpointError


class Moments(NamedTuple):
    count: Any
    mean: Any


def on(shape: tuple[int, ...], spec: P) -> NamedSharding:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, ("a", "b")[: len(shape)]), spec)


def everything() -> dict[str, Any]:
    """Every kind of leaf there is."""
    x = jnp.arange(96, dtype=jnp.float32).reshape(8, 12)
    return {
        "split": jax.device_put(x, on((2, 2), P("b", "a"))),
        "replicated": jax.device_put(x + 1, on((4,), P())),
        "bfloat16": jnp.ones((3, 5), jnp.bfloat16) / 3,
        "int4": jnp.int4(-3),
        "empty": jnp.zeros((0, 3)),
        "weak": jnp.asarray(3),
        "key": jax.random.key(2),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(1, impl="rbg"), 4), on((4,), P("a"))
        ),
        "numpy": np.arange(6, dtype=">i4").reshape(2, 3).T,
        "scalar": np.float64(0.1),
        "flag": np.bool_(True),
        "pair": (None, [Moments(7, jnp.ones(3))]),
        "int": -(2**70),
        "float": 0.1,
        "nan": float("nan"),
        "complex": complex(0.1, -0.2),
        "bool": True,
        3: jnp.ones(2),
    }


def everything_saved() -> dict[str, Any]:
    """JAX sorts keys of dicts, and cannot sort numbers among texts."""
    state = everything()
    return {"named": state, "numbered": {3: state.pop(3), 12: 1.0}}


def as_numpy(leaf: Any) -> np.ndarray:
    if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_equal(got: Any, want: Any) -> None:
    for (path, ours), theirs in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
    ):
        if not hasattr(theirs, "dtype"):
            assert repr(ours) == repr(theirs), path
            continue
        ours, theirs = as_numpy(ours), as_numpy(theirs)
        assert ours.dtype.name == theirs.dtype.name, path
        assert ours.tobytes() == theirs.astype(ours.dtype).tobytes(), path
        assert ours.shape == theirs.shape, path


def test_every_kind_of_leaf_comes_back_where_the_target_lies(tmp_path: Path):
    state = everything_saved()
    path = autopar.save_checkpoint(tmp_path, state, 12)
    assert path == tmp_path / "step_00000012"
    assert os.listdir(tmp_path) == ["step_00000012"]
    back = autopar.restore_checkpoint(tmp_path, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_equal(back, state)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        if isinstance(theirs, jax.Array):
            assert ours.sharding == theirs.sharding
            assert ours.committed == theirs.committed
            assert ours.dtype == theirs.dtype
            assert getattr(ours, "weak_type", None) == getattr(theirs, "weak_type", None)
        elif not isinstance(theirs, np.generic):
            assert type(ours) is type(theirs)


def test_without_a_target_dicts_and_lists_of_numpy_arrays_come_back(tmp_path: Path):
    state = everything_saved()
    autopar.save_checkpoint(tmp_path, state, 0)
    back = autopar.restore_checkpoint(tmp_path)
    assert set(back) == {"named", "numbered"} and set(back["numbered"]) == {3, 12}
    assert isinstance(back["named"]["split"], np.ndarray)
    nothing, (moments,) = back["named"]["pair"]
    assert nothing is None and set(moments) == {"mean", "count"}
    assert_equal(jax.tree.leaves(back), jax.tree.leaves(state))


def test_an_array_by_itself(tmp_path: Path):
    autopar.save_checkpoint(tmp_path, jnp.arange(3), 1)
    assert autopar.restore_checkpoint(tmp_path).tolist() == [0, 1, 2]
    assert autopar.restore_checkpoint(tmp_path, jnp.zeros(3, int)).tolist() == [0, 1, 2]


def test_shards_are_written_once_and_restored_to_other_shardings(tmp_path: Path):
    x = jax.device_put(jnp.arange(4096.0).reshape(64, 64), on((2, 4), P("b")))
    path = autopar.save_checkpoint(tmp_path, {"x": x, "whole": jax.device_put(x, on((8,), P()))}, 1)
    assert isinstance(path, Path)
    (data,) = [f for f in path.iterdir() if f.name != "manifest.json"]
    assert data.stat().st_size == 2 * x.nbytes
    for sharding in (on((8,), P(None, "a")), on((2,), P("a")), on((4, 2), P("b", "a")), None):
        target = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        back = autopar.restore_checkpoint(tmp_path, {"x": target, "whole": target})
        assert np.array_equal(back["x"], x) and np.array_equal(back["whole"], x)
        assert sharding is None or back["x"].sharding == sharding


def test_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.runtime.checkpoints.write.BLOCK_BYTES", 100)
    x = jax.device_put(np.arange(7 * 30 * 2.0).reshape(14, 30), on((2,), P("a")))
    autopar.save_checkpoint(tmp_path, {"x": x, "row": np.arange(200.0), "one": np.ones(())}, 1)
    back = autopar.restore_checkpoint(tmp_path, {"x": x, "row": np.ones(200), "one": np.ones(())})
    assert np.array_equal(back["x"], x) and np.array_equal(back["row"], np.arange(200.0))
    columns = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on((2,), P(None, "a")))
    rest = {"row": np.ones(200), "one": np.ones(())}
    assert np.array_equal(autopar.restore_checkpoint(tmp_path, {"x": columns, **rest})["x"], x)


def test_numbers_and_arrays_of_no_dimension_stand_for_each_other(tmp_path: Path):
    autopar.save_checkpoint(tmp_path, {"a": 3, "b": jnp.asarray(4), "c": jnp.float32(0.5)}, 1)
    target = {"a": jnp.asarray(0), "b": 0, "c": 0.0}
    back = autopar.restore_checkpoint(tmp_path, target)
    assert back["b"] == 4 and type(back["b"]) is int
    assert back["c"] == 0.5 and type(back["c"]) is float
    assert back["a"].item() == 3 and back["a"].weak_type
    with pytest.raises(CheckpointError, match="wanted a Python float, the checkpoint has a Python"):
        autopar.restore_checkpoint(tmp_path, {**target, "a": 1.5})


def test_keys_in_the_old_style(tmp_path: Path):
    autopar.save_checkpoint(tmp_path, {"key": jax.random.PRNGKey(3)}, 1)
    back = autopar.restore_checkpoint(tmp_path, {"key": jax.random.key(0)})
    assert np.array_equal(jax.random.key_data(back["key"]), jax.random.PRNGKey(3))


def test_leaves_that_are_no_arrays_come_from_the_target(tmp_path: Path):
    autopar.save_checkpoint(tmp_path, {"w": jnp.ones(3), "activation": jnp.tanh}, 1)
    target = {"w": jnp.zeros(3), "activation": jnp.sin}
    back = autopar.restore_checkpoint(tmp_path, target)
    assert back["activation"] is jnp.sin and back["w"].tolist() == [1, 1, 1]


def test_steps_and_the_newest(tmp_path: Path):
    assert autopar.latest_step(tmp_path / "none") is None
    for step in (5, 100, 20):
        autopar.save_checkpoint(tmp_path, {"step": step}, step)
    assert autopar.checkpoint_steps(tmp_path) == [5, 20, 100]
    assert autopar.latest_step(tmp_path) == 100
    assert autopar.restore_checkpoint(tmp_path) == {"step": 100}
    assert autopar.restore_checkpoint(tmp_path, step=20) == {"step": 20}
    assert autopar.restore_checkpoint(tmp_path / "step_00000005") == {"step": 5}


def test_keep_deletes_older_ones_only(tmp_path: Path):
    for step in (1, 2, 3, 9):
        autopar.save_checkpoint(tmp_path, {"x": np.ones(3)}, step)
    autopar.save_checkpoint(tmp_path, {"x": np.ones(3)}, 4, keep=2)
    assert autopar.checkpoint_steps(tmp_path) == [3, 4, 9]
    assert sorted(os.listdir(tmp_path)) == ["step_00000003", "step_00000004", "step_00000009"]


def test_a_step_is_saved_again_only_if_asked(tmp_path: Path):
    autopar.save_checkpoint(tmp_path, {"x": 1}, 1)
    with pytest.raises(CheckpointError, match=r"step_00000001: is there already.*overwrite=True"):
        autopar.save_checkpoint(tmp_path, {"x": 2}, 1)
    autopar.save_checkpoint(tmp_path, {"x": 3}, 1, overwrite=True)
    assert autopar.restore_checkpoint(tmp_path) == {"x": 3}
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_saving_keeps_no_second_copy_with_the_arrays(tmp_path: Path):
    x = jax.device_put(jnp.arange(64.0), on((8,), P("a")))
    autopar.save_checkpoint(tmp_path, x, 1)
    assert all(shard.data._npy_value is None for shard in x.addressable_shards)


def test_saving_and_restoring_again_leave_no_objects(tmp_path: Path):
    state = {"key": jax.random.key(2), "w": jnp.ones(3)}

    def objects_after(steps: range) -> int:
        for step in steps:
            autopar.save_checkpoint(tmp_path, state, step, keep=1)
            autopar.restore_checkpoint(tmp_path, state)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(range(5))
    assert objects_after(range(5, 25)) - before < 20


BAD_ARGUMENTS = {
    "step": (dict(step=-1), r"step=-1\): needs a whole number"),
    "step of another type": (dict(step=1.5), r"step=1.5\): needs"),
    "keep": (dict(keep=0), r"keep=0\): needs"),
    "format": (dict(format="pickle"), r"format='pickle'\): needs one of"),
    "bucket": (dict(directory="ftp://host/x"), "mounted file system"),
    "no arrays": (dict(state={"f": jnp.tanh}), "has no arrays"),
    "texts": (dict(state={"f": np.array(["a"])}), r"\['f'\] has elements of the type"),
    "objects": (dict(state={"f": np.array([None])}), r"\['f'\] has elements of the type object"),
}


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments(tmp_path: Path, change: dict[str, Any], message: str):
    given = {"directory": tmp_path, "state": {"x": np.ones(1)}, "step": 1} | change
    with pytest.raises(ArgumentError, match=message):
        autopar.save_checkpoint(**given)
    assert os.listdir(tmp_path) == []


def test_a_deleted_array_and_a_traced_one(tmp_path: Path):
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(ArgumentError, match=r"the array \['x'\] is deleted"):
        autopar.save_checkpoint(tmp_path, {"x": x}, 1)
    with pytest.raises(ArgumentError, match=r"\['x'\] is being traced"):
        jax.jit(lambda x: autopar.save_checkpoint(tmp_path, {"x": x}, 1))(1.0)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_another_model(tmp_path: Path):
    autopar.save_checkpoint(tmp_path, {"w": jnp.ones((3, 5)), "b": jnp.ones(5), "k": 1}, 1)
    with pytest.raises(CheckpointError) as caught:
        autopar.restore_checkpoint(
            tmp_path, {"w": jnp.ones((3, 4)), "b": jnp.ones(5, jnp.bfloat16), "new": jnp.ones(2)}
        )
    text = str(caught.value)
    assert "4 leaves differ" in text
    assert "['w']: wanted float32[3, 4], the checkpoint has float32[3, 5]" in text
    assert "['b']: wanted bfloat16[5], the checkpoint has float32[5]" in text
    assert "['new']: wanted float32[2], not in the checkpoint" in text
    assert "['k']: only in the checkpoint, a Python int" in text
    many = {f"leaf{i}": 0 for i in range(40)}
    with pytest.raises(CheckpointError, match="and 33 more"):
        autopar.restore_checkpoint(tmp_path, many)


def test_nothing_to_restore(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        autopar.restore_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        autopar.restore_checkpoint(tmp_path)
    autopar.save_checkpoint(tmp_path, {"x": 1}, 1)
    with pytest.raises(CheckpointError, match=r"none of this step. There are those of the steps 1"):
        autopar.restore_checkpoint(tmp_path, step=2)
    (tmp_path / "step_00000007").mkdir()
    with pytest.raises(CheckpointError, match=r"step=7.*its save was begun and not finished"):
        autopar.restore_checkpoint(tmp_path, step=7)
    assert autopar.latest_step(tmp_path) == 1
    with pytest.raises(ArgumentError, match="step='x'"):
        autopar.restore_checkpoint(tmp_path, step="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["autopar", "orbax"])
def test_metadata_is_saved_beside_the_state(tmp_path: Path, format: str) -> None:
    given = {"tokens": 12, "position": {"shard": [1, 2.5, None, "ä"]}}
    autopar.save_checkpoint(tmp_path, {"x": np.arange(3)}, 1, metadata=given, format=format)
    autopar.save_checkpoint(tmp_path, {"x": np.arange(3)}, 2, format=format)
    assert autopar.checkpoint_metadata(tmp_path, 1) == given
    assert autopar.checkpoint_metadata(tmp_path) == {}
    with pytest.raises(CheckpointError, match="there is none of this step"):
        autopar.checkpoint_metadata(tmp_path, 3)


@pytest.mark.parametrize("given", [{"x": np.ones(2)}, {"x": float("nan")}, {"x": "y" * 2**20}, 3])
def test_metadata_is_small_json(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"save_checkpoint\(metadata=…\)"):
        autopar.save_checkpoint(tmp_path, {"x": np.arange(3)}, 1, metadata=given)
    assert autopar.checkpoint_steps(tmp_path) == []
