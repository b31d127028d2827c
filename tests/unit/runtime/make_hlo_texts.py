"""Writes `hlo_texts/VERSION-PLATFORM.txt`: what XLA's compilers of one JAX version print for the
programs of `hlo_programs.py`, on eight CPUs and for eight H100s that need not be there.

Run it from the root of the repository, with every JAX version that is to be read:

    python3 -m venv /tmp/jax && /tmp/jax/bin/pip install 'jax[cuda13]==0.11.2' 'jaxlib==0.11.2'
    /tmp/jax/bin/python -m tests.unit.runtime.make_hlo_texts

What readers do not look at is left out: metadata, tables of source lines, settings of kernels.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax

from autopar import _jax
from tests.unit.runtime.hlo_programs import PROGRAMS

FOLDER = Path(__file__).parent / "hlo_texts"
TARGET = Path(_jax.__file__).parent / "measure/verify/gpu_targets" / "h100-80gb.txtpb"
QUICK = {"xla_backend_optimization_level": 0, "xla_gpu_autotune_level": 0}  # after the HLO is final

_METADATA = re.compile(r", metadata=\{(?:[^{}\"]|\"[^\"]*\")*\}")
_SETTINGS = re.compile(r", backend_config=\{.*\}$")
_READ = ("known_trip_count", "gemm_backend_config")


def shortened(text: str) -> str:
    header, _, rest = text.partition("\n")
    first = re.search(r"^(?:ENTRY )?%", rest, re.MULTILINE)
    lines = rest[first.start() if first else 0 :].rstrip().splitlines()
    kept = [header, ""]
    for line in lines:
        line = _METADATA.sub("", line)
        kept.append(line if any(word in line for word in _READ) else _SETTINGS.sub("", line))
    return "\n".join(kept)


def write(platform: str, devices: list[Any], options: dict[str, Any]) -> None:
    texts = {
        name: program.lower(devices).compile(compiler_options=program.options | options).as_text()
        for name, program in PROGRAMS.items()
        if platform in program.platforms
    }
    sections = [f"// {name}\n\n{shortened(text)}\n" for name, text in texts.items()]
    file = FOLDER / f"{jax.__version__}-{platform}.txt"
    file.write_text("\n".join(sections), encoding="utf-8")
    print(file, file.stat().st_size)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    jax.config.update("jax_num_cpu_devices", 8)
    write("cpu", jax.devices(), {})
    write("gpu", _jax.gpu_topology_devices(1, 8, TARGET.read_text(encoding="utf-8")), QUICK)


if __name__ == "__main__":
    main()
