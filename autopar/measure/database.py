"""The database of timed plans: an SQLite file in the user's cache folder.

    Key → StepTiming                 timings
    text of a request → plan JSON    choices, so that the same request needs no search

A key contains all that a time depends on: program, plan, devices, versions and compiler flags
(`key_of`). Several processes may use the file at once. A damaged file is renamed with a warning,
and a file that cannot be written is ignored: no step fails because of the database.

The folder is `AUTOPAR_CACHE`, else `autopar` in `XDG_CACHE_HOME` or `~/.cache`. `AUTOPAR_CACHE=off`
disables the database.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sqlite3
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from autopar.ir.identity import plan_digest
from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import Timing
from autopar.measure.time_step import StepTiming

T = TypeVar("T")

FILE = "timings.sqlite"
OFF = "off"
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")  # which change programs
_WAIT_S = 10.0  # for another process to finish writing
# The table's name has the version of its columns; tables of other versions are left alone.
_TABLE = "timings_1"
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {_TABLE} (
    key TEXT PRIMARY KEY, program TEXT, plan TEXT, devices TEXT, versions TEXT, name TEXT,
    made REAL, seconds REAL, spread REAL, num_samples INTEGER, compile_s REAL, memory_bytes REAL,
    failure TEXT)
"""
_CHOICES = "choices_1"
_CREATE_CHOICES = f"CREATE TABLE IF NOT EXISTS {_CHOICES} (key TEXT PRIMARY KEY, plan TEXT)"


