"""The file of an unfinished run: FILE.part, a line of JSON per sample, in the order taken.

The first line is the hardware. An interrupted run continues from the file; a truncated last line is
dropped. When all samples are taken, the profile is written and this file removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ProfileError
from autopar.ir.codec import decode, encode
from autopar.ir.profile import (
    AttentionTime,
    CollectiveTime,
    ConvolutionTime,
    CrossingSample,
    ProductTime,
    StreamTime,
    Timing,
)
from autopar.measure.profile.hardware import Hardware, check_same
from autopar.measure.profile.samples import PlannedSample

SAMPLES = {
    "products": ProductTime,
    "convolutions": ConvolutionTime,
    "streams": StreamTime,
    "attentions": AttentionTime,
    "collectives": CollectiveTime,
    "crossings": CrossingSample,
}
SCALARS = ("launch_s", "dispatch_s", "usable_memory_bytes")
_KIND = "autopar unfinished profile"


@dataclass(frozen=True)
class TakenSample:
    """`sample`: with its time; None if it did not fit into memory."""

    planned: PlannedSample
    sample: Any


def part_path(output: str | Path) -> Path:
    output = Path(output)
    return output.with_name(output.name + ".part")


class UnfinishedProfile:
    """The samples so far, in memory and, unless `path` is None, in the file."""

    def __init__(self, path: Path | None, hardware: Hardware, *, restart: bool = False) -> None:
        self.path = path
        self.taken: dict[Any, TakenSample] = {}  # by the sample without its time
        self.scalars: dict[str, Any] = {}
        if path is None:
            return
        if restart:
            path.unlink(missing_ok=True)
        if path.exists():
            self._read(path, hardware)
        else:
            self._write({"kind": _KIND, **encode(hardware)})

    def add(self, taken: TakenSample) -> None:
        self.taken[taken.planned.sample] = taken
        planned = taken.planned
        body = None if taken.sample is None else encode(taken.sample)
        self._write(
            {
                "round": planned.round,
                "group": planned.group,
                "planned": encode(planned.sample),
                "sample": body,
            }
        )

    def set(self, name: str, value: Any) -> None:
        self.scalars[name] = value
        self._write({"name": name, "value": encode(value) if isinstance(value, Timing) else value})

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self, body: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(body) + "\n")
        except OSError as error:
            raise ProfileError(f"{self.path}: cannot write samples: {error}") from error

    def _read(self, path: Path, hardware: Hardware) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path}: cannot read the file ({error}); see --restart.") from error
        lines = text.splitlines()
        if text and not text.endswith("\n"):  # the run was killed while writing
            lines.pop()
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if not lines:
            self._write({"kind": _KIND, **encode(hardware)})
            return
        head = self._parsed(path, 1, lines[0], _head)
        check_same(str(path), hardware, head)
        for number, line in enumerate(lines[1:], 2):
            self._parsed(path, number, line, self._take)

    def _parsed(self, path: Path, number: int, line: str, read: Callable[[Any], Any]) -> Any:
        try:
            return read(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ProfileError(
                f"{path}, line {number}: not a line of an unfinished profile ({error}). Start "
                "over with --restart."
            ) from error

    def _take(self, body: dict[str, Any]) -> None:
        if "name" in body:
            name, value = body["name"], body["value"]
            if name not in SCALARS:
                raise ValueError(f"{name!r} is not one of {SCALARS}")
            self.scalars[name] = decode(Timing, value) if isinstance(value, dict) else value
            return
        kind = SAMPLES[body["group"]]
        planned = PlannedSample(int(body["round"]), body["group"], decode(kind, body["planned"]))
        sample = None if body["sample"] is None else decode(kind, body["sample"])
        self.taken[planned.sample] = TakenSample(planned, sample)


def _head(body: dict[str, Any]) -> Hardware:
    if body.pop("kind", None) != _KIND:
        raise ValueError("another kind of file")
    return decode(Hardware, body)
