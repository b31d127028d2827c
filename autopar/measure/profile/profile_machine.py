"""A machine is measured: from devices to a `MachineProfile`, sample by sample.

Samples are written as they come (`unfinished`), so an interrupted run can continue. Samples that do
not fit into memory or cannot run on these devices are skipped, with a note in the profile. Noisy
samples are taken again at the end; notes name those that stay noisy.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from autopar.errors import ArgumentError, ProfileError, near_names
from autopar.ir.profile import MachineProfile, check_profile, load_profile
from autopar.measure.profile.hardware import (
    Hardware,
    abilities,
    check_same,
    hardware_of,
    profile_of,
)
from autopar.measure.profile.local import LocalMachine
from autopar.measure.profile.repeating import PACES, Bench
from autopar.measure.profile.samples import GROUPS, PlannedSample, planned_samples
from autopar.measure.profile.text import describe, range_line, times_of
from autopar.measure.profile.unfinished import TakenSample, UnfinishedProfile, part_path
from autopar.session import checked_devices

PARTS = ("overheads", "memory", *GROUPS)
_AGAIN = 0.9  # of the time limit; the rest is for taking noisy samples again
_NAMED = 8  # samples that a note names
_MOST_FAILURES = 8  # in a row, other than for memory: the devices are gone

Report = Callable[[str], None]


def profile_machine(
    output: str | Path | None = None,
    *,
    devices: Sequence[Any] | None = None,
    quick: bool = False,
    only: Sequence[str] | None = None,
    time_limit_s: float | None = None,
    restart: bool = False,
    report: Report | None = None,
) -> MachineProfile:
    """Measure the devices of this process, all of them or some.

    output:       the file to write. An unfinished earlier run (`output`.part) is continued. None
                  writes nothing.
    quick:        take few samples, in about a minute.
    only:         measure some of PARTS, and keep the others of an existing `output`.
    time_limit_s: stop after this time with what was measured; another run continues.
    restart:      discard an unfinished run.
    report:       is called with lines of text about the results.

    Returns the profile. Raises `ProfileError` if an unfinished run, or an existing file, is of
    other hardware or versions.
    """
    used = checked_devices("profile_machine", jax.local_devices() if devices is None else devices)
    hardware = hardware_of(used)
    capability = str(getattr(used[0], "compute_capability", "0"))
    pace = PACES["gpu" if hardware.platform == "gpu" else "cpu", quick]
    return ProfileRun(
        hardware,
        LocalMachine(Bench(used, pace)),
        planned_samples(abilities(hardware, capability), quick),
        output=None if output is None else Path(output),
        only=checked_parts(only),
        time_limit_s=checked_limit(time_limit_s),
        restart=restart,
        report=report or (lambda line: None),
    ).finish()


def checked_limit(time_limit_s: float | None) -> float | None:
    if time_limit_s is not None and not time_limit_s > 0:
        raise ArgumentError(f"time_limit_s={time_limit_s!r}: needs seconds > 0.")
    return time_limit_s


def checked_parts(only: Sequence[str] | None) -> tuple[str, ...]:
    if only is None:
        return PARTS
    for part in only:
        if part not in PARTS:
            raise ArgumentError(
                f"only={part!r}: unknown part of a profile{near_names(part, PARTS)}; choose from "
                f"{', '.join(PARTS)}."
            )
    return tuple(only)


@dataclass
class ProfileRun:
    """One call of `profile_machine`."""

    hardware: Hardware
    machine: Any  # as LocalMachine is
    planned: list[PlannedSample]
    output: Path | None
    only: tuple[str, ...]
    time_limit_s: float | None
    restart: bool
    report: Report
    notes: list[str] = field(default_factory=list)
    failures: int = 0  # in a row
    started_s: float = field(default_factory=time.perf_counter)

    def finish(self) -> MachineProfile:
        base = self._base()
        part = None if self.output is None else part_path(self.output)
        file = UnfinishedProfile(part, self.hardware, restart=self.restart)
        if file.taken:
            self.report(f"continuing with {len(file.taken)} samples of {file.path}")
        others = self.machine.disturbed_by()
        if others:
            self.notes.append(f"other processes used the devices: {'; '.join(others[:3])}")
            self.report(f"warning: {self.notes[-1]}")
        self._scalars(file)
        wanted = [planned for planned in self.planned if planned.group in self.only]
        is_whole = self._samples(file, wanted)
        self._noisy_again(file, wanted)
        profile = self._profile(base, file, wanted)
        check_profile(profile)
        if self.output is not None:
            profile.save(self.output)
            profile = replace(profile, name=self.output.name)
            if is_whole:
                file.remove()
        return profile

    def _base(self) -> MachineProfile:
        """The existing file, whose other parts are kept, or an empty profile."""
        if self.output is None or self.only == PARTS or not self.output.exists():
            return profile_of(self.hardware)
        there = load_profile(self.output)
        check_same(str(self.output), self.hardware, there)
        return there

    def _left_s(self, share: float = 1.0) -> float:
        if self.time_limit_s is None:
            return float("inf")
        return share * self.time_limit_s - (time.perf_counter() - self.started_s)

    def _scalars(self, file: UnfinishedProfile) -> None:
        launch = self.machine.launch()  # other samples need it
        if "overheads" in self.only:
            file.set("launch_s", launch)
            file.set("dispatch_s", self.machine.dispatch())
            dispatch = file.scalars["dispatch_s"].seconds
            self.report(
                f"launching a kernel takes {launch.seconds * 1e6:.1f} µs, a program "
                f"{dispatch * 1e6:.0f} µs"
            )
        if "memory" in self.only:
            memory = self.machine.memory()
            file.set("usable_memory_bytes", memory)
            known = "unknown" if memory is None else f"{memory / 1e9:.1f} GB"
            self.report(f"usable memory per device: {known}")

    def _samples(self, file: UnfinishedProfile, wanted: list[PlannedSample]) -> bool:
        """Take samples; whether all were taken within the time limit."""
        batches: dict[tuple[int, str], list[PlannedSample]] = {}
        for planned in wanted:
            batches.setdefault((planned.round, planned.group), []).append(planned)
        for (_, group), batch in batches.items():
            taken: list[Any] = []
            began_s = time.perf_counter()
            for planned in batch:
                if planned.sample in file.taken:
                    continue
                if self._left_s(_AGAIN) <= 0:
                    self._tell(group, taken, began_s)
                    missing = sum(p.sample not in file.taken for p in wanted)
                    self.notes.append(
                        f"stopped at the time limit of {self.time_limit_s:.0f} s, with {missing} "
                        f"of {len(wanted)} samples missing"
                    )
                    self.report(self.notes[-1])
                    return False
                sample = self._take(planned)
                file.add(TakenSample(planned, sample))
                taken += [sample] if sample is not None else []
            self._tell(group, taken, began_s)
        return True

    def _tell(self, group: str, taken: list[Any], began_s: float) -> None:
        if taken:
            seconds = time.perf_counter() - began_s
            self.report(f"{range_line(group, taken)}   ({seconds:.0f} s)")

    def _take(self, planned: PlannedSample, num_samples: int | None = None) -> Any:
        """The sample, or None if the devices cannot run it."""
        try:
            sample = self.machine.take(planned, num_samples)
            self.failures = 0
            return sample
        except ProfileError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            text = f"{type(error).__name__}: {lines[0]}"
            if "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower():
                text = "out of memory"
            else:
                self.failures += 1
            if self.failures == _MOST_FAILURES:
                raise ProfileError(
                    f"{_MOST_FAILURES} samples in a row failed, the last with {text}. Earlier "
                    "samples are kept; the same call continues."
                ) from error
            self.notes.append(f"skipped {describe(planned.sample)}: {text[:200]}")
            self.report(f"  {self.notes[-1]}")
            return None

    def _noisy_again(self, file: UnfinishedProfile, wanted: list[PlannedSample]) -> None:
        samples = {planned.sample for planned in wanted}
        noisy = [
            taken
            for key, taken in file.taken.items()
            if key in samples and taken.sample is not None and _spread(taken.sample) is not None
        ]
        if not noisy:
            return
        self.report(f"taking {len(noisy)} noisy samples again")
        noisy.sort(
            key=lambda taken: (taken.planned.group == "crossings", -(_spread(taken.sample) or 0))
        )
        still = []
        for taken in noisy:
            again = self._take(taken.planned, 11) if self._left_s() > 0 else None
            if again is not None and _is_better(again, taken.sample):
                taken = TakenSample(taken.planned, again)
                file.add(taken)
            if _spread(taken.sample) is not None:
                still.append(taken.sample)
        if still:
            named = ", ".join(describe(sample) for sample in still[:_NAMED])
            more = f" and {len(still) - _NAMED} more" if len(still) > _NAMED else ""
            self.notes.append(
                f"{len(still)} of {len(wanted)} samples have a spread above 10 %, perhaps because "
                f"the devices were busy: {named}{more}"
            )
            self.report(f"warning: {self.notes[-1]}")

    def _profile(
        self, base: MachineProfile, file: UnfinishedProfile, wanted: list[PlannedSample]
    ) -> MachineProfile:
        groups: dict[str, Any] = {}
        for group in GROUPS:
            if group in self.only:
                samples = [
                    file.taken[p.sample].sample
                    for p in wanted
                    if p.group == group and p.sample in file.taken
                ]
                groups[group] = tuple(sample for sample in samples if sample is not None)
        kept = () if self.only == PARTS else base.notes
        return replace(
            base,
            **groups,
            **file.scalars,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            seconds=round(time.perf_counter() - self.started_s, 1),
            notes=(*kept, *self.notes),
        )


def _is_better(again: Any, before: Any) -> bool:
    """Whether a repetition of a noisy sample replaces it: other work only adds to the time."""
    again_s, before_s = (times_of(sample)[0].seconds for sample in (again, before))
    return again_s <= before_s or (_spread(again) is None and again_s < 1.1 * before_s)


def _spread(sample: Any) -> float | None:
    """The widest spread of a sample's times if it is noisy, else None."""
    widest = max((time for time in times_of(sample)), key=lambda time: time.spread)
    return widest.spread if widest.is_noisy else None
