"""`autopar profile` without a model: from its options to a file and text."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path

from autopar.errors import ArgumentError
from autopar.profiling.hardware import hardware_of
from autopar.profiling.part_file import part_path
from autopar.profiling.running import PARTS, checked_parts, profile_machine
from autopar.profiling.show import show_profile

OK, INTERRUPTED = 0, 130


def run_machine(arguments: Namespace) -> int:
    only = None if arguments.only is None else checked_parts(arguments.only.split(","))
    if arguments.cluster == "local" and (arguments.address or arguments.hosts):
        raise ArgumentError("autopar profile --address and --hosts: are for --cluster ray.")
    import jax

    devices = tuple(jax.local_devices())
    if arguments.devices is not None:
        if arguments.devices > len(devices):
            raise ArgumentError(
                f"autopar profile --devices {arguments.devices}: there are {len(devices)} here."
            )
        devices = devices[: arguments.devices]
    output = Path(arguments.output or default_name(devices[0].device_kind))
    if not output.parent.is_dir():
        raise ArgumentError(f"--output {output}: there is no folder {output.parent}.")
    hardware = hardware_of(devices)
    print(
        f"measuring {len(devices)} {hardware.device_kind} device(s), "
        f"{', '.join(only or PARTS)}; samples go to {part_path(output)}",
        flush=True,
    )
    try:
        profile = profile_machine(
            output,
            devices=devices,
            quick=arguments.quick,
            only=only,
            time_limit_s=arguments.time,
            restart=arguments.restart,
            report=lambda line: print(line, flush=True),
        )
    except KeyboardInterrupt:
        print(
            f"\ninterrupted: what was measured is in {part_path(output)}. The same command goes on "
            "with the rest; --restart forgets it.",
            file=sys.stderr,
        )
        return INTERRUPTED
    print()
    print(show_profile(profile))
    print(f"\nwritten: {output}")
    if part_path(output).exists():
        print(f"The same command goes on with the samples that are missing ({part_path(output)}).")
    return OK


def default_name(device_kind: str) -> str:
    """`NVIDIA H200` → `nvidia_h200.json`."""
    return (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") or "profile") + ".json"
