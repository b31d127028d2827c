"""`autopar bench`: from its options to tables, by the benchmark suite of a clone of autopar.

The suite is not part of the installed package. It is found next to it, or in the current folder.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError

OK, INCOMPLETE = 0, 1
_SUITE = "benchmarks.suite.command"  # no part of the package
_PLACE = Path(*_SUITE.split(".")).with_suffix(".py")
_HOW = (
    "bench: the benchmark suite is not part of the installed package; it runs from a clone. Use "
    "`git clone` on the repository, install it with `pip install -e '.[examples,verify]'`, and run "
    "`autopar bench` in that folder."
)


def run_bench(arguments: Namespace) -> int:
    command = find_suite()
    if arguments.show:
        document = command.read_results(Path(arguments.show))
        return _show(command, document, arguments)
    options = command.Options(
        only=_list(arguments.only),
        models=_list(arguments.models),
        devices=_numbers(arguments.devices),
        layers=arguments.layers,
        jobs=arguments.jobs,
        folder=Path(arguments.folder),
        time_limit_s=arguments.time_limit,
        quick=arguments.quick,
        plans=_list(arguments.plans, ";"),
    )
    if arguments.list:
        print(command.list_rows(options))
        return OK
    document = command.run_bench(options, lambda line: print(line, flush=True))
    print()
    return _show(command, document, arguments)


def _show(command: Any, document: dict[str, Any], arguments: Namespace) -> int:
    print(command.show(document))
    if arguments.merge_into:
        command.merge(document, Path(arguments.merge_into))
    if arguments.rewrite:
        command.rewrite(Path(arguments.rewrite), document)
    return OK if document else INCOMPLETE


def find_suite() -> Any:
    """The suite's module, from the clone that contains autopar or the current folder."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / _PLACE).is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            try:
                return import_module(_SUITE)
            except ModuleNotFoundError as error:
                raise ArgumentError(
                    f"bench: the suite's models need the package {error.name}, which is not "
                    "installed. Install it with: pip install -e '.[examples,verify]'."
                ) from error
    raise ArgumentError(_HOW)


def _list(text: str | None, separator: str = ",") -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(separator) if part.strip())


def _numbers(text: str | None) -> tuple[int, ...]:
    parts = _list(text)
    if not all(part.isdecimal() for part in parts):
        raise ArgumentError(f"--devices {text}: needs whole numbers such as 8 or 8,64.")
    return tuple(map(int, parts))
