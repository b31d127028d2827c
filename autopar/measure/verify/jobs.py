"""The input and output of a compiling process: `CompileJob` and `ProgramCosts`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.devices import DeviceSpec
from autopar.ir.judged import JudgedStep
from autopar.ir.remote import ProgramSpec


@dataclass(frozen=True)
class CompileJob:
    """A program to compile.

    program:  serialized by `jax.export`.
    topology: hosts and devices per host of its mesh.
    device:   whose rates the judge reads the program with; None: it is not judged.
    hlo_file: where to write XLA's optimized HLO, unless empty.
    """

    name: str
    spec: ProgramSpec
    program: bytes
    topology: tuple[int, int]
    target_config: str
    hlo_file: str = ""
    device: DeviceSpec | None = None


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind: how many, and the bytes that a device sends in them."""

    kind: str
    count: float
    sent_bytes: float


@dataclass(frozen=True)
class ProgramCosts:
    """XLA's costs of a compiled program, per device and run. An output in a donated argument counts
    in `argument_bytes`, `output_bytes` and `alias_bytes`."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    collectives: tuple[Collectives, ...]
    dot_flops: float
    seconds: float  # of compiling
    times: JudgedStep | None = None  # as the judge reads XLA's schedule, one run

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes
