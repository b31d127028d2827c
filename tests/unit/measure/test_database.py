"""The database of timed plans: what a key tells apart, several users, and files that are broken."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.profile import Timing
from autopar.measure.database import FILE, Database, Key, default_database, key_of
from autopar.measure.time_step import StepTiming

KEY = Key("program", "plan", "8 × cpu", "versions")
TIMING = StepTiming(Timing(0.25, 0.01, 7), 1.5, 4096.0)
FULL = StepTiming(None, 2.0, 0.0, "RESOURCE_EXHAUSTED: Out of memory")


def test_what_is_kept_is_found_and_can_be_forgotten(tmp_path):
    database = Database(tmp_path / "folder" / FILE)
    assert database.find(KEY) is None
    database.keep(KEY, TIMING, "step: mesh 8")
    other = replace(KEY, plan="another")
    database.keep(other, FULL, "step: mesh 2×4")
    assert database.find(KEY) == TIMING and database.find(other) == FULL
    assert [(row.name, row.key, row.timing) for row in database.rows()] == [
        ("step: mesh 2×4", other, FULL),
        ("step: mesh 8", KEY, TIMING),
    ]
    for field in ("program", "plan", "devices", "versions"):
        assert database.find(replace(KEY, **{field: "other"})) is None
    database.keep_choice("what was asked", "a plan")
    assert database.find_choice("what was asked") == "a plan"
    assert database.find_choice("something else") is None
    assert database.forget() == 2 and database.find(KEY) is None and database.rows() == []
    assert database.find_choice("what was asked") is None


def test_a_broken_file_is_put_aside(tmp_path):
    path = tmp_path / FILE
    path.write_bytes(b"no database at all, but longer than its header" * 40)
    database = Database(path)
    with pytest.warns(UserWarning, match="is damaged .* a new one was started"):
        database.keep(KEY, TIMING, "step")
    assert database.find(KEY) == TIMING
    (aside,) = tmp_path.glob("*.broken-*")
    assert aside.read_bytes().startswith(b"no database")


def test_a_file_that_cannot_be_used_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    database = Database(tmp_path / "file" / FILE)
    with pytest.warns(UserWarning, match="cannot use the database .* Set AUTOPAR_CACHE"):
        assert database.find(KEY) is None
    database.keep(KEY, TIMING, "step")  # silently: it was said once
    assert database.rows() == []


def test_a_row_that_makes_no_sense_is_not_believed(tmp_path):
    database = Database(tmp_path / FILE)
    database.keep(KEY, TIMING, "step")
    for seconds in ("'text'", "-1", "9e999", "NULL"):
        with sqlite3.connect(tmp_path / FILE) as connection:
            connection.execute(f"UPDATE timings_1 SET seconds = {seconds}")
        connection.close()
        assert database.find(KEY) is None and database.rows() == []


def test_many_may_write_at_once(tmp_path):
    def write(number):
        database = Database(tmp_path / FILE)
        for k in range(10):
            database.keep(replace(KEY, plan=f"{number}.{k}"), TIMING, "step")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Database(tmp_path / FILE).rows()) == 40


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "own"))
    assert default_database().path == tmp_path / "own" / FILE
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    assert default_database().path is None
    monkeypatch.delenv("AUTOPAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_database().path == tmp_path / "autopar" / FILE


def test_a_key_tells_program_plan_devices_and_flags_apart(monkeypatch):
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    args = jnp.ones((16, 16)), jnp.ones((16, 16))
    devices = jax.devices()
    plan = autopar.parallelize(step, method=autopar.DataParallel()).plan(*args)
    split = autopar.parallelize(step, method=autopar.Zero3Parallel()).plan(*args)
    wider = autopar.parallelize(step, method=autopar.DataParallel()).plan(
        args[0], jnp.ones((32, 16))
    )
    key = key_of(plan, (), devices)
    assert key == key_of(autopar.ParallelPlan.from_json(plan.to_json()), (), devices)
    assert key != key_of(split, (), devices)
    assert key.program != key_of(wider, (), devices).program
    assert key.program != key_of(plan, (0,), devices).program
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    assert key.versions != key_of(plan, (), devices).versions
