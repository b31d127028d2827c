"""A program that saves checkpoints in processes that are killed, and looks at what they leave.

    kill DIRECTORY COUNT   COUNT killed at a chosen byte or change, and COUNT at a random moment
    exit DIRECTORY         begins a save in the background and ends

The processes are forks of this one, which has started no thread and no JAX backend: numpy arrays
need none, and starting an interpreter for each would take all the time.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import autopar
from tests.unit.runtime.checkpoints.mortal import mortal
from tests.unit.runtime.checkpoints.test_crashes import assert_whole, state_of

warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)


def in_a_fork(body: Callable[[], None], until: Callable[[], None] | None = None) -> int:
    """Run in another process, killed when `until` returns; the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if until is not None:
        until()
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status)


def save_for_ever(directory: Path, step: int) -> None:
    while True:
        step += 1
        autopar.save_checkpoint(directory, state_of(step), step, keep=2)


def kill(directory: Path, count: int) -> None:
    rng = random.Random(0)
    with mortal(float("inf")) as counted:
        autopar.save_checkpoint(directory, state_of(1), 1)
    step = 1
    for _ in range(count):
        point = rng.randrange(3 * counted.used)

        def save(point: int = point, step: int = step) -> None:
            with mortal(point, "killed"):
                save_for_ever(directory, step)

        assert in_a_fork(save) == signal.SIGKILL
        after = assert_whole(directory)
        assert step <= after <= step + 4, (step, after)
        step = after
    for _ in range(count):
        save = functools.partial(save_for_ever, directory, step)

        def until(step: int = step) -> None:
            """It has saved one, and goes on."""
            limit = time.monotonic() + 60
            while autopar.latest_step(directory) == step and time.monotonic() < limit:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))

        assert in_a_fork(save, until) == signal.SIGKILL
        after = assert_whole(directory)
        assert after > step
        step = after
    autopar.save_checkpoint(directory, state_of(step + 1), step + 1, keep=1)
    assert os.listdir(directory) == [f"step_{step + 1:08d}"], os.listdir(directory)
    print(f"{count} killed at a byte, {count} at a moment; {step} saved")


def begin_and_end(directory: Path) -> None:
    from autopar.runtime.checkpoints import files

    real = files.create_file

    def slow(path: Path) -> int:
        time.sleep(0.3)
        return real(path)

    files.create_file = slow
    autopar.save_checkpoint(directory, state_of(1), 1, asynchronous=True)


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        kill(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        begin_and_end(Path(sys.argv[2]))
