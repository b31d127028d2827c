"""Checkpoints that were altered: found out, whatever was done to them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import CheckpointError
from autopar.ir.sealed import digest
from autopar.runtime.checkpoints.format import read_manifest
from autopar.runtime.checkpoints.read import read_numpy

STATE = {"w": np.arange(60.0).reshape(6, 10), "b": np.ones(3, np.int8), "n": 4}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = autopar.save_checkpoint(tmp_path, STATE, 1)
    assert isinstance(path, Path)
    return path


def read_all(saved: Path) -> None:
    read_numpy(saved, read_manifest(saved), ["['w']"])


def data_file(saved: Path) -> Path:
    return saved / "process_00000.data"


def test_every_damaged_byte_of_data_is_found(saved: Path):
    whole = data_file(saved).read_bytes()
    manifest = json.loads((saved / "manifest.json").read_text())["checkpoint"]
    covered = sum(s["num_bytes"] for leaf in manifest["leaves"] for s in leaf["shards"])
    found = 0
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        data_file(saved).write_bytes(damaged)
        try:
            autopar.restore_checkpoint(saved)
        except CheckpointError as error:
            assert "is damaged" in str(error) and "checksum" in str(error)
            found += 1
    assert found >= covered // 7 - 1


def test_a_part_of_a_shard_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.runtime.checkpoints.write.BLOCK_BYTES", 160)
    path = autopar.save_checkpoint(tmp_path, {"w": STATE["w"]}, 1)
    assert isinstance(path, Path)
    damaged = bytearray(data_file(path).read_bytes())
    damaged[-1] ^= 1
    data_file(path).write_bytes(damaged)
    devices = np.array(jax.devices()[:3])
    rows = NamedSharding(Mesh(devices, ("a",)), P("a"))
    with pytest.raises(CheckpointError, match=r"bytes 320 to 480, of \['w'\], have another"):
        like = jax.ShapeDtypeStruct((6, 10), jnp.float32, sharding=rows)
        autopar.restore_checkpoint(tmp_path, {"w": like})


def test_files_that_are_cut_or_gone(saved: Path):
    whole = data_file(saved).read_bytes()
    data_file(saved).write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"it ends 10 bytes before the end of \['w'\]"):
        autopar.restore_checkpoint(saved)
    data_file(saved).unlink()
    with pytest.raises(CheckpointError, match=r"process_00000.data: cannot be read: No such file"):
        autopar.restore_checkpoint(saved)


def test_a_data_file_that_is_a_link_is_not_followed(saved: Path):
    elsewhere = saved.parent / "elsewhere"
    data_file(saved).rename(elsewhere)
    data_file(saved).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="cannot be read"):
        autopar.restore_checkpoint(saved)


@pytest.mark.parametrize("name", ["process_00000.data", "manifest.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved: Path, name: str):
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: .*not a plain file"):
        read_all(saved)


def test_a_manifest_that_is_a_link_is_not_followed(saved: Path):
    elsewhere = saved.parent / "elsewhere"
    (saved / "manifest.json").rename(elsewhere)
    (saved / "manifest.json").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read"):
        read_all(saved)


def test_a_manifest_without_end_is_not_read(saved: Path):
    with open(saved / "manifest.json", "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"manifest\.json: .*has 1099511627776 bytes"):
        read_all(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, f"[{'9' * 10_000}]"])
def test_manifests_that_python_cannot_read(saved: Path, text: str):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        read_all(saved)


def test_manifests_that_are_cut_or_altered(saved: Path):
    path = saved / "manifest.json"
    text = path.read_bytes()
    for length in range(0, len(text), 50):
        path.write_bytes(text[:length])
        with pytest.raises(CheckpointError, match=r"manifest.json: (is damaged|not an autopar)"):
            autopar.restore_checkpoint(saved)
    for position in range(0, len(text), 11):
        altered = bytearray(text)
        altered[position] ^= 0x04
        path.write_bytes(altered)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            autopar.restore_checkpoint(saved)
    path.write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="not an autopar checkpoint"):
        autopar.restore_checkpoint(saved)


def test_a_newer_format(saved: Path):
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    document["version"] = 2
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"format 2, this autopar reads 1. Update autopar"):
        autopar.restore_checkpoint(saved)


def w_of(body: dict[str, Any]) -> dict[str, Any]:
    return next(leaf for leaf in body["leaves"] if leaf["key"] == "['w']")


def shard_of(body: dict[str, Any]) -> dict[str, Any]:
    return w_of(body)["shards"][0]


# A right checksum and a wrong field, as only a hostile or mistaken writer makes them.
MALFORMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no leaves": lambda b: b.pop("leaves"),
    "leaves are a number": lambda b: b.update(leaves=3),
    "a leaf is a text": lambda b: b.update(leaves=["w"]),
    "step below zero": lambda b: b.update(step=-1),
    "step is a text": lambda b: b.update(step="1"),
    "writers": lambda b: b.update(writers=[1]),
    "a leaf twice": lambda b: b["leaves"].append(copy.deepcopy(w_of(b))),
    "kind": lambda b: w_of(b).update(kind="pickle"),
    "dtype": lambda b: w_of(b).update(dtype="object"),
    "dtype unknown": lambda b: w_of(b).update(dtype="float99"),
    "dtype of another size": lambda b: w_of(b).update(dtype="float32"),
    "structured dtype": lambda b: w_of(b).update(dtype="f4,f4"),
    "shape": lambda b: w_of(b).update(shape=[6, 11]),
    "shape below zero": lambda b: w_of(b).update(shape=[-6, -10]),
    "weak type": lambda b: w_of(b).update(weak_type=1),
    "path": lambda b: w_of(b).update(path=[["index", -1]]),
    "path of a strange kind": lambda b: w_of(b).update(path=[["call", "x"]]),
    "a number that is none": lambda b: b["leaves"][1].update(kind="int", value="x"),
    "no shards": lambda b: w_of(b).update(shards=[]),
    "the same shard twice": lambda b: w_of(b)["shards"].append(shard_of(b)),
    "a box that is too large": lambda b: shard_of(b).update(box=[[0, 7], [0, 10]]),
    "a box turned round": lambda b: shard_of(b).update(box=[[6, 0], [0, 10]]),
    "a box of one dimension": lambda b: shard_of(b).update(box=[[0, 60]]),
    "offset below zero": lambda b: shard_of(b).update(offset=-8),
    "bytes": lambda b: shard_of(b).update(num_bytes=470),
    "rows of no block": lambda b: shard_of(b).update(block_rows=0),
    "checksums": lambda b: shard_of(b).update(crc32=[1, 2]),
    "bytes of another leaf": lambda b: b["leaves"].append(
        {**copy.deepcopy(w_of(b)), "key": "['v']", "path": [["key", "v"]]}
    ),
    "a dimension that no array has": lambda b: w_of(b).update(shape=[0, 2**70], shards=[]),
    "a file above": lambda b: shard_of(b).update(file="../process_00000.data"),
    "a file elsewhere": lambda b: shard_of(b).update(file="/etc/passwd"),
    "a file with a zero byte": lambda b: shard_of(b).update(file="a\0b"),
    "the folder itself": lambda b: shard_of(b).update(file=".."),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_manifests(saved: Path, change: Callable[[dict[str, Any]], Any]):
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    change(document["checkpoint"])
    document["sha256"] = digest(document["checkpoint"])
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"manifest.json: malformed"):
        autopar.restore_checkpoint(saved)


def test_parts_that_overlap_and_leave_a_gap(saved: Path):
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    leaf = w_of(document["checkpoint"])
    (shard,) = leaf["shards"]
    half = {**shard, "box": [[0, 3], [0, 10]], "num_bytes": 240}
    leaf["shards"] = [half, {**half, "box": [[1, 4], [0, 10]]}]
    document["sha256"] = digest(document["checkpoint"])
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"malformed .* overlap"):
        autopar.restore_checkpoint(saved)


def test_a_leaf_within_another(saved: Path):
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    w_of(document["checkpoint"])["path"] = [["key", "b"], ["key", "w"]]
    document["sha256"] = digest(document["checkpoint"])
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="malformed"):
        autopar.restore_checkpoint(saved)


def test_no_memory_is_taken_for_what_is_not_there(saved: Path):
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    leaf = w_of(document["checkpoint"])
    leaf["shape"] = [2**50]
    (shard,) = leaf["shards"]
    shard.update(box=[[0, 2**50]], num_bytes=2**53, block_rows=2**50, crc32=[0])
    document["sha256"] = digest(document["checkpoint"])
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="is damaged: it ends"):
        autopar.restore_checkpoint(saved)


def test_a_file_that_lies_far_out_is_not_made_room_for(saved: Path):
    """A position in a list that no list of this size has."""
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    for leaf in document["checkpoint"]["leaves"]:
        leaf["path"] = [["index", 10**12 + len(leaf["key"]) + leaf["key"].count("w")]]
        leaf["path"].append(["key", leaf["key"]])
    document["sha256"] = digest(document["checkpoint"])
    path.write_text(json.dumps(document))
    back = autopar.restore_checkpoint(saved)
    assert isinstance(back, dict) and len(jax.tree.leaves(back)) == 3
