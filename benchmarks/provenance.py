"""Where a row comes from, and which rows are older than the planner.

`provenance()` goes into every result of `autopar bench`: a digest of the planner's own files, the
commit, the compiler's flags and the versions. A row is *stale* if an autopar plan in it was made by
another planner than the one in this tree, or if that was not recorded; experts' layouts are not
planned, so they do not age.

python -m benchmarks.provenance [RESULTS.json …]    # names the stale rows
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.plan_cache.key import planner_digest

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "benchmarks" / "results" / "suite.json"
NOT_RECORDED = "not recorded"
_SHOWN = 8  # characters of a digest
_GIT_LIMIT_S = 20.0
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_PACKAGES = ("autopar", "jax", "jaxlib", "flax", "optax", "highspy")
_PLANNED_PARTS = ("h100", "cpu")
_PLANNED_FAMILIES = ("autopar", "3-D by hand")  # the latter fixes stages; autopar does the rest


def provenance() -> dict[str, Any]:
    """What made a row, as JSON."""
    return {"planner": planner_digest(), "commit": commit(), "flags": flags(), **_versions()}


def commit(*but: str) -> str | None:
    """The commit of this tree, with "+" if tracked files differ from it; None outside git. `but`:
    folders whose files may differ, as those that a benchmark writes do while it runs."""
    hash_ = _git("rev-parse", "HEAD")
    paths = (":/", *(f":(top,exclude){folder}" for folder in but))
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    return None if hash_ is None else hash_ + ("+" if changed else "")


def flags() -> dict[str, str]:
    """The variables that change what XLA compiles, as far as they are set."""
    names = [*_FLAGS, *(name for name in os.environ if name.startswith("JAX_"))]
    return {name: os.environ[name] for name in sorted(names) if os.environ.get(name)}


def _versions() -> dict[str, Any]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": found}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def planner_of(row: dict[str, Any]) -> str:
    """The digest of the planner that made a row's autopar plans, or that it was not recorded."""
    made = {
        one.get("made", {}).get("planner", NOT_RECORDED)
        for one in row["results"]
        if one["family"] in _PLANNED_FAMILIES
    }
    if not made or NOT_RECORDED in made:
        return NOT_RECORDED
    return " and ".join(sorted(digest[:_SHOWN] for digest in made))


def stale_rows(document: dict[str, Any], current: str) -> Iterator[str]:
    """A line for each row that the planner with the digest `current` did not make."""
    for part in _PLANNED_PARTS:
        for row in document.get(part, {}).get("rows", ()):
            if (made := planner_of(row)) != current[:_SHOWN]:
                layers = f", {row['layers']} layers" if row.get("layers") else ""
                yield f"{part}: {row['model']}{layers} on {row['devices']}: planner {made}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=[SUITE])
    current = planner_digest()
    print(f"this planner: {current[:_SHOWN]}")
    for file in parser.parse_args().files:
        document = json.loads(file.read_text(encoding="utf-8"))
        stale = list(stale_rows(document, current))
        rows = sum(len(document.get(part, {}).get("rows", ())) for part in _PLANNED_PARTS)
        print(f"{file.name}: {len(stale)} of {rows} rows were made by another planner")
        for line in stale:
            print(f"  {line}")


if __name__ == "__main__":
    main()
