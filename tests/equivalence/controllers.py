"""Starts the processes of the multi-controller tests, and collects what they wrote down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 500


def run_processes(
    script: Path,
    folder: Path,
    count: int,
    scenarios: Sequence[str],
    *,
    devices_per_process: int,
    env: Mapping[str, str] | None = None,
    codes: Sequence[Collection[int]] | None = None,
) -> list[dict[str, Any]]:
    """What every process says of every scenario; empty for one that wrote nothing down. All are
    ended if one does not end.

    codes: the exit codes that each process may have; 0 alone unless given.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process} "
        "--xla_backend_optimization_level=0",
        **(env or {}),
    }
    processes = []
    try:
        for process in range(count):
            with (folder / f"log_{process}").open("w") as log:
                own = [process, count, port, folder / f"outcomes_{process}", *scenarios]
                command = [sys.executable, str(script), *map(str, own)]
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
                )
        found = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log_{p}").read_text()[-3000:] for p in range(count))
    allowed = codes or [(0,)] * count
    assert all(code in some for code, some in zip(found, allowed, strict=True)), (found, logs)
    files = [folder / f"outcomes_{p}" for p in range(count)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]
