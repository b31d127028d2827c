"""The files for SLURM and Kubernetes, without either: the batch script with an `srun` that starts
its processes here, and the script as the pods of the manifest would run it."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
LIMIT_S = 600
TINY = ["--size", "tiny", "--stages", "2", "--micro-batches", "2", "--batch", "8"]

# Starts SLURM_NTASKS processes with what SLURM tells each of them.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
pids=()
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NODELIST=localhost "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


def environment(**own: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    cpu = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PJRT_NPROC": "8"}
    return {**inherited, **cpu, "PYTHONPATH": str(ROOT), "AUTOPAR_PROGRESS": "0", **own}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def steps_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+): loss [\d.]+$", text, re.MULTILINE)]


@pytest.mark.slow
def test_the_batch_script_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "python": f'#!/bin/bash\nexec {sys.executable} "$@"'}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    # JAX takes the coordinator's port from the job's number.
    job = free_port() % 4096 + 4096
    env = environment(SLURM_NTASKS="4", SLURM_JOB_ID=str(job), TRAIN=str(CLUSTERS / "train.py")) | {
        "PATH": f"{commands}:{os.environ['PATH']}"
    }
    for num_steps, want in ((2, [1, 2]), (3, [3])):
        done = subprocess.run(
            ["bash", str(CLUSTERS / "slurm.sh"), *TINY, "--steps", str(num_steps)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert steps_of(done.stdout) == want


def manifest() -> dict[str, Any]:
    """Kind -> the document of the manifest."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_manifest_fits_together() -> None:
    documents = manifest()
    service, job = documents["Service"], documents["Job"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["NUM_PROCESSES"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    host, _, port = env["COORDINATOR"].partition(":")
    assert host == f"{name}-0.{pod['subdomain']}" and port.isdigit()
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert (ROOT / container["command"][-1]).is_file()


@pytest.mark.ci
def test_pods_train(tmp_path: Path) -> None:
    """With the variables of the manifest, and the coordinator on this host."""
    (container,) = manifest()["Job"]["spec"]["template"]["spec"]["containers"]
    _, script = container["command"]
    arguments = [*container["args"], *TINY, "--steps", "2", "--checkpoints", str(tmp_path)]
    env = environment(COORDINATOR=f"127.0.0.1:{free_port()}", NUM_PROCESSES="2")
    pods = [
        subprocess.Popen(
            [sys.executable, str(ROOT / script), *arguments],
            env={**env, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        texts = [pod.communicate(timeout=LIMIT_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], texts
    assert steps_of(texts[0]) == [1, 2] and not steps_of(texts[1])


def test_the_batch_script_asks_for_what_it_uses() -> None:
    text = (CLUSTERS / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]  # a process per GPU
    words = shlex.split(text[text.index("srun") :].replace("\\\n", " "), comments=True)
    stages = int(words[words.index("--stages") + 1])
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) % stages == 0
