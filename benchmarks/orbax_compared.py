"""Checkpoints in autopar's format and in orbax's, of the same state: times, and what is noticed.

    python -m benchmarks.orbax_compared [--mib 256] [--repeats 3] [--json FILE]

A state of 16 float32 matrices, sharded over eight virtual CPU devices of this process. Medians of
`--repeats`, in seconds of wall clock and of CPU: saving, saving in the background (until the call
returns, and until the checkpoint is complete), restoring to the same sharding and to another one.

Then, for each format, one fault at a time, in a fresh checkpoint: a byte of a data file is flipped;
a data file loses its second half; a data file is gone; and a checkpoint is saved to and restored
from a server that speaks S3 (moto, in this process's own host). A fault is noticed if restoring
raises; it is silent if restoring returns other values than were saved.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks.script import command_line, script_parser, write_json
from tests.s3_server import s3_server

NUM_LEAVES = 16
FORMATS = ("autopar", "orbax")


def make_state(mib: int) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("x",))
    columns = 1024
    rows = max(8, mib * 2**20 // (4 * columns * NUM_LEAVES) // 8 * 8)
    rng = np.random.default_rng(0)
    return {
        f"w{n}": jax.device_put(
            rng.normal(size=(rows, columns)).astype(np.float32), NamedSharding(mesh, P("x"))
        )
        for n in range(NUM_LEAVES)
    }


def like(state: dict[str, jax.Array], spec: P) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = next(iter(state.values())).sharding.mesh
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for name, x in state.items()
    }


class Own:
    """autopar's format."""

    def save(self, folder: Any, state: Any) -> None:
        autopar.save_checkpoint(folder, state, 1)

    def begin(self, folder: Any, state: Any) -> Callable[[], None]:
        save = autopar.save_checkpoint(folder, state, 1, asynchronous=True)
        assert isinstance(save, autopar.CheckpointSave)
        return save.wait

    def restore(self, folder: Any, target: Any) -> Any:
        return autopar.restore_checkpoint(folder, target)


class Orbax:
    """Orbax's manager with its defaults, as its documentation shows it."""

    def save(self, folder: Any, state: Any) -> None:
        self.begin(folder, state)()

    def begin(self, folder: Any, state: Any) -> Callable[[], None]:
        manager = ocp.CheckpointManager(folder)
        manager.save(1, args=ocp.args.StandardSave(state))

        def wait() -> None:
            manager.wait_until_finished()
            manager.close()

        return wait

    def restore(self, folder: Any, target: Any) -> Any:
        with ocp.CheckpointManager(folder) as manager:
            return manager.restore(1, args=ocp.args.StandardRestore(target))


MADE = {"autopar": Own, "orbax": Orbax}


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of wall clock and of CPU."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def times_of(kind: str, state: Any, folder: Path, repeats: int) -> dict[str, Any]:
    own = MADE[kind]()
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(repeats):
        place = folder / f"{kind}_{number}"
        found.setdefault("save", []).append(timed(lambda place=place: own.save(place, state)))
        for name, spec in (("restore", P("x")), ("restore, resharded", P(None, "x"))):
            target = like(state, spec)

            def restore(place: Path = place, target: Any = target) -> None:
                jax.block_until_ready(own.restore(place, target))

            found.setdefault(name, []).append(timed(restore))
        later = folder / f"{kind}_{number}_later"
        waits: list[Callable[[], None]] = []
        first = timed(lambda later=later, waits=waits: waits.append(own.begin(later, state)))
        rest = timed(waits[0])
        found.setdefault("background, call", []).append(first)
        both = (first[0] + rest[0], first[1] + rest[1])
        found.setdefault("background, complete", []).append(both)
        shutil.rmtree(place)
        shutil.rmtree(later)
    return {
        name: {
            "wall_s": round(statistics.median(wall for wall, _ in values), 3),
            "cpu_s": round(statistics.median(cpu for _, cpu in values), 3),
        }
        for name, values in found.items()
    }


def data_file(folder: Path) -> Path:
    """The largest file of a checkpoint."""
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path: Path) -> None:
    """One byte in the middle."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


FAULTS: dict[str, Callable[[Path], None]] = {
    "a byte is flipped": flip,
    "a data file is cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a data file is gone": lambda path: path.unlink(),
}


def after_fault(kind: str, state: Any, folder: Path, fault: str) -> str:
    own, place = MADE[kind](), folder / f"{kind}_fault"
    own.save(place, state)
    FAULTS[fault](data_file(place))
    try:
        back = own.restore(place, like(state, P("x")))
        same = all(np.array_equal(back[name], x) for name, x in state.items())
    except Exception as error:  # whatever either raises is what users see
        return f"noticed: {type(error).__name__}"
    finally:
        shutil.rmtree(place)
    return "no harm" if same else "silent: other values were restored"


def in_a_store(kind: str, state: Any) -> str:
    own, url = MADE[kind](), f"s3://bucket/{kind}"
    try:
        own.save(url, state)
        back = own.restore(url, like(state, P("x")))
        same = all(np.array_equal(back[name], x) for name, x in state.items())
    except Exception as error:  # as above
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return "saved and restored" if same else "silent: other values were restored"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    state, small = make_state(arguments.mib), make_state(8)
    body: dict[str, Any] = {
        "command": command_line("benchmarks.orbax_compared", FILE=arguments.json),
        "mib": sum(x.nbytes for x in state.values()) / 2**20,
        **{name: metadata.version(name) for name in ("jax", "orbax-checkpoint", "tensorstore")},
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as name, s3_server():
        folder = Path(name)
        for kind in FORMATS:
            row: dict[str, Any] = times_of(kind, state, folder, arguments.repeats)
            row |= {fault: after_fault(kind, small, folder, fault) for fault in FAULTS}
            with contextlib.chdir(folder):  # a path that is not understood is made here
                row["S3"] = in_a_store(kind, small)
            body["rows"][kind] = row
            for what, value in row.items():
                print(f"{kind:8} {what:28} {value}", flush=True)
            write_json(arguments.json, body)


if __name__ == "__main__":
    main()
