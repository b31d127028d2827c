"""Ends processes when the process that started them ends, however it ends.

    python guard.py        reads lines from standard input:
        process GROUP      a process group to kill at the end
        gone GROUP         it has ended by itself
        mps FOLDER         the MPS daemon whose pipes are in FOLDER: quit it and remove the folder

The end is the end of the input: the owner has closed it, or has died, even by SIGKILL. The owner
starts this file by its path, so it imports nothing of autopar.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"
_QUIT_S = 5  # for the MPS server to end by itself
_LIMIT_S = 20.0
_TERM_S = 1.0  # from SIGTERM to SIGKILL


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # they are meant for the owner
    groups: set[int] = set()
    folders: list[str] = []
    owner = os.getppid()
    for line in _lines(owner):
        word, _, value = line.partition(" ")
        if word == "process":
            groups.add(int(value))
        elif word == "gone":
            groups.discard(int(value))
        elif word == "mps":
            folders.append(value)
    end_groups(groups)
    for folder in folders:
        quit_mps(folder)


def _lines(owner: int):
    """Lines until the input ends or the owner is gone. A child that the owner forked may hold the
    pipe open, so the owner's process id counts too."""
    rest = b""
    while os.getppid() == owner:
        ready, _, _ = select.select([0], [], [], 1.0)
        if not ready:
            continue
        got = os.read(0, 4096)
        if not got:
            return
        *lines, rest = (rest + got).split(b"\n")
        yield from (line.decode() for line in lines)


def end_groups(groups: set[int]) -> None:
    """SIGTERM, then SIGKILL, to all processes of the groups."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        alive = []
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sent)
                alive.append(group)
        until_s = time.monotonic() + _TERM_S
        while any(map(_exists, alive)) and time.monotonic() < until_s:
            time.sleep(0.02)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def quit_mps(folder: str) -> None:
    """End the daemon and its servers, by force if they do not end, and remove their folder."""
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    env.pop("LD_PRELOAD", None)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [MPS_CONTROL],
            input=f"quit -t {_QUIT_S}\n",
            env=env,
            text=True,
            timeout=_LIMIT_S,
            capture_output=True,
        )
    for process in mps_processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def mps_processes(folder: str) -> list[int]:
    """The daemon and its servers: processes of MPS that were started with these pipes."""
    setting = f"CUDA_MPS_PIPE_DIRECTORY={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text().startswith("nvidia-cuda-mps"[:15]) and (
                    setting in (entry / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
