"""What every executable writes for whoever looks for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from autopar.errors import ArgumentError


def dump(executable: Any, directory: str | Path, **figures: Any) -> Path:
    """Write plan, explanation, HLO and figures into a folder, which is made if need be."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"dump_debug_info({str(directory)!r}): is a file, not a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    plan = executable.plan
    plan.save(folder / "plan.json")
    (folder / "plan.txt").write_text(plan.explain() + "\n")
    (folder / "optimized_hlo.txt").write_text(executable.hlo_text())
    known = {
        "memory_bytes": executable.memory_bytes(),
        "estimated_peak_bytes": plan.estimated_peak_bytes,
        "jax": jax.__version__,
    }
    (folder / "figures.json").write_text(json.dumps({**known, **figures}, indent=1))
    return folder
