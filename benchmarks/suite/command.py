"""Runs `autopar bench`: from its options to a results file and its tables.

The suite has parts: "cpu" is measured on 8 virtual CPU devices, "h100" is compiled for 8, 16 and 64
H100s that need not exist, "h200" and "serving" are measured on one GPU if there is one, "scaling"
is predicted. Every result has its own file in the folder; `suite.json` next to them has all.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError, CompileError, near_names
from benchmarks.suite.cases import (
    H100_ROWS,
    QUICK_ROWS,
    Row,
    check_names,
    chosen_rows,
    cpu_rows,
)
from benchmarks.suite.pool import Task, run_tasks
from benchmarks.suite.tables import tables_of, with_tables

PARTS = ("cpu", "h100", "h200", "scaling", "serving")
DEFAULT_PARTS = ("cpu", "h100", "h200")
RESULTS = "suite.json"
QUICK_ROUNDS = 3
# If time runs out, the families that win least often are missing.
PLAN_ORDER = (
    "autopar", "FSDP", "expert parallel", "FSDP + TP", "channels", "ZeRO-2", "HSDP", "3-D by hand",
    "data parallel", "Megatron + sequence", "Megatron",
)  # fmt: skip
QUICK_PLANS = ("autopar", "FSDP", "expert parallel")
OTHER_ROWS = {
    "h200": "every step of benchmarks/one_gpu_cases.py, if there is a GPU",
    "scaling": "what `python -m benchmarks.scaling --list` shows",
    "serving": "the models of benchmarks/serving_cases.py, if there is a GPU",
}
LAST_WORDS_S = 10.0  # for a script to end by itself
GPU_LIMIT_S = 60.0  # for detecting GPUs
_PACKAGES = ("autopar", "jax", "jaxlib", "flax", "optax")


@dataclass(frozen=True)
class Options:
    """The options of the command; empty tuples mean all."""

    only: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    layers: int | None = None
    jobs: int = 2
    folder: Path = Path("autopar-bench")
    time_limit_s: float = 3600.0
    quick: bool = False
    plans: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        for part in self.only:
            if part not in PARTS:
                raise ArgumentError(
                    f"--only {part}: unknown part{near_names(part, PARTS)}. Choose from "
                    f"{', '.join(PARTS)}."
                )
        if self.only:
            return tuple(part for part in PARTS if part in self.only)
        return ("cpu", "h100") if self.quick else DEFAULT_PARTS


def rows_of(part: str, options: Options) -> list[Row]:
    """The selected rows of a part; a selection may match only other parts."""
    known: dict[str, Sequence[Row]] = {}
    if "h100" in options.parts:
        known["h100"] = QUICK_ROWS if options.quick else H100_ROWS
    if "cpu" in options.parts:
        known["cpu"] = cpu_rows(options.quick)
    parts = [name for name in options.parts if name in known]
    if not parts:
        return []
    check_names([row for name in parts for row in known[name]], options.models, options.devices)
    return chosen_rows(known.get(part, ()), options.models, options.devices, options.layers)


def run_bench(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the parts one after another; returns the document of the results file."""
    ends_s = time.time() + options.time_limit_s
    runners = {
        "cpu": _run_cpu,
        "h100": _run_h100,
        "h200": _run_h200,
        "scaling": _run_scaling,
        "serving": _run_serving,
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {}
    for part in options.parts:
        found = runners[part](options, ends_s, say)
        if found is not None:
            document[part] = {**found, "machine": machine()}
            _write(options.folder / RESULTS, document)
    return document


def machine() -> dict[str, Any]:
    """The machine and its versions, which the tables do not show."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def list_rows(options: Options) -> str:
    lines = []
    for part in options.parts:
        for row in rows_of(part, options):
            batch = row.per_device * row.devices
            lines.append(f"{part:8s} {row.model:14s} {row.devices:3d} devices, batch {batch}")
        if part in OTHER_ROWS:
            lines.append(f"{part:8s} {OTHER_ROWS[part]}")
    return "\n".join(lines)


# -- parts


def _run_h100(options: Options, ends_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    from autopar.measure.verify.targets import cuda_version, load_target
    from benchmarks.suite.compiling import AUTOPAR, TARGET, planners

    rows = rows_of("h100", options)
    try:
        cuda_version(load_target(TARGET))
    except CompileError as error:
        raise CompileError(
            "bench: the H100 rows need XLA's GPU compiler, which is not installed. Install it "
            "with: pip install 'autopar[verify]' (no GPU is needed), or leave these rows out with "
            "--only cpu."
        ) from error
    tasks: list[tuple[int, int, Task]] = []
    wanted = options.plans or (QUICK_PLANS if options.quick else ())
    check_plans(wanted)
    for row in rows:
        for who, family in planners(row):
            if wanted and family not in wanted:
                continue
            folder = options.folder / "h100" / row.name
            job = folder / f"{_slug(who)}.job"
            folder.mkdir(parents=True, exist_ok=True)
            job.write_text(json.dumps({"row": asdict(row), "who": who}), encoding="utf-8")
            result = folder / f"{_slug(who)}.json"
            arguments = ("-m", "benchmarks.suite.compiling", str(job.resolve()))
            task = Task(f"{row.name}: {who}", (*arguments, str(result.resolve())), result)
            # The longest tasks, planning for many devices, begin first.
            size = -row.devices if who == AUTOPAR else row.devices
            tasks.append((PLAN_ORDER.index(family), size, task))
    order = [task for *_, task in sorted(tasks, key=lambda one: one[:2])]
    say(f"h100: {len(order)} plans to compile, {sum(t.is_done for t in order)} done before")
    left = run_tasks(order, options.jobs, ends_s, _teller(say))
    if left:
        say(f"h100: {left} plans are left; run the same command again to continue")
    return {
        "target": "H100 80GB, 8 to a host; compiled by XLA without GPUs, not run",
        "rows": collected(options.folder / "h100", rows),
    }


def check_plans(wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in PLAN_ORDER:
            raise ArgumentError(
                f"--plans {name}: unknown plan{near_names(name, PLAN_ORDER)}. Choose from "
                f"{'; '.join(PLAN_ORDER)}."
            )


def _teller(say: Callable[[str], None]) -> Callable[[Task, str], None]:
    def tell(task: Task, problem: str) -> None:
        if problem:
            say(f"{task.name}: {problem}")
            return
        found = json.loads(task.result.read_text(encoding="utf-8"))
        results = found.get("results", [])
        results += [one for row in found.get("rows", []) for one in row["results"]]
        for one in results:
            step = f"{one['step_ms']:.1f} ms" if "step_ms" in one else one.get("note", "")
            peak = f", {one['peak_gb']:.1f} GB" if "peak_gb" in one else ""
            fits = "" if one["fits"] else ", does not fit"
            say(f"{task.name}: {one['plan']}: {step}{peak}{fits}")
        if "error" in found:
            say(f"{task.name}: {found['error']}")

    return tell


def collected(folder: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All rows with results."""
    found = []
    for row in rows:
        results: list[dict[str, Any]] = []
        versions: set[str] = set()
        for path in sorted((folder / row.name).glob("*.json")):
            document = json.loads(path.read_text(encoding="utf-8"))
            versions.add(document["jax"])
            results += document.get("results", [])
            if "error" in document:
                results.append(_failed(document))
        if results:
            line = {
                "model": row.model,
                "devices": row.devices,
                "batch": row.per_device * row.devices,
                "jax": sorted(versions),
                "results": results,
            }
            if row.layers is not None:
                line["layers"] = row.layers
            found.append(line)
    return found


def _failed(document: dict[str, Any]) -> dict[str, Any]:
    who = document["who"]
    made = {"made": document["made"]} if "made" in document else {}
    return {"plan": who, "family": who, "fits": False, "note": document["error"], **made}


def _run_cpu(options: Options, ends_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    rows = rows_of("cpu", options)
    tasks = []
    for row in rows:
        result = options.folder / "cpu" / f"{row.model}.json"
        arguments = ("-m", "benchmarks.experts.measured_cpu", "--model", row.model)
        arguments += ("--json", str(result.resolve()))
        if options.quick:
            arguments += ("--rounds", str(QUICK_ROUNDS))
        tasks.append(Task(f"cpu {row.model}", arguments, result, {"JAX_PLATFORMS": "cpu"}))
    say(f"cpu: {len(tasks)} models to measure, one after another")
    left = run_tasks(tasks, 1, ends_s, _teller(say))
    if left:
        say(f"cpu: {left} models are left; run the same command again to continue")
    found = []
    for row, task in zip(rows, tasks, strict=True):
        if task.is_done:
            document = json.loads(task.result.read_text(encoding="utf-8"))
            found += [line | {"devices": row.devices} for line in document["rows"]]
    return {"target": "8 virtual CPU devices of one process", "rows": found}


def _run_h200(options: Options, ends_s: float, say: Callable[[str], None]) -> dict[str, Any] | None:
    return _run_on_gpu("h200", "benchmarks.one_gpu", options, ends_s, say)


def _run_serving(
    options: Options, ends_s: float, say: Callable[[str], None]
) -> dict[str, Any] | None:
    return _run_on_gpu("serving", "benchmarks.serving", options, ends_s, say)


def _run_on_gpu(
    part: str, module: str, options: Options, ends_s: float, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Runs a part that has its own script, which writes rows as they come."""
    kind = gpu_kind()
    if kind is None:
        say(f"{part}: no GPU found; these rows are left out")
        return None
    result = options.folder / part / "rows.json"
    limit_s = max(1.0, ends_s - time.time() - LAST_WORDS_S)
    arguments = ("-m", module, "--json", str(result.resolve()), "--limit-s", f"{limit_s:.0f}")
    task = Task(part, arguments, result, again=part == "serving")
    run_tasks([task], 1, ends_s, lambda _, problem: say(f"{part}: {problem}") if problem else None)
    if task.log.is_file():
        say(task.log.read_text(encoding="utf-8", errors="replace"))
    if not task.is_done:
        return None
    return {"target": kind, **json.loads(result.read_text(encoding="utf-8"))}


def gpu_kind() -> str | None:
    """The GPU that JAX finds, in a separate process, so that this one does not occupy it."""
    code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    try:
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=GPU_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return None
    kind, _, name = found.stdout.strip().partition(" ")
    return name if kind == "gpu" else None


def _run_scaling(options: Options, ends_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    from benchmarks import scaling

    rows = scaling.run(
        options.folder / "scaling",
        jobs=options.jobs,
        time_limit_s=max(1.0, ends_s - time.time()),
        only=options.models or None,
    )
    return {"target": "predicted, not run", "rows": rows}


# -- files


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text.replace("×", "x")).strip("-").lower()


def _write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)


def read_results(path: Path, given_as: str = "--show") -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArgumentError(
            f"{given_as} {path}: not readable as results of `autopar bench`: {error}"
        ) from error
    if not isinstance(document, dict) or not set(document) & set(PARTS):
        raise ArgumentError(
            f"{given_as} {path}: has none of the parts {', '.join(PARTS)}, so it is not a results "
            "file of `autopar bench`."
        )
    return document


def show(document: dict[str, Any]) -> str:
    """Every table under its name."""
    return "\n".join(f"### {name}\n\n{table}" for name, table in tables_of(document).items())


def merge(document: dict[str, Any], target: Path) -> None:
    """Copies the parts of a run into a results file; its other parts stay."""
    known = read_results(target) if target.is_file() else {}
    _write(target, known | document)


def rewrite(text_file: Path, document: dict[str, Any]) -> None:
    """Writes the tables between the markers of a text."""
    text = text_file.read_text(encoding="utf-8")
    text_file.write_text(with_tables(text, tables_of(document)), encoding="utf-8")
