"""A wall clock that can jump: for a process and all that it starts, by a library loaded first.

    with_clock(folder)      start this program again with such a clock
    jump(seconds)           in that program: the clock of all its processes jumps

`clock_shim.c` says what the library does.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "AUTOPAR_TEST_CLOCK"


def can_jump() -> bool:
    """Whether this process was started with such a clock."""
    return VARIABLE in os.environ


def clock_environment(folder: Path) -> dict[str, str]:
    """Variables for a process that should have such a clock. Needs a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("a clock that jumps needs a C compiler: install gcc")
    library, ahead = folder / "clock_shim.so", folder / "seconds_ahead"
    source = Path(__file__).with_name("clock_shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    ahead.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), VARIABLE: str(ahead)}


def run_with_clock(arguments: Sequence[str], folder: Path) -> int:
    """Run Python with these arguments and such a clock; its exit code."""
    env = {**os.environ, **clock_environment(folder)}
    return subprocess.run([sys.executable, *arguments], env=env).returncode


def jump(seconds: int) -> None:
    """The wall clock jumps by so many seconds, for this process and all that have its clock."""
    with open(os.environ[VARIABLE], "r+b", buffering=0) as file:
        (ahead,) = struct.unpack("q", file.read(8))
        file.seek(0)
        file.write(struct.pack("q", ahead + seconds))
