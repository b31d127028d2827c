"""Several processes of one program, started by the user, save and restore together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3_server import s3_server

SCRIPT = Path(__file__).with_name("one_of_several.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


@pytest.mark.slow
def test_two_processes_write_one_checkpoint(tmp_path: Path, store: dict[str, str]):
    env = {
        **os.environ,
        **store,
        "PYTHONPATH": str(Path(__file__).parents[4]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), address, "2", str(process)),
                *(str(tmp_path / "saved"), "s3://bucket/several"),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and "done" in output, output
    assert os.listdir(tmp_path / "saved") == ["step_00000002"]
    saved = tmp_path / "saved" / "step_00000002"
    assert sorted(os.listdir(saved)) == [
        "manifest.json",
        "process_00000.data",
        "process_00001.data",
    ]
    leaves = json.loads((saved / "manifest.json").read_text())["checkpoint"]["leaves"]
    files = {leaf["key"]: {shard["file"] for shard in leaf["shards"]} for leaf in leaves}
    assert len(files["['split']"]) == len(files["['turned']"]) == 2
    assert files["['whole']"] == files["['local']"] == {"process_00000.data"}
