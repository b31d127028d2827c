"""From `DebugFile`s to a folder: what `executable.dump_debug_info(folder)` writes.

The index, README.txt, is written last. It explains each file, and lists the files that could not be
made, with the reason. No file is ever half written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from autopar.errors import ArgumentError
from autopar.ir.files import write_whole
from autopar.progress import Progress

INDEX = "README.txt"


class DebugFile(NamedTuple):
    """A file of the folder: its name, a line that explains it, and what makes its text."""

    name: str
    what: str
    make: Callable[[], str]


def write_folder(step_name: str, directory: str | Path, files: Sequence[DebugFile]) -> None:
    """Write files into a folder, which is created if needed, and an index of them."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(
            f"dump_debug_info({str(directory)!r}): this is a file. Give the path of a folder, "
            "which need not exist yet."
        )
    folder.mkdir(parents=True, exist_ok=True)
    index, failed = [], []
    with Progress(f"writing debug information about {step_name}", len(files)) as progress:
        for file in files:
            try:
                text = file.make()
            except Exception as error:  # write the other files all the same
                failed.append(f"{file.name}: {type(error).__name__}: {error}")
                continue
            write_whole(folder / file.name, text)
            index.append((file.name, file.what))
            progress.step()
    width = max(len(name) for name, _ in index)
    lines = [f"What autopar knows about {step_name}.", ""]
    lines += [f"{name.ljust(width)}  {what}" for name, what in index]
    if failed:
        lines += ["", "Not made:", *failed]
    write_whole(folder / INDEX, "\n".join(lines) + "\n")
