"""`autopar profile` without a model: from its options to a file and text."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError
from autopar.measure.profile.profile_machine import PARTS, checked_parts, profile_machine
from autopar.measure.profile.text import show_profile
from autopar.measure.profile.unfinished import part_path

OK, INTERRUPTED = 0, 130


def run_machine(arguments: Namespace) -> int:
    only = None if arguments.only is None else checked_parts(arguments.only.split(","))
    what, name, measure = (_ray if arguments.cluster == "ray" else _local)(arguments)
    output = Path(arguments.output or name)
    if not output.parent.is_dir():
        raise ArgumentError(f"--output {output}: there is no folder {output.parent}.")
    part = part_path(output)
    print(f"measuring {what}: {', '.join(only or PARTS)}; samples go to {part}", flush=True)
    try:
        profile = measure(
            output,
            quick=arguments.quick,
            only=only,
            time_limit_s=arguments.time,
            restart=arguments.restart,
            report=lambda line: print(line, flush=True),
        )
    except KeyboardInterrupt:
        print(
            f"\ninterrupted: what was measured is in {part}. The same command goes on with the "
            "rest; --restart forgets it.",
            file=sys.stderr,
        )
        return INTERRUPTED
    print()
    print(show_profile(profile))
    print(f"\nwritten: {output}")
    if part.exists():
        print(f"The same command goes on with the samples that are missing ({part}).")
    return OK


def _local(arguments: Namespace) -> tuple[str, str, Any]:
    """What is measured, in words; the file's name if none is given; the function that measures."""
    import jax

    for option in ("address", "hosts"):
        if getattr(arguments, option) is not None:
            raise ArgumentError(f"autopar profile --{option}: is for --cluster ray.")
    devices = tuple(jax.local_devices())
    wanted = len(devices) if arguments.devices is None else arguments.devices
    if wanted > len(devices):
        raise ArgumentError(f"autopar profile --devices {wanted}: there are {len(devices)} here.")
    devices, kind = devices[:wanted], devices[0].device_kind
    measure = partial(profile_machine, devices=devices)
    return f"{wanted} × {kind}", default_name(kind), measure


def _ray(arguments: Namespace) -> tuple[str, str, Any]:
    from autopar.measure.profile.cluster import profile_cluster

    measure = partial(
        profile_cluster,
        address=arguments.address,
        num_hosts=arguments.hosts,
        devices_per_host=arguments.devices,
    )
    return "a Ray cluster", "cluster.json", measure


def default_name(device_kind: str) -> str:
    """`NVIDIA H200` → `nvidia_h200.json`."""
    return (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") or "profile") + ".json"
