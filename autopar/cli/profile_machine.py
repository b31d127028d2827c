"""`autopar profile` without a model: from its options to a profile file and text."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.cli.devices import first_devices
from autopar.cli.profile_ranks import is_rank
from autopar.errors import ArgumentError
from autopar.measure.profile.profile_machine import PARTS, checked_parts, profile_machine
from autopar.measure.profile.text import show_profile
from autopar.measure.profile.unfinished import part_path

OK, INTERRUPTED = 0, 130


def run_machine(arguments: Namespace) -> int:
    only = None if arguments.only is None else checked_parts(arguments.only.split(","))
    is_local = arguments.cluster == "local"
    machine_of = _ray if not is_local else _rank if is_rank() else _local
    what, name, measure = machine_of(arguments)
    output = Path(arguments.output or name)
    if not output.parent.is_dir():
        raise ArgumentError(f"--output {output}: the folder {output.parent} does not exist.")
    part = part_path(output)
    if what:
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
            f"\ninterrupted: samples are in {part}. The same command continues; --restart discards "
            "them.",
            file=sys.stderr,
        )
        return INTERRUPTED
    if profile is None:  # rank 0 has it
        return OK
    print()
    print(show_profile(profile))
    print(f"\nwritten: {output}")
    if part.exists():
        print(f"Some samples are missing; the same command continues ({part}).")
    return OK


def _local(arguments: Namespace) -> tuple[str, str, Any]:
    """A description, the default file name, and the function that measures."""
    for option in ("address", "hosts"):
        if getattr(arguments, option) is not None:
            raise ArgumentError(f"autopar profile --{option}: needs --cluster ray.")
    devices = first_devices(arguments.devices)
    kind = devices[0].device_kind
    measure = partial(profile_machine, devices=devices)
    return f"{len(devices)} × {kind}", default_name(kind), measure


def _rank(arguments: Namespace) -> tuple[str, str, Any]:
    """As `_local`, in one of several processes; only rank 0 prints a description."""
    import jax

    from autopar.measure.profile.ranks import profile_ranks

    for option in ("address", "hosts", "devices"):
        if getattr(arguments, option) is not None:
            raise ArgumentError(f"autopar profile --{option}: ranks measure all their devices.")
    jax.distributed.initialize()
    count, kind = jax.device_count(), jax.devices()[0].device_kind
    what = f"{count} ranks of {kind}" if jax.process_index() == 0 else ""
    return what, default_name(f"{kind} {count} ranks"), profile_ranks


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
