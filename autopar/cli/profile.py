"""`autopar profile`: from its options to one of its forms.

autopar profile                          measures the machine          cli.profile_machine
autopar profile --ranks N                measures N ranks together     cli.profile_ranks
autopar profile --show FILE              shows a machine profile
autopar profile --model F                times a model's segments      cli.segments
autopar profile --model F --enumerate    times a model's strategies    cli.enumerate
autopar profile --database | --forget    lists or clears timed plans   cli.enumerate
"""

from __future__ import annotations

from argparse import Namespace

from autopar.cli.devices import use_devices
from autopar.errors import ArgumentError

OK = 0

_MACHINE = (
    *("output", "quick", "only", "time", "restart", "address", "hosts", "devices"),
    *("ranks", "nccl", "no_mps"),
)
_MODEL = ("set", "mesh", "profile", "json")
# Form -> its options.
_OPTIONS = {
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
            from autopar.measure.profile.text import show_profile

            print(show_profile(find_profile(arguments.show)))
            return OK
        case "machine":
            from autopar.cli.profile_ranks import is_rank, run_on_ranks

            if arguments.ranks is not None:
                return run_on_ranks(arguments)
            for option in ("nccl", "no_mps"):
                if getattr(arguments, option):
                    raise ArgumentError(f"autopar profile {_flag(option)}: needs --ranks.")
            from autopar.cli.profile_machine import run_machine

            if arguments.cluster == "local" and not is_rank():
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
    """The form that the options belong to. Options of another form are an error."""
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
    known = {name for names in _OPTIONS.values() for name in names}
    for name in sorted(known - set(_OPTIONS[form])):
        if getattr(arguments, name) not in (None, False, []):
            other = next(other for other, names in _OPTIONS.items() if name in names)
            raise ArgumentError(
                f"autopar profile {_flag(name)}: belongs to {_NAMES[other]}, but the other options "
                f"belong to {_NAMES[form]}. Leave one of them out."
            )
    if form == "enumerate" and arguments.model is None:
        raise ArgumentError("autopar profile --enumerate: needs --model FACTORY.")
    return form


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_NAMES = {
    "show": "--show",
    "database": "--database",
    "enumerate": "--model … --enumerate",
    "segments": "--model …",
    "machine": "a measurement of the machine",
}
