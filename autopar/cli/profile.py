"""`autopar profile`: which of its forms was asked for, and on which devices.

autopar profile                          the machine                 autopar.measure.profile
autopar profile --show FILE              a file of such a run
autopar profile --model F                a model's segments
autopar profile --model F --enumerate    a model's strategies
autopar profile --database | --forget    what was timed before
"""

from __future__ import annotations

from argparse import Namespace

from autopar.cli.devices import use_devices
from autopar.errors import ArgumentError

OK = 0

_MACHINE = ("output", "quick", "only", "time", "restart", "address", "hosts", "devices")
_MODEL = ("set", "mesh", "profile", "json")
# The options that each form takes.
_TAKES = {
    "show": ("show",),
    "database": ("database", "forget"),
    "enumerate": ("model", *_MODEL, "enumerate", "limit", "devices"),
    "segments": ("model", *_MODEL, "passes", "folder", "top", "jobs", "check", "devices"),
    "machine": _MACHINE,
}


def run_profile(arguments: Namespace) -> int:
    form = form_of(arguments)
    match form:
        case "show":
            from autopar.ir.profile import find_profile
            from autopar.measure.profile import show_profile

            print(show_profile(find_profile(arguments.show)))
            return OK
        case "machine":
            from autopar.measure.profile.command import run_machine

            if arguments.cluster == "local":
                use_devices(arguments.platform)
            return run_machine(arguments)
        case "segments":
            from autopar.cli.segments import run_segments

            return run_segments(arguments)
        case "enumerate":
            use_devices(arguments.platform)
            from autopar.cli.enumerate import run_enumerate

            return run_enumerate(arguments)
        case "database":
            from autopar.cli.enumerate import run_database

            return run_database(arguments)
        case _:
            raise AssertionError(form)


def form_of(arguments: Namespace) -> str:
    """The form that the options belong to; options of two forms are an error."""
    if arguments.show is not None:
        form = "show"
    elif arguments.database or arguments.forget:
        form = "database"
    elif arguments.enumerate:
        form = "enumerate"
    elif arguments.model is not None:
        form = "segments"
    else:
        form = "machine"
    known = {name for names in _TAKES.values() for name in names}
    for name in sorted(known - set(_TAKES[form])):
        if getattr(arguments, name) not in (None, False, []):
            fitting = [other for other, names in _TAKES.items() if name in names]
            raise ArgumentError(
                f"autopar profile --{name}: is an option of {_NAMES[fitting[0]]}, but the others "
                f"ask for {_NAMES[form]}. Leave one of them out."
            )
    if form == "enumerate" and arguments.model is None:
        raise ArgumentError("autopar profile --enumerate: needs --model FACTORY.")
    return form


_NAMES = {
    "show": "--show",
    "database": "--database",
    "enumerate": "--model … --enumerate",
    "segments": "--model …",
    "machine": "a measurement of the machine",
}
