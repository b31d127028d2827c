"""The process that compiles one program for absent GPUs: from `job.bin` to `result.json`.

`compile.py` starts it with the environment it needs. Unless the process was killed, its last words
are in the result."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from dataclasses import astuple
from pathlib import Path
from typing import Any

from autopar import _jax
from autopar.ir.files import write_whole
from autopar.ir.mesh import ClusterSpec
from autopar.measure.judged_plan import judged
from autopar.measure.verify.jobs import CompileJob
from autopar.runtime.hlo import read_collectives, read_dot_flops
from autopar.runtime.remote.exporting import compile_stage_program

_LOOK_EVERY_S = 1.0


def main(folder: Path, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    job: CompileJob = pickle.loads((folder / "job.bin").read_bytes())
    try:
        result = compiled_figures(job)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    write_whole(folder / "result.json", json.dumps(result))


def _end_with(parent: int) -> None:
    """Nobody waits for the result of a process that was killed."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def compiled_figures(job: CompileJob) -> dict[str, Any]:
    """What XLA makes of the program; bytes and flops are of one device and one run."""
    started = time.perf_counter()
    num_hosts, devices_per_host = job.topology
    devices = _jax.gpu_topology_devices(num_hosts, devices_per_host, job.target_config)
    compiled = compile_stage_program(job.name, job.spec, job.program, devices)
    seconds = time.perf_counter() - started
    text = compiled.as_text() or ""
    if job.hlo_file:
        Path(job.hlo_file).write_text(text, encoding="utf-8")
    stats = compiled.memory_analysis()
    assert stats is not None
    counts: dict[str, int] = defaultdict(int)
    sent: dict[str, float] = defaultdict(float)
    for op in read_collectives(text):
        counts[op.kind] += op.trips
        sent[op.kind] += op.sent_bytes
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "collectives": [[kind, counts[kind], sent[kind]] for kind in sorted(counts)],
        "dot_flops": read_dot_flops(text),
        "seconds": seconds,
        "times": _times(text, job),
    }


def _times(text: str, job: CompileJob) -> list[float] | None:
    if job.device is None:
        return None
    return list(astuple(judged(text, ClusterSpec(*job.topology, device=job.device))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
