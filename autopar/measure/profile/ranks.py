"""Profiles of ranks: from the processes of `jax.distributed` to one `MachineProfile`.

Rank 0 goes through the samples, as `profile_machine` does, and writes the file. Before each it
tells the others what comes next; then all of them take the sample together, on one mesh of all
devices. Times are those of the slowest rank (`rank_group`), so all ranks decide alike.

Transfers between meshes are timed as collective-permutes from one half of the ranks to the other:
both are NCCL's sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from autopar.errors import ProfileError
from autopar.ir.codec import decode, encode
from autopar.ir.profile import MachineProfile, Timing
from autopar.measure.profile import overheads
from autopar.measure.profile.hardware import Hardware, abilities, hardware_of_ranks
from autopar.measure.profile.local import LocalMachine
from autopar.measure.profile.profile_machine import ProfileRun, Report, checked_limit, checked_parts
from autopar.measure.profile.rank_group import RankFailure, RankGroup
from autopar.measure.profile.repeating import PACES, Bench
from autopar.measure.profile.samples import PlannedSample, planned_samples
from autopar.measure.profile.unfinished import SAMPLES

QUICK_LIMIT_S = 150.0
PERMUTED = "transfers between meshes were timed as collective-permutes between ranks"


def profile_ranks(
    output: str | Path | None = None,
    *,
    quick: bool = False,
    only: Sequence[str] | None = None,
    time_limit_s: float | None = None,
    restart: bool = False,
    report: Report | None = None,
) -> MachineProfile | None:
    """Measure all devices of all processes of `jax.distributed`. Every process calls this, with
    the same arguments; they are as for `profile_machine`, but `quick` has a time limit of
    `QUICK_LIMIT_S` by default. Rank 0 writes the file and returns the profile, the others return
    None."""
    parts, limit_s = checked_parts(only), checked_limit(time_limit_s)
    if limit_s is None and quick:
        limit_s = QUICK_LIMIT_S
    group = RankGroup()
    machine = RankMachine(group, quick)
    hardware = machine.hardware
    if group.rank != 0:
        machine.follow()
        return None
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "0"))
    planned = planned_samples(replace(abilities(hardware, capability), are_ranks=True), quick)
    notes = [PERMUTED] if "crossings" in parts and hardware.num_devices > 1 else []
    run = ProfileRun(
        hardware,
        machine,
        planned,
        output=None if output is None else Path(output),
        only=parts,
        time_limit_s=limit_s,
        restart=restart,
        report=report or (lambda line: None),
        notes=notes,
    )
    try:
        profile = run.finish()
    except Exception as error:
        machine.end(str(error))
        raise
    machine.end()
    return profile


class RankMachine:
    """Takes samples on the devices of all ranks; as `LocalMachine`. Rank 0 calls its methods, and
    the others `follow`."""

    def __init__(self, group: RankGroup, quick: bool) -> None:
        self.group = group
        self.hardware: Hardware = hardware_of_ranks(tuple(jax.devices()))
        kinds = sorted(set(group.gather(self.hardware.device_kind)))
        if len(kinds) > 1:
            raise ProfileError(
                f"profile: the ranks have different devices: {', '.join(kinds)}. Start ranks on "
                "devices of one kind."
            )
        pace = PACES["gpu" if self.hardware.platform == "gpu" else "cpu", quick]
        share = self.hardware.gpu_share
        bench = Bench(
            tuple(jax.devices()),
            pace,
            group=group,
            share=1.0 if share is None else 1 / share.num_ranks,
        )
        self._machine = LocalMachine(bench)

    def launch(self) -> Timing:
        return self._order("launch")

    def dispatch(self) -> Timing:
        return self._order("dispatch")

    def memory(self) -> float | None:
        return self._order("memory")

    def disturbed_by(self) -> list[str]:
        """Other processes on the GPUs; nvidia-smi cannot tell them from ranks."""
        return []

    def take(self, planned: PlannedSample, num_samples: int | None = None) -> Any:
        sample = encode(planned.sample)
        return self._order("take", planned.round, planned.group, sample, num_samples)

    def end(self, why: str = "") -> None:
        """Tell the others that there is nothing more to do."""
        self.group.from_first(["end", why])

    def follow(self) -> None:
        """Do what rank 0 says, until it ends."""
        while True:
            command, *arguments = self.group.from_first()
            if command == "end":
                if arguments[0]:
                    raise ProfileError(f"profile: rank 0 failed: {arguments[0]}")
                return
            try:
                self._do(command, *arguments)
            except RankFailure:
                continue  # rank 0 skips the sample

    def _order(self, command: str, *arguments: Any) -> Any:
        self.group.from_first([command, *arguments])
        return self._do(command, *arguments)

    def _do(self, command: str, *arguments: Any) -> Any:
        work = {
            "launch": self._machine.launch,
            "dispatch": self._machine.dispatch,
            "memory": self._least_memory,
            "take": self._taken,
        }[command]
        return self.group.together(lambda: work(*arguments))

    def _taken(self, round: int, group: str, sample: Any, num_samples: int | None) -> Any:
        planned = PlannedSample(round, group, decode(SAMPLES[group], sample))
        return self._machine.take(planned, num_samples)

    def _least_memory(self) -> float | None:
        """All ranks try at the same time."""
        bench = self._machine.bench
        found = overheads.measure_memory(bench, self.hardware.devices_per_host)
        return min((n for n in self.group.gather(found) if n is not None), default=None)