@dataclass(frozen=True)
class Key:
    """program:  digest of the equations with their shapes, and of donations.
    plan:     digest of the plan's decisions.
    devices:  kind and number.
    versions: of JAX, jaxlib, autopar and the platform; flags.
    """

    program: str
    plan: str
    devices: str
    versions: str

    @property
    def digest(self) -> str:
        return _digest(json.dumps(astuple(self)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Row:
    """A stored timing; `made_s`: when, in seconds since 1970."""

    name: str
    key: Key
    made_s: float
    timing: StepTiming


def key_of(plan: ParallelPlan, donated: Sequence[int], devices: Sequence[Any]) -> Key:
    program = f"{plan.fingerprint.program} {sorted(donated)}"
    place, versions = where_and_with(devices[: plan.num_devices])
    versions += f" {plan.xla_options}" if plan.xla_options else ""
    return Key(program, plan_digest(plan), place, versions)


def where_and_with(used: Sequence[Any]) -> tuple[str, str]:
    """(devices, versions and flags) as text."""
    kinds = sorted({device.device_kind for device in used})
    hosts = len({device.process_index for device in used})
    place = f"{len(used)} × {', '.join(kinds)} on {hosts} of {used[0].platform}"
    if used[0].platform == "cpu":  # all CPUs have one kind
        place += f", {platform.machine()} with {os.cpu_count()} cores"
    return place, _versions(used[0])


def _versions(device: Any) -> str:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    try:
        packages["autopar"] = importlib.metadata.version("autopar")
    except importlib.metadata.PackageNotFoundError:  # a source tree
        packages["autopar"] = ""
    settings = {
        "platform": str(device.client.platform_version).splitlines()[0],
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: str(getattr(jax.config, name)) for name in _SETTINGS},
    }
    return json.dumps({**packages, **settings}, sort_keys=True)


class Database:
    """The file at a path, opened when needed. Without a path, the database is empty."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def find(self, key: Key) -> StepTiming | None:
        def read(connection: sqlite3.Connection) -> StepTiming | None:
            row = connection.execute(
                f"SELECT seconds, spread, num_samples, compile_s, memory_bytes, failure "
                f"FROM {_TABLE} WHERE key = ?",
                (key.digest,),
            ).fetchone()
            return None if row is None else _decoded(*row)

        return self._with(read, None)

    def keep(self, key: Key, timing: StepTiming, name: str) -> None:
        step = timing.step
        times = (None, None, None) if step is None else astuple(step)
        row = (
            key.digest,
            *astuple(key),
            name,
            time.time(),
            *times,
            timing.compile_s,
            timing.memory_bytes,
            timing.failure,
        )

        def write(connection: sqlite3.Connection) -> None:
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES ({marks})", row)
            connection.commit()

        self._with(write, None)

    def find_choice(self, request: str) -> str | None:
        """The plan, as JSON, that was chosen for the same request."""

        def read(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(
                f"SELECT plan FROM {_CHOICES} WHERE key = ?", (_digest(request),)
            ).fetchone()
            return str(row[0]) if row else None

        return self._with(read, None)

    def keep_choice(self, request: str, plan: str) -> None:
        def write(connection: sqlite3.Connection) -> None:
            row = (_digest(request), plan)
            connection.execute(f"INSERT OR REPLACE INTO {_CHOICES} VALUES (?, ?)", row)
            connection.commit()

        self._with(write, None)

    def rows(self) -> list[Row]:
        """All timings, the latest first."""

        def read(connection: sqlite3.Connection) -> list[Row]:
            rows = []
            for row in connection.execute(f"SELECT * FROM {_TABLE} ORDER BY made DESC"):
                _, program, plan, devices, versions, name, made, *columns = row
                timing = _decoded(*columns)
                if timing is not None:
                    key = Key(program, plan, devices, versions)
                    rows.append(Row(str(name), key, float(made), timing))
            return rows

        return self._with(read, [])

    def forget(self) -> int:
        """Remove everything; returns the number of timings."""

        def clear(connection: sqlite3.Connection) -> int:
            count = connection.execute(f"DELETE FROM {_TABLE}").rowcount
            connection.execute(f"DELETE FROM {_CHOICES}")
            connection.commit()
            return count

        return self._with(clear, 0)

    def _with(self, use: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        if self.path is None:
            return otherwise
        for _ in range(2):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as connection:
                    connection.execute(_CREATE)
                    connection.execute(_CREATE_CHOICES)
                    return use(connection)
            except sqlite3.OperationalError as error:  # locked, read-only, no space
                self._do_without(error)
                return otherwise
            except sqlite3.DatabaseError as error:
                if not self._put_aside(error):
                    return otherwise
            except OSError as error:
                self._do_without(error)
                return otherwise
        return otherwise

    def _put_aside(self, error: Exception) -> bool:
        assert self.path is not None
        broken = self.path.with_suffix(f".broken-{os.getpid()}")
        try:
            self.path.replace(broken)
        except OSError:
            self._do_without(error)
            return False
        warnings.warn(
            f"{self.path}: the database of timed plans is damaged ({error}). It was renamed to "
            f"{broken.name}, and a new one was started.",
            stacklevel=4,
        )
        return True

    def _do_without(self, error: Exception) -> None:
        warnings.warn(
            f"{self.path}: cannot use the database of timed plans ({error}); plans are timed "
            "again. Set AUTOPAR_CACHE to a writable folder, or to 'off'.",
            stacklevel=4,
        )
        self.path = None


def _decoded(
    seconds: Any, spread: Any, num_samples: Any, compile_s: Any, memory_bytes: Any, failure: Any
) -> StepTiming | None:
    """The timing of a valid row, or None."""
    try:
        step = None
        if seconds is not None:
            step = Timing(float(seconds), float(spread), int(num_samples))
            if not (step.seconds > 0 and math.isfinite(step.seconds) and step.num_samples > 0):
                return None
        elif not failure:
            return None
        return StepTiming(step, float(compile_s), float(memory_bytes), str(failure or ""))
    except (TypeError, ValueError):
        return None


def default_database() -> Database:
    folder = os.environ.get("AUTOPAR_CACHE", "")
    if folder == OFF:
        return Database(None)
    if not folder:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        try:
            folder = str(Path(cache) if cache else Path.home() / ".cache") + "/autopar"
        except RuntimeError:  # no home folder
            return Database(None)
    return Database(Path(folder).expanduser() / FILE)
