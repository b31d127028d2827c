"""What every executable writes for whoever looks for a mistake: a folder of files with an index.

Every file is written beside its place and then put there, so that none is ever half written. The
index, README.txt, comes last: it says what each file is, and what could not be made and why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from autopar.errors import ArgumentError
from autopar.ir.pipeline import PipelinePrograms
from autopar.progress import Progress

INDEX = "README.txt"


class DebugFile(NamedTuple):
    """A file of the folder: its name there, what it is in a sentence, and what makes its text."""

    name: str
    what: str
    make: Callable[[], str]


Describe = Callable[[Any], Iterable[DebugFile]]  # from an executable


def describe_nothing(executable: Any) -> Iterable[DebugFile]:
    return ()


def dump(
    executable: Any, directory: str | Path, programs: Iterable[DebugFile], **figures: Any
) -> None:
    """Write plan, programs and figures into a folder, which is made if need be, and whatever
    `executable.describe` adds."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"dump_debug_info({str(directory)!r}): is a file, not a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    index, failed = [], []
    files = (*_plan_files(executable, figures), *programs, *executable.describe(executable))
    with Progress(f"writing what is known of {executable.plan.name}", len(files)) as progress:
        for file in files:
            try:
                text = file.make()
            except Exception as error:  # one file less is better than none of the others
                failed.append(f"{file.name}: {type(error).__name__}: {error}")
                continue
            _write(folder / file.name, text)
            index.append((file.name, file.what))
            progress.step()
    width = max(len(name) for name, _ in index)
    lines = [f"What autopar knows of {executable.plan.name}.", ""]
    lines += [f"{name.ljust(width)}  {what}" for name, what in index]
    if failed:
        lines += ["", "Not made:", *failed]
    _write(folder / INDEX, "\n".join(lines) + "\n")


def _plan_files(executable: Any, figures: dict[str, Any]) -> Iterator[DebugFile]:
    plan = executable.plan

    def figures_text() -> str:
        known = {
            "memory_bytes": executable.memory_bytes(),
            "estimated_peak_bytes": plan.estimated_peak_bytes,
            "jax": jax.__version__,
        }
        return json.dumps({**known, **figures}, indent=1)

    yield DebugFile("plan.json", "the plan, as ParallelPlan.load reads it", plan.to_json)
    yield DebugFile("plan.txt", "the plan in words: plan.explain()", lambda: plan.explain() + "\n")
    yield DebugFile("figures.json", "memory as XLA and the plan count it", figures_text)


def program_files(name: str, annotated: Callable[[], str], optimized: Callable[[], str]) -> tuple:
    """The files of one compiled program."""
    return (
        DebugFile(f"{name}.annotated.mlir", "StableHLO with the plan's shardings", annotated),
        DebugFile(f"{name}.optimized.hlo.txt", "XLA's optimized HLO, as it runs", optimized),
    )


def instruction_files(programs: PipelinePrograms) -> Iterator[DebugFile]:
    for mesh, program in enumerate(programs.meshes):
        text = "".join(f"{instruction}\n" for instruction in program.instructions)
        what = f"what mesh {mesh} runs in every step, in order"
        yield DebugFile(f"instructions_mesh{mesh}.txt", what, lambda text=text: text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
