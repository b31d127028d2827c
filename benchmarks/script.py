"""The frame of a benchmark script: its options and its results file.

    a script's docstring → argument parser; rows → JSON file

It does not import JAX, so a script can set JAX's environment first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """Described by the first line of the script's docstring, with the option `--json`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write all rows to this file")
    return parser


def check_names(
    parser: argparse.ArgumentParser, option: str, names: Iterable[str], known: Collection[str]
) -> None:
    """Ends the script if one of the names is unknown."""
    for name in names:
        if name not in known:
            parser.error(f"{option}: unknown {name!r}; choose from {', '.join(known)}")


def command_line(module: str, **placeholders: str | None) -> str:
    """The command as typed, with paths replaced: `command_line(module, FILE=options.json)`."""
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    for name, path in placeholders.items():
        command = command.replace(path, name) if path else command
    return command


def write_json(path: str | None, document: dict[str, Any]) -> None:
    """Does nothing without a path. Long scripts call it after every row."""
    if path:
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


def read_rows(path: str | None) -> Any:
    """The rows that an earlier run wrote to the file; None if there are none."""
    if path and Path(path).exists():
        return json.loads(Path(path).read_text())["rows"]
    return None
