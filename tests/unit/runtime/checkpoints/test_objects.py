"""Checkpoints in object stores: in fsspec's memory, and in a server that speaks S3."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError, CheckpointError, DependencyError
from autopar.runtime.checkpoints import object_folders, objects, write
from autopar.runtime.checkpoints.format import MANIFEST
from autopar.runtime.checkpoints.objects import ObjectPath, UnreachableStoreError, location
from tests.s3_server import SECRETS, s3_server

_numbers = iter(range(1000))


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """A server that speaks S3, with a bucket."""
    with s3_server() as variables:
        yield variables


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """A new place in a store."""
    if request.param == "s3":
        request.getfixturevalue("server")
    return f"{request.param}://bucket/run-{next(_numbers)}"


@pytest.fixture
def memory() -> str:
    return f"memory://bucket/run-{next(_numbers)}"


def state_of(step: int) -> dict[str, Any]:
    return {
        "w": jax.numpy.full((7, 5), step, np.float32),
        "list": [np.arange(40) * step, np.full(3, step, np.int16)],
        "key": jax.random.key(step),
        "step": step,
    }


def assert_is(state: dict[str, Any], step: int) -> None:
    want = state_of(step)
    np.testing.assert_array_equal(state["w"], want["w"])
    np.testing.assert_array_equal(state["list"][0], want["list"][0])
    np.testing.assert_array_equal(state["list"][1], want["list"][1])
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(want["key"])).all()
    assert state["step"] == step


def restored(url: str, step: int | None = None) -> Any:
    return autopar.restore_checkpoint(url, state_of(0), step)


def names(url: str) -> list[str]:
    found = location(url)
    assert isinstance(found, ObjectPath)
    return found.below()


def test_saved_and_restored(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "BLOCK_BYTES", 100)
    assert autopar.latest_step(url) is None
    path = autopar.save_checkpoint(url, state_of(1), 1, metadata={"a": [1]})
    assert path == f"{url}/step_00000001"
    assert_is(restored(url), 1)
    assert_is(autopar.restore_checkpoint(path, state_of(0)), 1)
    assert autopar.checkpoint_metadata(url) == {"a": [1]}
    for step in (2, 3, 4):
        autopar.save_checkpoint(url + "/", state_of(step), step, keep=2)
    assert autopar.checkpoint_steps(url) == [3, 4]
    assert {name.partition("/")[0] for name in names(url)} == {"step_00000003", "step_00000004"}
    assert_is(restored(url, 3), 3)
    assert autopar.checkpoint_steps(f"{url.rpartition('/')[0]}/run") == []


def test_an_upload_in_parts(server: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(objects, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    state = {"w": np.random.default_rng(0).integers(0, 256, 12 * 2**20, np.uint8)}
    autopar.save_checkpoint("s3://bucket/parts", state, 1)
    back = autopar.restore_checkpoint("s3://bucket/parts")
    np.testing.assert_array_equal(back["w"], state["w"])


def test_saved_again(url: str):
    autopar.save_checkpoint(url, state_of(1), 5)
    with pytest.raises(CheckpointError, match="is there already"):
        autopar.save_checkpoint(url, state_of(2), 5)
    assert_is(restored(url), 1)
    autopar.save_checkpoint(url, state_of(2), 5, overwrite=True)
    assert_is(restored(url), 2)
    assert len(names(url)) == 2  # the old data is gone


def test_another_process_saves_the_same_step_meanwhile(url: str):
    place = location(url)
    assert isinstance(place, ObjectPath)
    drafts = [object_folders.begin(place, 7) for _ in range(2)]
    for number, draft in enumerate(drafts):
        (draft.path / "process_00000.data").write(b"%d" % number)
    drafts[0].commit("first")
    with pytest.raises(FileExistsError, match="another process saved this step"):
        drafts[1].commit("second")
    drafts[1].abandon()
    assert (drafts[0].final / MANIFEST).read_limited(100) == b"first"
    assert len(names(url)) == 2
    drafts[0].commit("first")  # a driver that repeats a request is no other process


def test_in_the_background(url: str):
    state = state_of(3)
    save = autopar.save_checkpoint(url, state, 3, asynchronous=True)
    state["list"][0][:] = -1
    assert not isinstance(save, (str, Path))
    assert save.wait(120) == f"{url}/step_00000003"
    assert_is(restored(url), 3)


class Died(Exception):
    pass


CHANGES = ("write", "upload", "remove", "copy_to")


def dies_after(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], int]:
    """Every change of the store from the given one on fails, as if the process were gone."""
    seen = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > count:
                raise Died
            return real(*args, **kwargs)

        return change

    for name in CHANGES:
        monkeypatch.setattr(ObjectPath, name, counted(getattr(ObjectPath, name)))
    return lambda: seen


def test_a_crash_at_any_change_leaves_whole_checkpoints(memory: str):
    def save(url: str, count: int) -> int:
        autopar.save_checkpoint(url, state_of(1), 1)
        autopar.save_checkpoint(url, state_of(2), 2)
        with pytest.MonkeyPatch.context() as patch:
            seen = dies_after(patch, count)
            with contextlib.suppress(Died):
                autopar.save_checkpoint(url, state_of(3), 2, keep=1, overwrite=True)
            return seen()

    total = save(f"{memory}/all", 1000)
    assert total >= 5  # data, manifest, old data, and the older checkpoint's two
    newest = []
    for count in range(total):
        url = f"{memory}/{count}"
        save(url, count)
        assert autopar.latest_step(url) == 2
        back = restored(url, 2)
        assert_is(back, back["step"])
        newest.append(back["step"])
        if 1 in autopar.checkpoint_steps(url):
            assert_is(restored(url, 1), 1)
    assert newest[0] == 2 and newest[-1] == 3 and newest == sorted(newest)


def test_what_has_no_manifest_is_no_checkpoint(memory: str, monkeypatch: pytest.MonkeyPatch):
    autopar.save_checkpoint(memory, state_of(1), 1)
    autopar.save_checkpoint(memory, state_of(2), 2)
    place = location(memory)
    (place / "step_00000002" / MANIFEST).remove()  # type: ignore[union-attr]
    assert autopar.checkpoint_steps(memory) == [1]
    with pytest.raises(CheckpointError, match="begun and not finished"):
        restored(memory, 2)
    autopar.save_checkpoint(memory, state_of(3), 3)
    assert any(name.startswith("step_00000002/") for name in names(memory))
    later = datetime.now(UTC) + timedelta(days=2)
    monkeypatch.setattr(object_folders, "datetime", type("", (), {"now": lambda _: later}))
    autopar.save_checkpoint(memory, state_of(4), 4)
    assert not any(name.startswith("step_00000002/") for name in names(memory))
    assert autopar.checkpoint_steps(memory) == [1, 3, 4]


def test_a_failed_save_leaves_nothing(memory: str, monkeypatch: pytest.MonkeyPatch):
    def fail(self: Any, *_: Any) -> None:
        raise OSError(5, "the line is cut")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.write", fail, raising=False)
    with pytest.raises(CheckpointError, match="the line is cut"):
        autopar.save_checkpoint(memory, state_of(1), 1)
    monkeypatch.undo()
    assert names(memory) == []


def test_damaged_data(memory: str):
    autopar.save_checkpoint(memory, state_of(1), 1)
    (data,) = (name for name in names(memory) if name.endswith(".data"))
    path = location(f"{memory}/{data}")
    assert isinstance(path, ObjectPath)
    content = path.read_limited(10**6)
    path.write(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointError, match="another checksum") as found:
        restored(memory, 1)
    assert not isinstance(found.value, UnreachableStoreError)
    path.write(content[:-1])
    with pytest.raises(CheckpointError, match="ends 1 bytes before"):
        restored(memory, 1)
    path.remove()
    with pytest.raises(CheckpointError, match="no such object"):
        restored(memory, 1)
    (location(memory) / "step_00000001" / MANIFEST).write(b"x" * 100)  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.runtime.checkpoints.format.MANIFEST_LIMIT_BYTES", 99)
        with pytest.raises(CheckpointError, match="at most 99 are read"):
            restored(memory, 1)


def test_set_aside(url: str):
    autopar.save_checkpoint(url, state_of(1), 1)
    place = location(url)
    assert isinstance(place, ObjectPath)
    aside = object_folders.set_aside(place, 1, "damaged")
    assert autopar.checkpoint_steps(url) == []
    assert aside.name.startswith("damaged_step_00000001_")
    assert_is(autopar.restore_checkpoint(str(aside), state_of(0)), 1)


def test_no_such_bucket(server: dict[str, str]):
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run.*Create the bucket"):
        autopar.save_checkpoint("s3://nowhere/run", state_of(1), 1)


def test_wrong_credentials(server: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr("s3fs.S3FileSystem.find", refuse)
    with pytest.raises(UnreachableStoreError, match=r"s3://bucket/x.*Denied.*AWS_ACCESS_KEY"):
        autopar.latest_step("s3://bucket/x")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(UnreachableStoreError, match=r"NoCredentials.*AWS_ACCESS_KEY_ID"):
        autopar.save_checkpoint("s3://bucket/x", state_of(1), 1)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_store_that_does_not_answer(memory: str, monkeypatch: pytest.MonkeyPatch):
    release = threading.Event()
    monkeypatch.setattr(objects, "LIMIT_S", 0.05)
    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFileSystem.find", lambda *_, **__: release.wait(60)
    )
    with pytest.raises(UnreachableStoreError, match=r"did not answer within 0.05 s.*try again"):
        autopar.latest_step(memory)
    release.set()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def no_fsspec(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "fsspec":
            raise ImportError("No module named 'fsspec'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_fsspec)
    with pytest.raises(DependencyError, match=r"s3://bucket/x.*pip install 'autopar\[s3\]'"):
        autopar.latest_step("s3://bucket/x")
    with pytest.raises(DependencyError, match=r"pip install 'autopar\[gcs\]'"):
        autopar.latest_step("gs://bucket/x")


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "s3://", "s3://bucket/../x", "s3://b//x", "s3://b/x?y", "s3://b/x#y"]
)
def test_bad_urls(url: str):
    with pytest.raises(ArgumentError, match=r"save_checkpoint\('.*needs"):
        autopar.save_checkpoint(url, state_of(1), 1)


def test_orbax_writes_to_file_systems_only(memory: str):
    with pytest.raises(ArgumentError, match="file systems only"):
        autopar.save_checkpoint(memory, state_of(1), 1, format="orbax")


# -- training


def train_step(state: Any, batch: Any) -> Any:
    new = {"w": state["w"] * 0.5 + batch.mean(0)}
    return new, (new["w"] ** 2).sum()


BATCHES = list(np.random.default_rng(0).normal(size=(6, 4, 8)).astype(np.float32))


def train(directory: Any, num_steps: int, on_step: Any = None) -> Any:
    return autopar.run_training(
        jax.jit(train_step),
        {"w": jax.numpy.zeros(8)},
        BATCHES,
        checkpoint_dir=directory,
        checkpoint_every=2,
        num_steps=num_steps,
        on_step=on_step,
    )


def test_training_resumes_exactly(url: str, tmp_path: Path):
    want, want_loss = train(tmp_path, 6)
    train(url, 3)
    seen: list[int] = []
    state, loss = train(url, 6, lambda number, _: seen.append(number))
    assert seen == [4, 5, 6]
    np.testing.assert_array_equal(state["w"], want["w"])
    assert float(loss) == float(want_loss)
    assert autopar.checkpoint_steps(url) == autopar.checkpoint_steps(tmp_path)
    assert float(train(url, 6)[1]) == float(want_loss)  # a finished run's results


def test_training_sets_a_damaged_checkpoint_aside(memory: str):
    train(memory, 4)
    data = [name for name in names(memory) if "_00000004/" in name and name.endswith(".data")]
    location(f"{memory}/{data[0]}").write(b"x")  # type: ignore[union-attr]
    seen: list[int] = []
    with pytest.warns(UserWarning, match="STEP 4 IS DAMAGED"):
        train(memory, 6, lambda number, _: seen.append(number))
    assert seen == [3, 4, 5, 6]


def test_an_unreachable_store_is_no_damage(memory: str, monkeypatch: pytest.MonkeyPatch):
    train(memory, 4)
    before = names(memory)

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", fail)
    with pytest.raises(UnreachableStoreError, match="reset by peer"):
        train(memory, 6)
    with pytest.raises(UnreachableStoreError, match="reset by peer"):
        restored(memory)
    monkeypatch.undo()
    assert names(memory) == before
